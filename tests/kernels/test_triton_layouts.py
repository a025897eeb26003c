"""Operands of the Triton kernels in every memory layout: float32 in Triton's interpreter, bfloat16 on a GPU.

tests/sources/test_layouts.py tests the public function. Here every way to make a gradient runs.
"""

# N tokens, D hidden, V vocabulary

import itertools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_loss import error, with_lse
from test_layouts import MATRIX_LAYOUTS, VECTOR_LAYOUTS, strided
from test_triton_interpreter import double, operands

import flce_ops
from flce_ops import aten
from flce_ops.triton import launch_backward, launch_forward, launch_scale_in_place, launch_with_grad

ON_GPU = torch.cuda.is_available()  # the interpreter stands in if there is none
GPU = [pytest.mark.gpu] if ON_GPU else []
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
MiB = 2**20

pytestmark = [*GPU, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy on log2(0)

# mode: (N, D, V), bytes of workspace
MODES = {
    "few tokens": ((12, 24, 67), 512 * MiB),
    "one chunk": ((130, 24, 67), 512 * MiB),
    "chunks": ((260 if ON_GPU else 130, 24, 67), 1),
}
MASKS = {"dX and dW": [True, True, True], "dW": [False, True, False], "dX": [True, False, False]}
OUTPUTS = ("loss", "losses", "grad_input", "grad_linear_weight", "grad_linear_bias")


def cross(*lists):
    return [" | ".join(case) for case in itertools.product(*lists)]


# On a GPU every combination runs. The interpreter takes 4 s for 130 tokens, so there each mode gets only the layouts
# that affect its buffers, and all layouts run with few tokens.
ONE_PASS, SHARD = cross(MODES, MATRIX_LAYOUTS, MASKS), cross(["12", "260"], MATRIX_LAYOUTS, MASKS)
if not ON_GPU:
    ONE_PASS = [
        *cross(["few tokens"], MATRIX_LAYOUTS, ["dX and dW"]),
        *cross(MODES, ["transposed"], ["dW"]),
        *cross(["one chunk", "chunks"], ["column_step"], ["dX and dW"]),
    ]
    SHARD = [*cross(["12"], MATRIX_LAYOUTS, ["dX and dW"]), "130 | transposed | dW"]


def laid_out(args, matrices, vectors):
    """The same values in other layouts. linear_weight is not expanded, because that leaves no gradient to compare."""
    layouts = [matrices if tensor is not None and tensor.dim() == 2 else vectors for tensor in args]
    if matrices == "expanded":
        layouts[1] = "both_steps"
    return [None if tensor is None else strided(tensor, layout) for tensor, layout in zip(args, layouts)]


def made(shape, matrices, vectors):
    """Returns (input, linear_weight, target, linear_bias, weight, row_scale), and the same in these layouts."""
    options = {"bias": True, "class_weight": True}
    args = [*operands(shape, DTYPE, options), torch.rand(shape[0]) / shape[0]]
    if matrices == "expanded":
        args[0] = args[0][:1].repeat(shape[0], 1)
    if vectors == "expanded":
        args[2:] = [tensor[1:2].repeat(tensor.shape[0]) for tensor in args[2:]]
    args = [tensor.to("cuda" if ON_GPU else "cpu") for tensor in args]
    return args, laid_out(args, matrices, vectors)


def assert_matches(found, truth, names, largest_logit=0.0):
    """`largest_logit` is for logits and their means: equal rows have the same mean, which may be near 0."""
    for name, ours, exact in zip(names, found, truth, strict=True):
        assert ours.is_contiguous(), name
        if exact.numel():
            # a mean of 0.1 over logits of 5 has the rounding of 5: one draw of 50 was over 1e-6
            nearly = (ours - exact).abs().max() <= TOLERANCE[torch.float32] * largest_logit
            assert nearly or error(ours, exact) <= TOLERANCE[DTYPE], name


@pytest.mark.parametrize("case", ONE_PASS)
def test_one_pass_gradients_do_not_depend_on_the_layout(case, poisoned_memory):
    mode, matrices, wanted = case.split(" | ")
    shape, workspace = MODES[mode]
    args, changed = made(shape, matrices, "step")
    mask = MASKS[wanted]
    with flce_ops.workspace(workspace):
        found = launch_with_grad(*changed, output_mask=mask)
    assert flce_ops.last_path().chunks > 1 or mode != "chunks", flce_ops.last_path()
    assert_matches(found[:5], aten.with_grad(*double(*args), output_mask=mask)[:5], OUTPUTS)


@pytest.mark.parametrize("vectors", VECTOR_LAYOUTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vectors_over_tokens_and_classes_may_be_strided(smoothing, vectors, poisoned_memory):
    """Targets, bias, class weights and row scales."""
    args, changed = made((12, 24, 67), "transposed", vectors)
    options = {"output_mask": [True, True, True], "label_smoothing": smoothing}
    found = launch_with_grad(*changed, **options)
    assert_matches(found[:5], aten.with_grad(*double(*args), **options)[:5], OUTPUTS)


@pytest.mark.parametrize("matrices", MATRIX_LAYOUTS)
@pytest.mark.parametrize("workspace", [1, 512 * MiB])
def test_log_probabilities_and_recomputed_gradients_do_not_depend_on_the_layout(workspace, matrices, poisoned_memory):
    """reduction="none", log-probs and their entropy: forward, then backward with strided cotangents."""
    (*args, row_scale), (*changed, strided_scale) = made((12, 24, 300), matrices, "step")
    wanted = {"expected_log_prob": True, "argmax": True}
    options = {"output_mask": [True, True, True]}
    truth = aten.forward(*double(*args), **wanted)[:6]
    _, pair, _, expected, *_ = truth
    with flce_ops.workspace(workspace):
        found = launch_forward(*changed, **wanted)[:6]
        rows = [strided(tensor.float(), "step") for tensor in (pair, expected)]
        grads = launch_backward(
            *(-strided_scale, strided_scale, None, *changed, rows[0]),
            grad_expected_log_prob=strided_scale,
            expected_log_prob=rows[1],
            **options,
        )
    x, w, _, bias, _ = double(*args)
    names = ("target_logit", "lse", "logit_sum", "expected_log_prob", "max_logit", "argmax")
    assert_matches(with_lse(found), with_lse(truth), names, largest_logit=F.linear(x, w, bias).abs().max())
    scale = row_scale.double()
    truth = aten.backward(
        *(-scale, scale, None, *double(*args), pair),
        grad_expected_log_prob=scale,
        expected_log_prob=expected,
        **options,
    )
    assert_matches(grads[:3], truth[:3], OUTPUTS[2:])


@pytest.mark.parametrize("case", SHARD)
def test_one_pass_over_a_shard_does_not_depend_on_the_layout(case, poisoned_memory):
    rows, matrices, wanted = case.split(" | ")
    args, changed = made((int(rows), 24, 67), matrices, "step")
    options = {"output_mask": MASKS[wanted]}
    shard = {"group": "", "ranks": 1, "vocab_start": 0, "vocab_size": 67}
    found = launch_with_grad(*changed, **shard, **options)
    assert_matches(found[:5], aten.with_grad(*double(*args), **options)[:5], OUTPUTS)


@pytest.mark.parametrize("layout", ["transposed", "column_slice", "both_steps", "offset"])
def test_a_gradient_that_a_hook_laid_out_anew_is_scaled_where_it_is(layout):
    grad = torch.randn(40, 24, device="cuda" if ON_GPU else "cpu", dtype=DTYPE)
    view = strided(grad, layout)
    launch_scale_in_place([view], torch.tensor(-2.5, device=grad.device))
    assert torch.equal(view, grad * -2.5)
