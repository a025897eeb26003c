"""The GEMMs with tensor maps, as on Hopper, in Triton's interpreter: whole calls, and which matrices maps can read."""

# N tokens, D hidden, V vocabulary

from dataclasses import replace

import inputs
import pytest
import torch
from interpreter import let_tensor_maps_add
from marks import IN_INTERPRETER
from reference_loss import with_lse
from test_triton_interpreter import assert_close, double, logit_options, operands

from flce_ops import aten
from flce_ops.math.options import KlDivOperands
from flce_ops.meta.arguments import Forward, KlDivForward, KlDivWithGrad, WithGrad
from flce_ops.support.workspace import get_workspace
from flce_ops.triton import launch_backward, launch_forward, launch_with_grad
from flce_ops.triton.gemm import logits_gemm, tiles
from flce_ops.triton.gemm.tiles import INPUT_TILES, WEIGHT_TILES
from flce_ops.triton.rows import copy_rows

pytestmark = IN_INTERPRETER

# in tiles of 32x128x32: partial tiles on every side, in matrices that tensor maps can read
SHAPE = 40, 72, 264


@pytest.fixture(params=[256, 128], ids=["two parts a tile", "one part a tile"])
def by_tensor_maps(request, monkeypatch):
    """Yields the tensor maps that were made."""
    let_tensor_maps_add(monkeypatch)
    by_maps = replace(tiles.INTERPRETER, tma=True, block_n=request.param)
    monkeypatch.setattr(tiles, "INTERPRETER", by_maps)
    for table in (INPUT_TILES, WEIGHT_TILES):
        monkeypatch.setitem(table, "interpreter", replace(table["interpreter"], tma=True))
    made, kernel_matrices = [], logits_gemm.kernel_matrices

    def counted(matrices, blocks, use_tma):
        made.extend(matrices if use_tma else [])
        return kernel_matrices(matrices, blocks, use_tma)

    monkeypatch.setattr(logits_gemm, "kernel_matrices", counted)
    yield made
    assert made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_forward_agrees_with_float64(dtype, by_tensor_maps, poisoned_memory):
    args = operands(SHAPE, dtype, {"bias": True})
    *found, _ = launch_forward(*args, logit_sum=True, expected_log_prob=True, argmax=True)
    *truth, _ = aten.forward(*double(*args), logit_sum=True, expected_log_prob=True, argmax=True)
    assert_close(with_lse(found), with_lse(truth), dtype)


@pytest.mark.parametrize("options", [{"bias": True}, {"softcap": 4.0, "logit_scale": 0.7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_backward_agrees_with_float64(dtype, options, by_tensor_maps, poisoned_memory):
    args = operands(SHAPE, dtype, options)
    _, pair, *_ = aten.forward(*double(*args), **logit_options(options))
    cotangents = -torch.rand(SHAPE[0]) - 0.1, torch.rand(SHAPE[0]) + 0.1, None
    mask = [True, True, args[3] is not None]
    found = launch_backward(*cotangents, *args, pair.float(), output_mask=mask, **logit_options(options))
    truth = aten.backward(*double(*cotangents), *double(*args), pair, output_mask=mask, **logit_options(options))
    assert_close(found, truth, dtype)


@pytest.mark.parametrize("options", [{"bias": True}, {"softcap": 4.0, "z_loss": 1e-2}], ids=str)
def test_a_step_agrees_with_float64(options, by_tensor_maps, poisoned_memory):
    args, row_scale = operands(SHAPE, torch.float32, options), torch.rand(SHAPE[0])
    numbers = inputs.scalars({name: options[name] for name in ("z_loss",) if name in options})
    asked = {**numbers, **logit_options(options), "output_mask": [True, True, args[3] is not None]}
    found = launch_with_grad(*args, row_scale, **asked)
    assert_close(found, aten.with_grad(*double(*args, row_scale), **asked), torch.float32)


def test_features_are_padded_for_maps_and_forwards_buffer_is_not(monkeypatch):
    """A Forward names the buffer only for its backward, which pads anew."""
    monkeypatch.setattr(copy_rows, "on_tma_device", lambda tensor: True)
    seen = []

    @copy_rows.with_padded_features
    def launch(call):
        seen.append((call.operands.input.shape[1], call.main_grad))
        return (call.operands.input.sum(1),)

    x, w, target, *_ = operands((5, 37, 67), torch.float16, {})
    call = Forward.bind(x, w, target, None, None, main_grad=torch.zeros(67, 37))
    (sums,) = launch(call)
    assert seen == [(48, None)] and torch.equal(sums, x.sum(1))


@pytest.mark.parametrize("operator", [WithGrad, KlDivForward, KlDivWithGrad])
def test_ranks_with_shards_of_different_sizes_keep_the_same_workspace(operator, monkeypatch):
    """Otherwise they would have different chunks, of each of which they exchange numbers, and wait for ever."""
    monkeypatch.setattr(copy_rows, "on_tma_device", lambda tensor: True)
    left = []

    @copy_rows.with_padded_features
    def launch(call):
        left.append((call.operands.input.shape[1], get_workspace()))
        return (call.operands.input.sum(1),)

    sharing = {"group": "two ranks", "ranks": 2, "vocab_size": 99}
    for classes in (64, 35):
        x, w, target, *_ = operands((5, 37, classes), torch.float16, {})
        if operator is WithGrad:
            launch(operator.bind(x, w, target, None, None, None, **sharing, vocab_start=0, output_mask=[True] * 3))
            continue
        teacher = KlDivOperands(x, w, None, torch.randn(5, 16), torch.randn(classes, 16), None, None, None)
        own = {"row_scale": torch.ones(5), "output_mask": [True] * 3} if operator is KlDivWithGrad else {}
        launch(operator.bind(*teacher, **own, **sharing))
    assert left[0] == left[1] and left[0][0] == 48


def test_only_a_layout_that_maps_can_read_is_read_by_them(monkeypatch):
    monkeypatch.setattr(tiles, "on_tma_device", lambda tensor: True)
    aligned, misaligned = torch.empty(8, 48, dtype=torch.bfloat16), torch.empty(8, 37, dtype=torch.bfloat16)
    assert tiles.takes_tma(aligned) and not tiles.takes_tma(misaligned)
