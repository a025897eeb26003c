"""accelerate's FSDP2 around patched models of Transformers: the steps that it takes with their own loss.

accelerate refuses FSDP2 to CPUs in one place only, where its state is made. Here that state is set behind it.
"""

import os

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from process_pool import run_in_world
from torch.distributed.tensor import DTensor

import flce_ops

# B batch of a rank, T tokens, V vocabulary

B, T, V, STEPS, RANKS = 2, 8, 101, 3, 2


@pytest.mark.parametrize("name", ["Llama", pytest.param("Llama tied", marks=pytest.mark.exhaustive)])
def test_a_patched_model_under_fsdp2(name):
    run_in_world(("cpu", RANKS), train_patched_and_unpatched, name)


def train_patched_and_unpatched(_, name):
    from tiny_models import make_model

    from flce_ops.integrations.transformers import patch

    found = []
    for ours in (False, True):
        torch.manual_seed(1)
        model = make_model(name)
        found.append(train(patch(model) if ours else model))
    assert flce_ops.last_path().op == "linear_cross_entropy_with_grad"
    (theirs, expected), (losses, parameters) = found
    torch.testing.assert_close(losses, theirs, rtol=1e-5, atol=0)
    for key, parameter in expected.items():
        atol = 1e-5 * float(parameter.abs().max())
        torch.testing.assert_close(parameters[key], parameter, rtol=0, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


def train(model) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of STEPS, each in two micro-batches, and the parameters behind them."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29534", "LOCAL_WORLD_SIZE": str(RANKS)}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    assert accelerator.is_fsdp2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model.lm_head.weight, DTensor) and model.lm_head.weight.placements[0].is_shard()
    tokens = torch.randint(3, V, (2 * STEPS, RANKS * B, T), generator=torch.Generator().manual_seed(0))
    losses = []
    for batch in tokens:
        mine = batch[dist.get_rank() * B :][:B]
        with accelerator.accumulate(model):
            loss = model(input_ids=mine, labels=mine).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    after = {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}
    AcceleratorState._reset_state()
    PartialState._reset_state()
    return losses, after
