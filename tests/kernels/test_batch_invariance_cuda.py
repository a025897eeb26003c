"""The bits of a token's results depend only on that token's operands: bfloat16 and float16 on a GPU, 10^7 tokens."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from marks import ON_CUDA
from test_cuda_contract import captured

import flce_ops
from benchmarks.batch_invariance import ASKED, PROBLEMS, bits, callings, draw_pool, input_gradients, walk
from benchmarks.shapes import parse_shapes

pytestmark = ON_CUDA
MARK, SEED = 10**7, 0
CUDA = torch.device("cuda")


def pool_of(problem):
    text, dtype, large = PROBLEMS["cuda"][problem]
    (shape,) = parse_shapes(text)
    pool = draw_pool(shape, dtype, CUDA, SEED)
    return pool, callings(pool, large, SEED)


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.__name__)
@pytest.mark.parametrize("problem", range(len(PROBLEMS["cuda"])))
def test_bits_depend_on_the_token_alone(problem, asked):
    pool, ways = pool_of(problem)
    found = walk(pool, ways, (asked,))
    assert not {key: counts for key, counts in found.items() if counts.differ}


@pytest.mark.parametrize("problem", range(len(PROBLEMS["cuda"])))
def test_rows_of_grad_input_depend_on_the_token_alone_on_request(problem):
    """batch_invariant=True, in calls of the same sizes, places, labels and workspaces."""
    pool, ways = pool_of(problem)
    found = walk(pool, ways, (input_gradients,))
    assert not {key: counts for key, counts in found.items() if counts.differ}


@pytest.mark.parametrize("count", [1, 100, 1408, 4096])
def test_batch_invariant_gradients_are_no_worse(count):
    (shape,) = parse_shapes("4096x512x50257")  # four ranges of classes, the last one short
    pool = draw_pool(shape, torch.bfloat16, CUDA, SEED)
    x, w, y = pool.input[:count], pool.linear_weight, pool.target[:count]

    def gradients(dtype, **option):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w)]
        if option:
            loss = flce_ops.linear_cross_entropy(*leaves, y, reduction="sum", **option)
        else:
            loss = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].T, y, reduction="sum")
        return torch.autograd.grad(loss, leaves)

    exact, plain = gradients(torch.float64), gradients(torch.bfloat16)
    for ours, theirs, truth in zip(gradients(torch.bfloat16, batch_invariant=True), plain, exact, strict=True):
        assert (ours - truth).norm() <= 1.05 * (theirs - truth).norm() + 1e-3 * truth.norm()


def test_ten_million_tokens_are_drawn():
    judged = 0
    for problem in range(len(PROBLEMS["cuda"])):
        judged += sum(len(way.tokens if way.judged is None else way.judged) for way in pool_of(problem)[1])
    assert judged >= MARK, judged


@pytest.mark.parametrize("count", [300, 1500])
def test_compiled_and_captured_calls_have_the_bits_of_eager_ones(count):
    (shape,) = parse_shapes("2000x64x512")
    pool = draw_pool(shape, torch.bfloat16, CUDA, SEED)

    def log_probs(input, target):
        found = flce_ops.linear_log_probs(input, pool.linear_weight, target, entropy=True)
        return found.log_probs, found.lse, found.entropy

    whole = log_probs(pool.input, pool.target)
    part = (pool.input[7 : 7 + count], pool.target[7 : 7 + count])
    compiled = torch.compile(log_probs, fullgraph=True)(*part)
    graph, in_graph = captured(lambda: log_probs(*part))
    graph.replay()
    for found, other, expected in zip(compiled, in_graph, whole, strict=True):
        assert torch.equal(bits(found), bits(expected[7 : 7 + count]))
        assert torch.equal(bits(other), bits(expected[7 : 7 + count]))
