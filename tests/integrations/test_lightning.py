"""Lightning's strategies around the modules take the same steps as one process with dense logits."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from process_pool import run_in_world
from torch import nn

import flce_ops

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

# B batch, T tokens, D hidden, V vocabulary

B, T, D, V, STEPS, RANKS = 4, 8, 16, 61, 3, 2


def test_the_steps_of_its_strategies_are_those_of_one_process():
    run_in_world(("cpu", RANKS), train_by_each)


def train_by_each(device):
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    class Model(lightning.LightningModule):
        def __init__(self, sharded: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(V, D), flce_ops.LinearCrossEntropyHead(D, V)
            self.sharded = sharded

        def configure_model(self):
            if self.sharded and not isinstance(self.head.weight, DTensor):
                for module in (self.embed, self.head):
                    fully_shard(module, mesh=self.device_mesh["data_parallel"]).set_force_sum_reduction_for_comms(True)

        def training_step(self, batch, _):
            tokens, target = batch
            return self.head(self.embed(tokens).tanh(), target)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(V, (RANKS * B, T + 1), generator=generator) for _ in range(STEPS)]
    weights = dense_steps(Model(sharded=False), batches)
    rank = torch.distributed.get_rank()
    mine = [(tokens[rank * B : (rank + 1) * B, :-1], tokens[rank * B : (rank + 1) * B, 1:]) for tokens in batches]
    fsdp2 = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    for sharded, strategy in ((False, DDPStrategy()), (True, fsdp2)):
        model = Model(sharded)
        lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=RANKS,
            strategy=strategy,
            plugins=[LightningEnvironment()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        ).fit(model, train_dataloaders=torch.utils.data.DataLoader(mine, batch_size=None))
        for found, expected in zip(model.parameters(), weights, strict=True):
            assert isinstance(found, DTensor) == sharded
            found = found.full_tensor() if sharded else found
            torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def dense_steps(model, batches) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for tokens in batches:
        logits = model.embed(tokens[:, :-1]).tanh() @ model.head.weight.T
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step(), optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]
