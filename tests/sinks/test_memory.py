"""Peak temporary memory is the workspace, whatever the number of tokens. The logits never exist as a whole."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flce_ops

MiB = 2**20
N, D, V = 4096, 16, 2003  # float32 logits: 31 MiB
WORKSPACE = 4 * MiB


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that an operator returns; it does not see what its kernel allocates."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


def peak_on_cpu(step) -> int:
    """The largest sum of live allocations above the start, from the profiler's allocation events."""
    step()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak > 0, "the profiler reported no allocation"
    return peak


def peak_on_cuda(step) -> int:
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_of(function, inputs, **options) -> int:
    def step():
        loss = function(*inputs.args, **inputs.options, **options)
        if loss.requires_grad:
            torch.autograd.grad(loss.sum(), list(inputs.leaves.values()))

    return (peak_on_cpu if inputs.input.device.type == "cpu" else peak_on_cuda)(step)


def results(inputs) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in inputs.leaves.values())


# Vectors of N (factors, losses, lse) and of V, and what the allocator rounds up.
SMALL_CHANGE = MiB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
def test_temporary_memory_stays_within_the_workspace(device, everything, reduction, dtype):
    made = {"bias": True, "weight": True, "token_weight": True} if everything else {}
    options = {"softcap": 5.0, "logit_scale": 0.7, "z_loss": 0.01, "label_smoothing": 0.1} if everything else {}
    inputs = make_inputs((N, D, V), device=device, dtype=dtype, **made)
    with flce_ops.workspace(WORKSPACE, retained=0):  # tests/sinks/test_saved_logits.py tests saved logits
        ours = peak_of(flce_ops.linear_cross_entropy, inputs, reduction=reduction, **options)
    # if lse is known, CUDA's half kernel divides the vocabulary instead of the rows
    assert flce_ops.last_path().chunks > 4 or flce_ops.last_path().implementation == "triton"
    temporary = ours - results(inputs)
    assert temporary <= WORKSPACE + SMALL_CHANGE, f"{temporary / MiB:.1f} MiB"


def test_without_gradients_nothing_but_a_chunk_is_held(device):
    inputs = make_inputs((N, D, V), device=device, requires_grad=False)
    with flce_ops.workspace(WORKSPACE):
        assert peak_of(flce_ops.linear_cross_entropy, inputs) <= WORKSPACE + SMALL_CHANGE


EVERY_TERM = {"softcap": 5.0, "label_smoothing": 0.1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, EVERY_TERM], ids=["plain", "every term"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_on_a_cpu_only_the_products_of_a_chunk_exist_whole(reduction, options, dtype):
    """The softmax of half operands runs in float32 on blocks that stay in the cache."""
    inputs = make_inputs((1000, 8, 16003), dtype=dtype, bias=True)  # two chunks or four
    with flce_ops.workspace(retained=0):
        temporary = peak_of(flce_ops.linear_cross_entropy, inputs, reduction=reduction, **options) - results(inputs)
    chunk = flce_ops.last_path().rows_per_chunk * 16003 * dtype.itemsize
    assert 15 * MiB < chunk <= 16 * MiB
    assert temporary <= chunk + 4 * 2 * MiB, f"{(temporary - chunk) / MiB:.1f} MiB beside the products"


@pytest.mark.parametrize("tokens", [700, 1200], ids="{} tokens".format)
def test_on_a_cpu_the_weight_gradient_is_summed_in_float32_over_more_than_eight_chunks(tokens):
    """Up to eight chunks, rounding the sum costs less accuracy than rounding the logits did. The float32 sum is copied
    class by class.
    """
    hidden, vocab = 128, 16003
    inputs = make_inputs((tokens, hidden, vocab), dtype=torch.bfloat16)
    with flce_ops.workspace(WORKSPACE):
        temporary = peak_of(flce_ops.linear_cross_entropy, inputs) - results(inputs)
    path = flce_ops.last_path()
    assert (path.chunks > 8) == (tokens == 1200), path
    expected = path.rows_per_chunk * vocab * 2 + 4 * vocab * hidden * (tokens == 1200)
    # slices of 2 MiB and their float32 copies; a whole product would take 12 MiB with its copy
    assert expected <= temporary <= expected + 8 * MiB, f"{(temporary - expected) / MiB:.1f} MiB"


@pytest.mark.exhaustive  # a CPU without bfloat16 units takes 40 s
def test_on_a_cpu_the_float32_sum_of_the_weight_gradient_is_part_of_the_workspace():
    inputs = make_inputs((12000, 128, 8000), dtype=torch.bfloat16)  # the float32 sum has 4 MiB
    with flce_ops.workspace(16 * MiB):
        temporary = peak_of(flce_ops.linear_cross_entropy, inputs) - results(inputs)
    assert flce_ops.last_path().chunks > 8
    assert temporary <= 16 * MiB + SMALL_CHANGE, f"{temporary / MiB:.1f} MiB"


def test_one_copy_of_the_weight_gradient(device):
    """The gradient made in forward becomes .grad without another copy."""
    inputs = make_inputs((64, 512, 8009), device=device, dtype=torch.bfloat16)  # dW: 7.8 MiB
    inputs.input.requires_grad_(False)

    def step():
        inputs.linear_weight.grad = None
        flce_ops.linear_cross_entropy(*inputs.args).backward()

    one = results(inputs)
    with flce_ops.workspace(2 * MiB):
        peak = (peak_on_cpu if device == "cpu" else peak_on_cuda)(step)
    assert peak < one + 2 * MiB + SMALL_CHANGE or peak < 2.2 * one, f"{peak / one:.2f} copies"
