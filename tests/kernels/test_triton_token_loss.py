"""The Triton path of linear_token_loss on the CPU through Triton's interpreter, against float64 in plain ATen."""

# N tokens, K classes of each, D hidden, V vocabulary

import pytest
import torch
from recorded import Recorded
from reference_loss import error
from reference_token_loss import make_call
from torch.utils._python_dispatch import _disable_current_modes

import flce_ops
from flce_ops.aten.cross_entropy import with_grad
from flce_ops.objectives.token_function import token_loss_of

pytest.importorskip("triton")

from flce_ops.triton import launch_with_grad
from flce_ops.triton.kernel import Kernel

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on log2(0) and exp2 of large numbers
]

SHAPE, CHUNKS = (37, 35, 131), (270, 12, 140)
TOLERANCE = 6e-6  # float32; twice the error that was seen


def focal(log_prob, gamma):
    return -((1 - log_prob.exp()) ** gamma) * log_prob


def unlikelihood(log_prob, a):
    return -torch.log1p(-log_prob.exp()) * a - a.log() * log_prob


def with_lse(log_prob, a, *, lse):
    return -a * log_prob + 1e-2 * lse**2


def several(log_prob, q):
    return -(q.softmax(0) * log_prob).sum()


CASES = {
    "focal": (focal, (), 0),
    "an infinite derivative where a tensor is 0": (unlikelihood, (), 0),
    "lse": (with_lse, (), 0),
    "a vector and an integer a token": (lambda lp, v, i, flag: -lp * v.sum() * (i + 1) * flag, (3,), 0),
    "K classes": (several, (4,), 4),
    "K classes and lse": (lambda lp, q, *, lse: -(q * lp).sum() + 0.1 * lse, (5,), 5),
    "slopes of a sum of 0": (lambda lp, q: lp[0] - lp[1] + 0 * q.sum(), (2,), 2),
}


def tensors_of(name, tokens, dtype=torch.float32):
    function, sizes, _ = CASES[name]
    if function is focal:
        return [torch.tensor(2.0, dtype=dtype)]
    tensors = [0.5 + torch.rand(tokens, *sizes, dtype=dtype)]
    if "integer" in name:
        tensors += [torch.randint(3, (tokens,)), torch.rand(tokens) < 0.5]
    return tensors


def double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check(call, loss, tensors, *, mask=(True, True, True), tolerance=TOLERANCE, **logits):
    operands = [call[name] for name in ("input", "linear_weight", "target", "linear_bias")]
    row_scale, options = torch.rand(len(operands[0])), {"output_mask": list(mask)}
    wide = {name: double(value) for name, value in logits.items()}
    exact = with_grad(
        *(*map(double, operands), None, row_scale.double()),
        **{"function": loss.name, "tensors": [*map(double, tensors)], **options, **wide},
    )
    found = launch_with_grad(*operands, None, row_scale, function=loss.name, tensors=tensors, **options, **logits)
    for ours, truth in zip(found[1:], exact[1:], strict=True):
        assert ours.shape == truth.shape
        assert error(ours, truth) <= tolerance
    return found


IN_CHUNKS = ("focal", "a vector and an integer a token", "K classes and lse")


@pytest.mark.parametrize(
    "name, shape", [*((name, SHAPE) for name in CASES), *((name, CHUNKS) for name in IN_CHUNKS)], ids=str
)
def test_functions_agree_with_float64(name, shape, poisoned_memory):
    """Ignored tokens hold nan. log_prob and tensors of 0 at rows that hold no token would make some functions nan."""
    function, _, topk = CASES[name]
    loss, tensors = token_loss_of(function), tensors_of(name, shape[0])
    call = make_call(shape, dtype=torch.float32, bias=True, topk=topk)
    ignored = (call["target"] == -100).view(shape[0], -1).all(1)
    for tensor in (call["input"], *tensors):
        if tensor.dim() and tensor.is_floating_point():
            tensor[ignored] = torch.nan
    with flce_ops.workspace(1 if shape is CHUNKS else 512 << 20):
        found = check(call, loss, tensors)
    assert flce_ops.last_path().chunks == (1 if shape is SHAPE else 3)
    assert not found[1][ignored].any() and not found[2][ignored].any()


def test_scaled_and_capped_logits(poisoned_memory):
    logits = {"softcap": torch.tensor(4.0), "logit_scale": torch.tensor(0.7)}
    for topk, loss in ((0, token_loss_of(focal)), (4, token_loss_of(several))):
        call = make_call(SHAPE, dtype=torch.float32, bias=True, topk=topk)
        tensors = [torch.rand(SHAPE[0], 4)] if topk else [torch.tensor(2.0)]
        check(call, loss, tensors, scale_gradient=True, **logits)


def test_a_row_whose_classes_overflow_against_its_target_is_rescued(poisoned_memory):
    call, loss = make_call(SHAPE, dtype=torch.float32), token_loss_of(focal)
    call["input"], call["linear_weight"] = 5 * torch.randn(SHAPE[:2]), 5 * torch.randn(SHAPE[2], SHAPE[1])
    assert check(call, loss, [torch.tensor(2.0)], mask=(True, True, False), tolerance=1e-4)[10].min() < -200


def launching(func, args, out):
    """Torch's operations that would launch a kernel."""
    view = func.is_view or "empty" in func.name() or func.name() == "aten::detach"
    return [] if view or func.name().startswith("flce::") else [func.name()]


@pytest.mark.parametrize("name", ["focal", "K classes and lse"])
def test_a_chunk_takes_at_most_8_launches_beside_the_functions_own(name, monkeypatch):
    function, _, topk = CASES[name]
    tokens = 140  # two chunks
    loss, tensors = token_loss_of(function), tensors_of(name, tokens)
    call = make_call((tokens, *CHUNKS[1:]), dtype=torch.float32, topk=topk)
    launches, launch = [], Kernel.__getitem__

    def recorded(kernel, grid):
        def run(*args, **options):
            launches.append(kernel.__name__)
            with _disable_current_modes():  # the interpreter is written with torch's operations
                launch(kernel, grid)(*args, **options)

        return run

    monkeypatch.setattr(Kernel, "__getitem__", recorded)
    outside = loss.losses_and_slopes

    def uncounted(*args):
        with _disable_current_modes():
            return outside(*args)

    monkeypatch.setattr(loss, "losses_and_slopes", uncounted)
    operands = [call[name] for name in ("input", "linear_weight", "target", "linear_bias")]
    weights = torch.rand(tokens, topk) if topk else None
    with flce_ops.workspace(1):
        with Recorded(launching) as of_function:
            launch_with_grad(
                *operands, None, None, function=loss.name, tensors=tensors, output_mask=[True, True, False]
            )
        ours = list(launches)
        launches.clear()
        with Recorded(launching) as of_cross_entropy:
            launch_with_grad(*operands, None, None, output_mask=[True, True, False], target_weight=weights)
    chunks, gradient = flce_ops.last_path().chunks, 1  # of the losses, which the function's derivative starts from
    assert chunks == 2
    more = len(ours) - len(launches) + len(of_function.seen) - len(of_cross_entropy.seen)
    assert more / chunks + gradient <= 8, (set(ours) - set(launches), of_function.seen)
    assert ours.count("token_numbers_kernel") == chunks
    assert ours.count("in_order_kernel") == sum(tensor.dim() > 0 for tensor in tensors)  # once a step
