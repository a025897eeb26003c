"""A linear_weight without a unit stride is copied in slices within the workspace, while ATen would copy all of it."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from reference_divergence import leaves, make_pair
from reference_divergence import run_reference as run_reference_divergence
from reference_loss import error, run, run_reference
from test_layouts import MATRIX_LAYOUTS, strided
from test_memory import SMALL_CHANGE, MiB, peak_of, peak_on_cpu, results

import flce_ops
from flce_ops.aten.chunks import copy_bytes, readable, readable_rows


@pytest.mark.parametrize("layout", ["contiguous", *MATRIX_LAYOUTS])
def test_blas_reads_every_layout_with_a_unit_stride_and_rows_apart(layout):
    matrix = strided(torch.ones(7, 5), layout)
    assert readable(matrix) == (layout not in ("column_step", "both_steps", "expanded"))
    assert readable(matrix.T) == readable(matrix)
    assert (copy_bytes(matrix, None) > 0) == (not readable(matrix))


@pytest.mark.parametrize("transposed", [False, True])
def test_slices_cover_the_matrix_once_and_share_one_memory(transposed):
    matrix = strided(torch.randn(100, 300), "both_steps")
    matrix = matrix.T if transposed else matrix
    seen, memory = torch.full_like(matrix, float("nan")), set()
    with flce_ops.workspace(4 * 4 * 300 * 20):
        for part, piece in readable_rows(matrix):
            assert seen[part].isnan().all() and readable(piece)
            seen[part] = piece
            memory.add(piece.data_ptr())
    assert torch.equal(seen, matrix) and len(memory) == 1
    for empty in (matrix[:0], matrix[:, :0]):
        assert [piece.shape for _, piece in readable_rows(empty)] == [empty.shape]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", ["linear_weight", "input"])
def test_temporary_memory_stays_within_the_workspace(device, name, reduction, dtype):
    """If contiguous operands need more than the workspace, that is the bound: a CPU's half GEMMs allocate memory for
    each thread.

    Logits saved for backward (`retained`) are not part of the workspace, so none are saved here.
    """
    inputs = make_inputs((600, 256, 8009), device=device, dtype=dtype)
    with flce_ops.workspace(8 * MiB, retained=0):
        contiguous = peak_of(flce_ops.linear_cross_entropy, inputs, reduction=reduction) - results(inputs)
        setattr(inputs, name, strided(getattr(inputs, name).detach(), "column_step").requires_grad_())
        temporary = peak_of(flce_ops.linear_cross_entropy, inputs, reduction=reduction) - results(inputs)
    assert temporary <= max(8 * MiB, contiguous) + SMALL_CHANGE, f"{temporary / MiB:.1f} MiB"


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_are_those_of_a_weight_in_one_piece(device, reduction, poisoned_memory):
    """Slices divide a dimension that is not summed over; otherwise they are summed in float32."""
    inputs = make_inputs((300, 40, 1021), device=device, dtype=torch.bfloat16)
    exact = run_reference(inputs, reduction=reduction)
    weight = strided(inputs.linear_weight.detach(), "both_steps").requires_grad_()
    with flce_ops.workspace(MiB // 8):  # slices of 16 features, or of 400 classes
        whole = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction)
        loss = flce_ops.linear_cross_entropy(inputs.input, weight, inputs.target, reduction=reduction)
        grads = torch.autograd.grad(loss.sum(), [inputs.input, weight])
    found = dict(zip(("loss", "input", "linear_weight"), (loss, *grads), strict=True))
    for name in exact:
        assert error(found[name], exact[name]) <= 1.1 * error(whole[name], exact[name]) + 1e-6, name


@pytest.mark.parametrize("layout", MATRIX_LAYOUTS[:-1])
@pytest.mark.parametrize("kind", ["forward", "jsd"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_teacher_may_be_laid_out_in_any_way(device, reduction, kind, layout, poisoned_memory):
    pair = make_pair((12, 11, 7, 31), device=device, dtype=torch.float64, bias=True)
    exact = run_reference_divergence(pair, reduction=reduction, kind=kind)
    laid_out = {
        name: strided(tensor.detach(), layout if tensor.dim() == 2 else "step").requires_grad_(tensor.requires_grad)
        for name, tensor in pair.items()
    }
    loss = flce_ops.linear_kl_div(**laid_out, reduction=reduction, kind=kind)
    wanted = leaves(laid_out)
    grads = torch.autograd.grad(loss.sum(), list(wanted.values()))
    found = {"loss": loss, **dict(zip(wanted, grads, strict=True))}
    for name, truth in exact.items():
        assert error(found[name], truth) < 1e-12, name


def test_the_divergence_counts_copies_of_student_and_teacher():
    pair = make_pair((300, 256, 200, 8009), dtype=torch.bfloat16)
    for name in ("linear_weight", "teacher_weight"):
        pair[name] = strided(pair[name].detach(), "column_step").requires_grad_(pair[name].requires_grad)
    wanted = list(leaves(pair).values())

    def step():
        torch.autograd.grad(flce_ops.linear_kl_div(**pair), wanted)

    with flce_ops.workspace(24 * MiB):
        temporary = peak_on_cpu(step) - sum(leaf.numel() * leaf.element_size() for leaf in wanted)
    assert temporary <= 24 * MiB + SMALL_CHANGE, f"{temporary / MiB:.1f} MiB"
