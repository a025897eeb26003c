"""batch_invariant=True: the bits of a row of grad_input depend on that token's operands alone.

In Triton's interpreter; tests/kernels/test_batch_invariance_cuda.py has the GPU.
"""

# N tokens, D hidden, V vocabulary

import pytest
import torch

import flce_ops
from benchmarks.batch_invariance import bits, draw_pool
from benchmarks.shapes import Shape

CPU = torch.device("cpu")
MASK = {"output_mask": [True, True, False]}
N, D, V = 150, 40, 260
# bytes of workspace, tokens of the call, how many of these count
WAYS = [(1 << 16, N, None), (512 << 20, N, 70), (1 << 17, 131, None)]
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)")


@pytest.fixture
def ranges_of_128_classes(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("flce_ops.triton.gemm.input_gradient.RANGE", 128)  # of the interpreter's tiles, a multiple


def one_pass(pool, count, invariant, keep=None):
    from flce_ops.triton import launch_with_grad

    target = pool.target[:count].clone()
    target[count if keep is None else keep :] = -100
    call = (pool.input[:count], pool.linear_weight, target, None, None, None, torch.ones(()))
    return launch_with_grad(*call, **MASK, batch_invariant=invariant)[2]


def from_cotangents(pool, count, invariant, keep=None):
    from flce_ops.triton import launch_backward, launch_forward

    target = pool.target[:count].clone()
    target[count if keep is None else keep :] = -100
    operands = (pool.input[:count], pool.linear_weight, target, None, None)
    found, slopes = launch_forward(*operands), torch.linspace(-1, 1, N)[:count]
    known = {**MASK}
    return launch_backward(slopes, -slopes, None, *operands, found[1], **known, batch_invariant=invariant)[0]


def of_divergence(pool, count, invariant, keep=None):
    from flce_ops.triton.logits.kl_div import launch_kl_div_with_grad

    valid = torch.arange(count) < (count if keep is None else keep)
    models = (pool.input[:count], pool.linear_weight, None, pool.teacher_input[:count], pool.teacher_weight, None, None)
    scale = torch.linspace(0.5, 1.5, N)[:count]
    return launch_kl_div_with_grad(*models, valid, scale, kind="reverse", **MASK, batch_invariant=invariant)[2]


KERNELS = [one_pass, from_cotangents, of_divergence]


@no_cuda
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "kernel",
    [from_cotangents, *(pytest.param(kernel, marks=pytest.mark.exhaustive) for kernel in (one_pass, of_divergence))],
    ids=lambda kernel: kernel.__name__,
)
def test_rows_of_the_kernels_depend_on_the_token_alone(kernel, ranges_of_128_classes):
    """A small workspace cuts chunks, and few tokens split V: without the option bits change."""
    pool = draw_pool(Shape(N, D, V), torch.float32, CPU, seed=torch.initial_seed())
    whole = {invariant: kernel(pool, N, invariant) for invariant in (True, False)}
    torch.testing.assert_close(whole[True], whole[False], rtol=0.0, atol=1e-3 * float(whole[False].abs().max()))
    different = {}
    for invariant, ways in ((True, WAYS), (False, WAYS[2:])):
        different[invariant] = 0
        for nbytes, count, keep in ways:
            with flce_ops.workspace(nbytes):
                rows = kernel(pool, count, invariant, keep)[: keep or count]
            different[invariant] += int((bits(rows) != bits(whole[invariant][: len(rows)])).sum())
    assert different[True] == 0
    assert different[False] > 0


def test_a_range_is_a_multiple_of_every_tile():
    pytest.importorskip("triton")
    from flce_ops.triton.gemm.input_gradient import RANGE
    from flce_ops.triton.gemm.tiles import INPUT_TILES

    assert all(RANGE % tiles.block_k == 0 for tiles in INPUT_TILES.values()) and RANGE % 256 == 0


@pytest.mark.exhaustive
@no_cuda
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "entropy, dtype",
    [(None, torch.float16), ("requested", torch.float32), ("with a gradient", torch.float16)],
    ids=str,
)
def test_saved_logits_and_those_made_again_give_the_same_bits(entropy, dtype, ranges_of_128_classes):
    """Forward has memory for the logits of some tokens only. Without the option gradients differ by rounding."""
    from flce_ops.triton import launch_backward, launch_forward

    pool, slopes = draw_pool(Shape(N, D, V), dtype, CPU, seed=torch.initial_seed()), torch.linspace(-1, 1, N)
    operands = (pool.input, pool.linear_weight, pool.target, None, None)
    ways = ((0, 1 << 17), (64, 1 << 17), (N, 512 << 20), (0, 512 << 20))
    for invariant in (True, False):
        gradients = []
        for retain, nbytes in ways if invariant else ways[::2]:  # the bits of two differ, one of each workspace
            with flce_ops.workspace(nbytes):
                found = launch_forward(*operands, retain=retain, expected_log_prob=entropy is not None)
                known = {"retained": found[8] if retain else None, **MASK}
                if entropy and (invariant or entropy == "with a gradient"):
                    known["expected_log_prob"] = found[3]
                if entropy == "with a gradient":
                    known["grad_expected_log_prob"] = slopes.flip(0)
                made = launch_backward(slopes, -slopes, None, *operands, found[1], **known, batch_invariant=invariant)
            gradients.append(bits(made[0]))
        different = sum(int((other != gradients[0]).sum()) for other in gradients[1:])
        assert different == 0 if invariant else different > 0
