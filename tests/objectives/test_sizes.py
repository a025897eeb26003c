"""Heads of odd sizes, rows that hold nan and inf, classes that are switched off: small on a CPU, large on a GPU.

More numbers than 2^31 and 2^32: tests/kernels/test_cuda_sizes.py.
"""

# N tokens, D hidden, V vocabulary

import math

import pytest
import torch
from inputs import make_inputs
from reference_loss import error, plain_loss, run, run_reference

import flce_ops

LARGE_V = 2**20 + 7  # 270 rows of it are two chunks; the dense logits in float64 take 2.3 GB
SIZES = {
    "a million classes": {"cpu": (3, 4, LARGE_V), "cuda": (270, 64, LARGE_V)},
    "a million classes, one token": {"cpu": (1, 3, LARGE_V), "cuda": (1, 64, LARGE_V)},
    "many features": {"cpu": (5, 16384, 37), "cuda": (300, 16384, 32003)},
    "many features, one class": {"cpu": (4, 16384, 1), "cuda": (700, 16384, 1)},
    "one token": {"cpu": (1, 24, 1021), "cuda": (1, 4096, 128256)},
    "one class": {"cpu": (200, 24, 1), "cuda": (5000, 4096, 1)},
    "one token, one class": {"cpu": (1, 1, 1), "cuda": (1, 8, 1)},
    "one feature": {"cpu": (70, 1, 67), "cuda": (5000, 1, 32003)},
}


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("size", SIZES)
def test_loss_and_gradients_are_no_worse_than_plain_torchs(device, size, reduction):
    """No token is ignored. The package leaves such tokens out of its products, plain torch does not, and a CPU's BLAS
    sums the 16384 products of a logit worse in fewer than four rows. Losses of plain torch are off by 3e-7 with four or
    five tokens (median of 200 draws), by 1.1e-6 with three; those of the package by the same with as many that count.
    A CPU's BLAS adds the million products of one row's hidden gradient one after another, and a sum near 1 loses those
    of rare classes: both are off by 9e-4 (median of 400 draws), by 7e-3 at most, and each by numbers of its own.
    """
    made = {"device": device, "dtype": dtype_of(device), "bias": True, "ignored": 0.0}
    inputs = make_inputs(SIZES[size][device], **made)
    exact, plain = run_reference(inputs, reduction=reduction), run(plain_loss, inputs, reduction=reduction)
    for name, ours in run(flce_ops.linear_cross_entropy, inputs, reduction=reduction).items():
        units = 8.0 if size == "one token" else 4.0
        floor = units * torch.finfo(torch.float32 if name == "loss" else dtype_of(device)).eps
        if name == "loss" and device == "cuda":
            floor = 4e-5  # tensor cores truncate the sums of 16384 products: seen 2.2e-5
        if name == "input" and size == "a million classes, one token" and device == "cpu":
            floor = 1e-2
        if exact[name].norm() == 0.0:  # of one class
            assert ours.abs().max() <= floor, name
        else:
            assert error(ours, exact[name]) <= 2.0 * error(plain[name], exact[name]) + floor, name


@pytest.mark.parametrize("workspace", [1 << 15, 512 << 20], ids=["several chunks", "one chunk"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_row_of_nan_and_one_of_inf_touch_their_own_rows_and_sums_over_all(device, reduction, workspace):
    """Touched may be the row's loss and hidden gradient, and what sums over tokens: the mean, the head's gradients."""
    inputs = make_inputs((300, 24, 131), device=device, dtype=dtype_of(device), bias=True, ignored=0.0)
    without = inputs.clone()
    without.target[[3, 297]] = -100
    inputs.input.data[3], inputs.input.data[297] = math.nan, math.inf
    others = torch.ones(300, dtype=torch.bool, device=device)
    others[[3, 297]] = False
    with flce_ops.workspace(workspace):
        found = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction)
    exact = run_reference(without, reduction=reduction)
    if reduction == "none":
        assert found["loss"][~others].isnan().all()
        assert error(found["loss"][others], exact["loss"][others]) < 1e-5
        of_input, scale = found["input"], 1.0
    else:
        assert found["loss"].isnan()
        of_input, scale = found["input"], 298 / 300
    bound = 1e-5 if device == "cpu" else 8e-3
    assert error(of_input[others], exact["input"][others] * scale) < bound
    assert not of_input[~others].isfinite().all(1).any()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_head_half_of_whose_classes_a_bias_switches_off_is_the_other_half(device, reduction):
    shape = (300, 64, 128256) if device == "cuda" else (70, 8, 1024)
    inputs = make_inputs(shape, device=device, dtype=dtype_of(device), bias=True, ignored=0.0)
    half = shape[2] // 2
    inputs.target %= half
    inputs.linear_bias.data[half:] = -math.inf
    smaller = inputs.clone()
    smaller.linear_weight = inputs.linear_weight.detach()[:half].clone().requires_grad_()
    smaller.linear_bias = inputs.linear_bias.detach()[:half].clone().requires_grad_()
    found = run(flce_ops.linear_cross_entropy, inputs, reduction=reduction)
    exact, plain = run_reference(smaller, reduction=reduction), run(plain_loss, smaller, reduction=reduction)
    floor = 4.0 * torch.finfo(dtype_of(device)).eps
    for name in ("loss", "input", "linear_weight", "linear_bias"):
        ours = found[name]
        if name.startswith("linear"):
            assert not ours[half:].any(), name
            ours = ours[:half]
        assert error(ours, exact[name]) <= 2.0 * error(plain[name], exact[name]) + floor, name
