"""The bits of a token's results depend only on that token's operands, in Triton's interpreter.

benchmarks/batch_invariance.py says what is computed for a token and what must not matter.
"""

# N tokens, D hidden, V vocabulary

import math

import pytest
import torch
from reference_policy import function_of_policy

import flce_ops
from benchmarks.batch_invariance import bits, draw_pool
from benchmarks.shapes import Shape
from flce_ops.aten.chunks import cut
from flce_ops.math.statistics import log_probs_of_targets, lse_of_pair
from flce_ops.triton import launch_forward, launch_with_grad

CPU = torch.device("cpu")
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)")


@pytest.mark.parametrize(("rows", "least"), [(32, 16), (64, 16), (128, 16), (8, 4)])
def test_a_cut_covers_all_rows(rows, least):
    for count in (*range(0, 2 * rows + least + 2), 5 * rows + 1):
        parts = cut(3, 3 + count, rows, least)
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(3, 3 + count))
        assert all(0 < part.stop - part.start <= rows for part in parts)
        if count >= least:
            assert min(part.stop - part.start for part in parts) >= least


def test_the_mixture_of_a_divergence_does_not_depend_on_where_a_number_stands():
    from flce_ops.objectives.divergence import log_ratios_to_mixture

    def ratios(log_q, log_p):
        return torch.stack(log_ratios_to_mixture(log_q.clone(), log_p.clone(), torch.tensor(0.3)))

    log_q, log_p = torch.randn(2, 1003)
    whole = ratios(log_q, log_p)
    for start in range(16):
        part = slice(start, start + 5)
        assert torch.equal(ratios(log_q[part], log_p[part]), whole[:, part])
    log_m = torch.logaddexp(log_p + math.log(0.3), log_q + math.log(0.7))
    torch.testing.assert_close(whole, torch.stack([log_q - log_m, log_p - log_m]))
    finite, nothing, everything = torch.zeros(2), torch.tensor([-torch.inf, 0.0]), torch.tensor([0.0, -torch.inf])
    torch.testing.assert_close(ratios(nothing, finite)[1, 0], -torch.tensor(0.3).log())
    torch.testing.assert_close(ratios(finite, everything)[0, 1], -torch.tensor(0.7).log())


MASK = {"output_mask": [True, True, False]}
OF_ROWS = {"argmax": True, "log_sum_sq_probs": True, "mean_logit": True}


TILE = 128  # the interpreter's products are NumPy's, where the bits of a row depend on its place in a tile


@no_cuda
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bits_of_kernels_depend_on_the_token_alone():
    """Results of the forward kernel and of the one-pass kernels, for several residues of N modulo 16, with ignored
    tokens and several chunks. Every residue is of the GPU's test.
    """
    pool = draw_pool(Shape(150, 40, 300), torch.float16, CPU, seed=torch.initial_seed())

    def forward(call):
        return launch_forward(call.input, call.linear_weight, call.target, expected_log_prob=True, **OF_ROWS)[:8]

    def one_pass(call):
        tensors = (call.input, call.linear_weight, call.target, None, None, None)
        found = launch_with_grad(*tensors, **MASK, entropy=True, **OF_ROWS)
        return found[1], *found[5:]

    def assert_same(kernel, call, whole, judged, tokens):
        for found, expected in zip(kernel(call), whole, strict=True):
            assert found.numel() == 0 or torch.equal(bits(found[judged]), bits(expected[tokens])), (kernel, len(tokens))

    tokens = torch.arange(150)
    for kernel in (forward, one_pass):
        whole = kernel(pool)
        residues = (33, 37, 42, 48) if kernel is forward else (37,)
        for chosen in (*(tokens[:n] for n in (1, *residues)), tokens[TILE:]):
            assert_same(kernel, pool.of(chosen), whole, slice(None), chosen)
        behind = pool._replace(target=pool.target.masked_fill((tokens > 60) & (tokens % 3 > 0), -100))
        assert_same(kernel, behind, whole, slice(61), tokens[:61])


@no_cuda
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
# whether the model is sure of the target, whose exponential then exceeds the sum of the others
@pytest.mark.parametrize("sure", [False, True])
def test_forward_and_one_pass_in_any_number_of_chunks_have_the_same_bits(sure, fewest_chunks):
    """With and without gradients, and in a small workspace. For an entropy, forward has separate sums."""
    pool = draw_pool(Shape(150, 40, 300), torch.float16, CPU, seed=torch.initial_seed())
    pool.target[::7] = -100
    if sure:
        valid = pool.target >= 0
        pool.input[valid] = 10 * pool.linear_weight[pool.target[valid]]
    tensors = (pool.input, pool.linear_weight, pool.target, None)
    target_logit, pair, *_, argmax, squares, mean_logit, _ = launch_forward(*tensors, **OF_ROWS)
    log_probs = log_probs_of_targets(pool.target >= 0, target_logit, pair)
    of_policy = dict(zip(("function", "tensors"), function_of_policy(pool._asdict())))
    entropies = []
    for nbytes in (None, 1 << 16):
        with flce_ops.workspace(nbytes or 512 << 20):
            entropies.append(launch_with_grad(*tensors, None, None, **MASK, entropy=True, lse=True)[6:8])
            metrics = launch_with_grad(*tensors, None, None, **MASK, lse=True, **OF_ROWS)[5:]
            assert flce_ops.last_path().chunks == (2 if nbytes else 1)
            policy = launch_with_grad(*tensors, None, None, **of_policy, **MASK)
        of_one_pass = (metrics[0], metrics[1], *metrics[3:5], policy[10])
        for found, exact in zip(of_one_pass, (argmax, lse_of_pair(pair), squares, mean_logit, log_probs), strict=True):
            assert torch.equal(found, exact)
    assert all(torch.equal(found, other) for found, other in zip(*entropies, strict=True))
