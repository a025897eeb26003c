"""The result does not depend on how tokens are divided into chunks."""

# N tokens, D hidden, V vocabulary

from types import SimpleNamespace

import pytest
import torch
from inputs import make_inputs
from recorded import Recorded
from reference_loss import error, run, run_reference

import flce_ops
from flce_ops import aten
from flce_ops.aten import gradients
from flce_ops.aten.chunks import ROUNDED_CHUNKS_ON_CPU

N, D, V = 640, 48, 509


def in_workspace(inputs, bytes, cotangent=None, **options):
    with flce_ops.workspace(bytes):
        found = run(flce_ops.linear_cross_entropy, inputs, cotangent, **options)
    return found, flce_ops.last_path()


def recomputing_slack(dtype):
    """CUDA's recomputing path rounds the target's entry of dW and db. The one-pass path keeps it exact."""
    return 0.2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0


def rounded_sums(dtype, device, chunks):
    """The additional error of dW if sums are rounded: each time by 0.2 eps of the sum so far, which is half of dW on
    average. A CPU rounds once a chunk for up to 8 chunks; CUDA rounds in float16, where sums are stored in that dtype.
    """
    rounded = dtype == torch.float16 if device == "cuda" else dtype.itemsize == 2 and chunks <= ROUNDED_CHUNKS_ON_CPU
    return 0.2 * torch.finfo(dtype).eps * (chunks / 2) ** 0.5 if rounded and chunks > 1 else 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_and_gradients_do_not_depend_on_the_chunks(device, reduction, dtype, poisoned_memory):
    inputs = make_inputs((N, D, V), device=device, dtype=dtype, bias=True, weight=True, token_weight=True)
    cotangent = torch.randn(N, device=device) if reduction == "none" else torch.tensor(1.0, device=device)
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3}
    whole, path = in_workspace(inputs, 2**30, cotangent, **options)
    assert path.chunks == 1
    exact = run_reference(inputs, cotangent, **options)
    counts = set()
    for bytes in (2**20, 2**18, 1):
        cut, path = in_workspace(inputs, bytes, cotangent, **options)
        counts.add(path.chunks)
        assert error(cut["loss"], whole["loss"]) < 1e-6, path
        for name in exact:
            # in half, a chunk's product is rounded before the float32 sum: at most 1.35 times the error was seen
            slack = 1.2e-6 if dtype == torch.float32 or name == "loss" else 1e-12
            if device == "cuda" and name != "input":
                slack += recomputing_slack(dtype)
            slack += rounded_sums(dtype, device, path.chunks) if name == "linear_weight" else 0.0
            assert error(cut[name], exact[name]) <= 1.5 * error(whole[name], exact[name]) + slack, (name, path)
    assert max(counts) >= 4, f"not many chunks: {counts}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_is_not_rounded_once_a_chunk(device, dtype):
    """If gradients were added in half precision over 256 chunks, dW would lose 10 %."""
    inputs = make_inputs((4096, 32, 61), device=device, dtype=dtype, bias=True)
    exact = run_reference(inputs)
    whole, _ = in_workspace(inputs, 2**30)
    cut, path = in_workspace(inputs, 1)
    for name in ("linear_weight", "linear_bias", "input"):
        # a chunk's product is rounded before the float32 sum; with sums in bfloat16 the error would be 3 times larger
        slack = recomputing_slack(dtype) if device == "cuda" and name != "input" else 0.0
        slack += rounded_sums(dtype, device, path.chunks) if device == "cuda" and name == "linear_weight" else 0.0
        assert error(cut[name], exact[name]) <= 1.5 * error(whole[name], exact[name]) + slack, (name, path)
    assert error(cut["loss"], whole["loss"]) < 1e-6
    assert path.chunks >= 8, path


@pytest.mark.parametrize("retained", [-1, True, 1.5])
def test_saved_logits_of_no_number_of_bytes_are_refused(retained):
    with pytest.raises(ValueError, match="expected retained to be a number of bytes"):
        flce_ops.set_workspace(2**24, retained=retained)


@pytest.mark.parametrize(
    "dtype, elements, chunks, expected",
    [
        (torch.bfloat16, 1000, ROUNDED_CHUNKS_ON_CPU + 1, True),
        (torch.bfloat16, 1000, ROUNDED_CHUNKS_ON_CPU, False),
        (torch.bfloat16, 2**40, ROUNDED_CHUNKS_ON_CPU + 1, False),  # no room
        (torch.float32, 1000, ROUNDED_CHUNKS_ON_CPU + 1, False),
    ],
    ids=str,
)
def test_half_sums_of_many_chunks_are_kept_in_float32_where_they_fit(dtype, elements, chunks, expected):
    assert gradients.chunks.sums_in_float32(torch.empty(1, dtype=dtype), elements, chunks) == expected


@pytest.mark.parametrize("hidden, classes", [(64, 8), (1024, 1), (0, 29)])
def test_products_that_are_added_in_float32_fit_the_cache_if_they_can(hidden, classes, monkeypatch):
    """At least one class at a time, however many features it has."""
    monkeypatch.setattr(gradients.chunks, "PRODUCT_BYTES", 1024)
    total, made = torch.zeros(29, hidden), []

    class Sum:
        def __getitem__(self, rows):
            made.append(total[rows].shape[0])
            return total[rows]

        def __setitem__(self, rows, value):
            assert value.data_ptr() == total[rows].data_ptr()

    grad_logits, input = torch.randn(5, 29).bfloat16(), torch.randn(5, hidden).bfloat16()
    gradients.GradientAccumulator.add_by_classes(SimpleNamespace(weight_sum=Sum()), grad_logits, input)
    assert max(made) == classes and sum(made) == 29
    torch.testing.assert_close(total, (grad_logits.T @ input).float())


def shape_of_product(func, args, out):
    return [tuple(out.shape)] if func.name().startswith(("aten::mm", "aten::addmm")) else []


def test_a_gradient_that_nobody_wants_is_not_multiplied():
    made = make_inputs((20, 8, 61), requires_grad=False)
    _, pair, *_ = aten.forward(*made.args, None)
    with Recorded(shape_of_product) as shapes:
        found = aten.backward(-torch.ones(20), None, None, *made.args, None, pair, output_mask=[False, True, False])
    assert [gradient.numel() for gradient in found] == [0, 61 * 8, 0, 0]
    assert {shape for shape in shapes.seen if shape[1] == 8} == {(61, 8)}


def test_the_copy_of_a_head_that_blas_cannot_read_is_part_of_the_workspace():
    made = make_inputs((4000, 64, 2048), requires_grad=False)
    x, w, target, _ = made.args
    rows = []
    for weight in (w, w.repeat_interleave(2, 1)[:, ::2]):
        with flce_ops.workspace(2**23):
            flce_ops.linear_log_probs(x, weight, target)
        rows.append(flce_ops.last_path().rows_per_chunk)
    assert rows[0] > rows[1], rows


@pytest.mark.parametrize("dtype, sums", [(torch.bfloat16, True), (torch.float32, False)], ids=str)
def test_a_float32_buffer_needs_no_sum_beside_it(dtype, sums, monkeypatch):
    """So no workspace is kept for one."""
    asked, rows = [], gradients.chunks.rows_per_chunk

    def recorded(*args, summed=None, **options):
        if summed is not None:
            asked.append(summed > 0)
        return rows(*args, summed=summed or 0, **options)

    monkeypatch.setattr(gradients.chunks, "rows_per_chunk", recorded)
    made = make_inputs((20, 8, 61), dtype=torch.bfloat16)
    main_grad = torch.zeros(61, 8, dtype=dtype)
    flce_ops.linear_cross_entropy(*made.args, reduction="none", main_grad=main_grad).sum().backward()
    assert asked == [sums]


def test_default_workspace_makes_large_chunks(device):
    """Many small chunks would make the matrix products slow. 128 rows are the minimum that keeps them fast."""
    inputs = make_inputs((300, 2, 151936), device=device, dtype=torch.float32, requires_grad=False, ignored=0.0)
    flce_ops.linear_cross_entropy(*inputs.args)
    path = flce_ops.last_path()
    assert path.rows_per_chunk >= 128, path
    assert path.chunks == -(-300 // path.rows_per_chunk), path


def test_the_smallest_workspace_holds_128_rows_and_64_on_a_cpu(device):
    inputs = make_inputs((300, 8, 600), device=device)
    with flce_ops.workspace(1):
        run(flce_ops.linear_cross_entropy, inputs)
    assert flce_ops.last_path().rows_per_chunk == (64 if device == "cpu" else 128)
