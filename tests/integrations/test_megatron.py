"""Megatron's GPT model under its DDP: main_grad buffers after backward and reduction, with Megatron's head and with
this one.
"""

import contextlib
import importlib.util
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from process_pool import run_in_world

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

# B sequences of T tokens, D hidden, V vocabulary

B, T, D, V, MICRO_BATCHES = 2, 8, 16, 61, 3


def test_the_buffers_of_its_ddp_are_those_of_its_own_head():
    """With tied and untied weights, with communication after backward and overlapped with it."""
    run_in_world(("cpu", 2), compare_buffers)


def compare_buffers(device):
    with megatron_on_a_cpu():
        for tied in (False, True):
            for overlap in (False, True):
                (losses, expected), (our_losses, found) = (
                    losses_and_buffers(fused, tied=tied, overlap=overlap) for fused in (False, True)
                )
                torch.testing.assert_close(our_losses, losses, rtol=1e-6, atol=0)
                for name, buffer in expected.items():
                    atol = 2e-6 * float(buffer.abs().max())  # 5e-7 was seen
                    torch.testing.assert_close(
                        found[name], buffer, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
                    )


def losses_and_buffers(fused: bool, *, tied: bool, overlap: bool):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    from flce_ops.integrations.megatron import linear_cross_entropy

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), V, T, share_embeddings_and_output_weights=tied)
    if fused:  # then its forward ends with hidden states
        model.post_process = False
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap), model
    )
    ddp.zero_grad_buffer()
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    positions, mask = torch.arange(T).expand(B, T), torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
    for micro_batch in range(MICRO_BATCHES):
        tokens = torch.randint(V, (B, T + 1), generator=generator)
        with ddp.no_sync() if micro_batch < MICRO_BATCHES - 1 else contextlib.nullcontext():
            if fused:
                hidden = ddp(tokens[:, :-1], positions, mask)  # (T, B, D)
                loss = linear_cross_entropy(hidden, weight, tokens[:, 1:].T, reduction="sum")
            else:
                loss = ddp(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).sum()
            loss.backward()
        losses.append(loss.detach())
    ddp.finish_grad_sync()
    assert weight.grad_added_to_main_grad == fused
    return torch.stack(losses), {name: p.main_grad.clone() for name, p in model.named_parameters()}


def test_a_shard_of_the_vocabulary_is_refused_by_name():
    run_in_world(("cpu", 2), refuse_a_shard)


def refuse_a_shard(device):
    from flce_ops.integrations.megatron import linear_cross_entropy

    with megatron_on_a_cpu(tensor_model_parallel_size=2):
        from megatron.core.tensor_parallel import ColumnParallelLinear
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=1,
            hidden_size=D,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=2,
        )
        head = ColumnParallelLinear(D, 2 * V, config=config, init_method=torch.nn.init.normal_, bias=False)
        assert head.weight.shape == (V, D)
        head.weight.main_grad = torch.zeros(V, D)
        match = "expected all classes of linear_weight on this rank, got one of 2 shards"
        for context in (contextlib.nullcontext(), torch.no_grad()):
            with pytest.raises(NotImplementedError, match=match), context:
                linear_cross_entropy(torch.randn(4, D), head.weight, torch.zeros(4, dtype=torch.long))


@contextlib.contextmanager
def megatron_on_a_cpu(**parallel):
    """Megatron's buffers and its dropout ask for CUDA; nothing else here does."""
    from megatron.core import parallel_state, tensor_parallel

    no_dropout = SimpleNamespace(fork=contextlib.nullcontext)
    with (
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(torch.cuda, "current_stream"),  # Megatron 0.19 makes it wait for events of captured graphs
        patch.object(tensor_parallel, "get_cuda_rng_tracker", lambda *_, **__: no_dropout),
    ):
        parallel_state.initialize_model_parallel(**parallel)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
