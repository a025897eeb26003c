"""Softcaps far below the logits, where 1 - tanh^2 has no digits, and far above, where 1 - 2 / (1 + e^2y) has none."""

# N tokens, D hidden, V vocabulary

import numpy as np
import pytest
import torch
from inputs import scalars
from reference_divergence import plain_divergence, reference_divergence
from reference_loss import dense_logits, error, plain_loss, reference_loss

import flce_ops
from flce_ops import aten
from flce_ops.aten.logits import cap_with_slope

N, D, V = 13, 31, 57
DRAWS = 40
# the cap, and the standard deviation of the logits before it, up to eight caps
CAPS = [(1.0, 8.0), (5.0, 10.0), (5.0, 40.0), (30.0, 100.0), (50.0, 400.0)]
# Plain torch's error if nothing cancels: the rounding of logits of hundreds, times 2.
FLOOR = 4e-7


def draw(size):
    """Returns input, linear_weight, target."""
    return torch.randn(N, D), torch.randn(V, D) * size / D**0.5, torch.randint(V, (N,))


def gradients(loss_of, input, linear_weight, dtype=torch.float32):
    leaves = [operand.to(dtype, copy=True).requires_grad_() for operand in (input, linear_weight)]
    return torch.autograd.grad(loss_of(*leaves), leaves)


def assert_worst_draw_is_no_worse(draws, exact_of, plain_of, ours_of, floor=FLOOR):
    """For each gradient the largest error over the draws is compared with plain torch's largest."""
    worst = {"plain": [0.0, 0.0], "ours": [0.0, 0.0]}
    for arguments in draws:
        exact = exact_of(arguments)
        for name, found in (("plain", plain_of(arguments)), ("ours", ours_of(arguments))):
            worst[name] = [max(e, error(*pair)) for e, *pair in zip(worst[name], found, exact, strict=True)]
    for ours, plain in zip(worst["ours"], worst["plain"]):
        assert ours <= 1.1 * plain + floor, worst


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("softcap, size", CAPS)
def test_gradients_are_no_worse_than_plain_torch(softcap, size, reduction):
    options = {"softcap": softcap, "reduction": reduction}

    def of(function, dtype=torch.float32):
        return lambda d: gradients(lambda x, w: function(x, w, d[2], **options).sum(), *d[:2], dtype)

    draws = [draw(size) for _ in range(DRAWS)]
    ours = of(flce_ops.linear_cross_entropy)
    assert_worst_draw_is_no_worse(draws, of(reference_loss, torch.float64), of(plain_loss), ours)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("softcap, size", CAPS[1:3])
def test_gradients_of_the_divergence_are_no_worse_than_plain_torch(softcap, size, reduction):
    options = {"softcap": softcap, "reduction": reduction}

    def of(function, dtype=torch.float32):
        def made(d):
            teacher = {"teacher_input": d[2].to(dtype), "teacher_weight": d[3].to(dtype)}
            return gradients(lambda x, w: function(input=x, linear_weight=w, **teacher, **options).sum(), *d[:2], dtype)

        return made

    draws = [(*draw(size)[:2], torch.randn(N, 7), torch.randn(V, 7)) for _ in range(DRAWS)]
    ours = of(flce_ops.linear_kl_div)
    assert_worst_draw_is_no_worse(draws, of(reference_divergence, torch.float64), of(plain_divergence), ours)


def test_gradients_of_log_probs_and_entropy_are_no_worse_than_plain_torch():
    def ours(x, w, target):
        found = flce_ops.linear_log_probs(x, w, target, softcap=5.0, entropy=True)
        return found.log_probs.sum() + found.entropy.sum()

    def plain(x, w, target):
        log_p = dense_logits(x, w, softcap=5.0).log_softmax(-1)
        return log_p.gather(1, target[:, None]).sum() - (log_p.exp() * log_p).sum()

    def of(function, dtype=torch.float32):
        return lambda d: gradients(lambda x, w: function(x, w, d[2]), *d[:2], dtype)

    draws = [draw(40.0) for _ in range(DRAWS)]
    assert_worst_draw_is_no_worse(draws, of(plain, torch.float64), of(plain), of(ours))


def test_second_derivatives_are_no_worse_than_plain_torch():
    def of(function, dtype=torch.float32):
        def squared_norm(x, w, target):
            loss = function(x, w, target, softcap=5.0)
            return sum(g.square().sum() for g in torch.autograd.grad(loss, (x, w), create_graph=True))

        return lambda d: gradients(lambda x, w: squared_norm(x, w, d[2]), *d[:2], dtype)

    draws = [draw(25.0) for _ in range(DRAWS)]
    ours = of(flce_ops.linear_cross_entropy)
    assert_worst_draw_is_no_worse(draws, of(reference_loss, torch.float64), of(plain_loss), ours)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on exp2 of large numbers
@pytest.mark.parametrize("softcap, size", [(5.0, 40.0), (300.0, 3.0), (1e4, 3.0), (1e8, 3.0)])
@pytest.mark.parametrize("kernel", ["one pass", "recomputed"])
def test_gradients_of_the_triton_kernels_are_no_worse_than_plain_torch(kernel, softcap, size):
    launchers = pytest.importorskip("flce_ops.triton")
    options = scalars({"softcap": softcap, "output_mask": [True, True, False]})
    row_scale = torch.full((N,), 1 / N)

    def of(function, dtype=torch.float32):
        return lambda d: gradients(lambda x, w: function(x, w, d[2], softcap=softcap), *d[:2], dtype)

    def ours(d):
        operands = (*d, None, None)
        if kernel == "one pass":
            return launchers.launch_with_grad(*operands, row_scale, **options)[2:4]
        _, pair, *_ = aten.forward(*operands, softcap=options["softcap"])
        return launchers.launch_backward(-row_scale, row_scale, None, *operands, pair, **options)[:2]

    draws = [draw(size) for _ in range(12)]  # few draws, so plain torch's worst error depends on luck
    assert_worst_draw_is_no_worse(draws, of(reference_loss, torch.float64), of(plain_loss), ours, floor=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_slope_keeps_its_digits_until_it_underflows(dtype):
    """Checks float64, too, against NumPy's long double. The rounding of the ratio itself costs 2 ratio units."""
    ratio = torch.linspace(-30, 30, 1001, dtype=dtype)
    _, slope = cap_with_slope(ratio.clone(), torch.ones((), dtype=dtype))
    exact = 1 / np.cosh(ratio.numpy().astype(np.longdouble)) ** 2
    unit = torch.finfo(dtype).eps
    assert (np.abs(slope.numpy() / exact - 1) < 8 * unit).all()
    limits = torch.tensor([-torch.inf, 0.0, torch.inf, torch.nan], dtype=dtype)
    capped, slope = cap_with_slope(limits, torch.full((), 5.0, dtype=dtype))
    assert torch.equal(capped.nan_to_num(7.0), torch.tensor([-5.0, 0.0, 5.0, 7.0], dtype=dtype))
    assert torch.equal(slope.nan_to_num(7.0), torch.tensor([0.0, 1.0, 0.0, 7.0], dtype=dtype))
