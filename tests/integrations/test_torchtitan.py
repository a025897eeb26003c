"""torchtitan's Trainer with the operator as its loss takes the steps of its own chunked loss, under FSDP2.

torchtitan is not among the pinned packages: version 0.3 needs datasets<4.8, and so another huggingface_hub than
Transformers. To run this test, install beside the pinned packages: `pip install --no-deps torchtitan spmd_types==0.2.3
torchdata torch_checkpointing tyro docstring_parser typeguard tensorboard protobuf absl-py`.
"""

import os
from dataclasses import dataclass

import pytest

pytest.importorskip("torchtitan", reason="torchtitan 0.3 does not install beside the pinned Transformers")

import torch
import torch._utils
import torch.multiprocessing as mp

if not torch.cuda.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"  # without an accelerator torchtitan takes "cuda"

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from flce_ops.integrations.torchtitan import LinearCrossEntropyLoss

# B batch, T tokens, D hidden, V vocabulary

STEPS, WORLD = 3, 2
BATCH, TOKENS, VOCAB = 2, 32, 2048


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config): ...

    def __init__(self, config, **_) -> None:
        super().__init__()

    def encode(self, *args, **kwargs): ...

    def decode(self, *args, **kwargs): ...

    def get_vocab_size(self) -> int:
        return VOCAB


class Batches(BaseDataLoader):
    """Each rank has different tokens and a different number of targets."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config): ...

    def __init__(self, config, *, dp_rank: int, **_) -> None:
        self.rank = dp_rank

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            tokens = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=generator)
            labels = tokens[:, 1:].clone()
            labels[0, : 5 + 9 * self.rank] = -100
            yield {"input": tokens[:, :-1].contiguous()}, labels

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict) -> None: ...


class NoMonitor:
    """Stands in for the monitor of a device's memory."""

    device_name = "cpu"

    def __getattr__(self, name: str):
        return lambda: metrics.DeviceMemStats(*[0.0] * len(metrics.DeviceMemStats._fields))


def make_config(loss, folder: str) -> Trainer.Config:
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss = loss
    config.tokenizer, config.dataloader = Tokenizer.Config(), Batches.Config()
    config.dump_folder = folder
    config.training.local_batch_size, config.training.seq_len, config.training.steps = BATCH, TOKENS, STEPS
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    # the default, spmd_types, asks FSDP2 for a feature that torch 2.13 lacks, with any loss
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    config.checkpoint.enable = config.validator.enable = False
    config.activation_checkpoint = None
    config.debug.seed = 7
    return config


def train(rank: int, port: int, loss, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    metrics.build_device_memory_monitor = NoMonitor
    dist_utils.set_pg_timeouts = lambda **_: None  # the barrier in it needs the index of a device
    trainer = Trainer(make_config(loss, folder))
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has only sums
    before = whole_parameters(trainer)
    losses = []
    step_of_trainer = trainer.forward_backward_step

    def noted(**kwargs):
        losses.append(step_of_trainer(**kwargs).detach())
        return losses[-1]

    trainer.forward_backward_step = noted
    trainer.train()
    changes = {name: after - before[name] for name, after in whole_parameters(trainer).items()}
    torch.save((torch.stack(losses), changes), f"{folder}/{type(loss).__qualname__}{rank}.pt")
    trainer.close()


def whole_parameters(trainer) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in trainer.model_parts[0].named_parameters()}


def test_the_steps_are_those_of_the_chunked_loss(tmp_path):
    theirs = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCAB))
    ours = LinearCrossEntropyLoss.Config()
    for port, loss in enumerate((theirs, ours), start=29500 + os.getpid() % 1000):
        mp.spawn(train, (port, loss, str(tmp_path)), nprocs=WORLD)
    for rank in range(WORLD):
        (our_losses, our), (their_losses, their) = (
            torch.load(tmp_path / f"{type(loss).__qualname__}{rank}.pt") for loss in (ours, theirs)
        )
        torch.testing.assert_close(our_losses, their_losses, rtol=1e-6, atol=0)
        assert our_losses.shape == (STEPS,)
        for name, expected in their.items():
            # 1.1e-5 was seen; AdamW divides a gradient by its size, which shows the rounding of small gradients
            assert (our[name] - expected).norm() <= 1e-4 * expected.norm() > 0, name


def test_a_head_that_is_not_linear_is_refused():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    loss = LinearCrossEntropyLoss.Config().build(compile_config=None)
    with pytest.raises(NotImplementedError, match="expected lm_head to compute input @ weight.T"):
        loss.set_lm_head(Scaled(4, 5))
    with pytest.raises(RuntimeError, match="call set_lm_head first"):
        loss(torch.randn(1, 2, 4), torch.zeros(1, 2, dtype=torch.long))


def test_a_shard_of_the_vocabulary_is_refused():
    head = nn.Linear(4, 6)
    head.weight = nn.Parameter(head.weight[:3].detach())
    loss = LinearCrossEntropyLoss.Config().build(compile_config=None)
    loss.set_lm_head(head)
    with pytest.raises(NotImplementedError, match="expected all 6 classes of lm_head on this rank, got 3"):
        loss(torch.randn(1, 2, 4), torch.zeros(1, 2, dtype=torch.long))
