"""A temperature of each token in the Triton kernels, through Triton's interpreter: against ATen in float64, and bits.

The operators take it as a logit_scale and a softcap of each token.
"""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import scalars
from reference_divergence import KINDS, KINKED, make_pair
from reference_loss import error
from reference_policy import make_policy
from test_kl_div_operator import inner_args
from test_policy import inner_options
from test_triton_interpreter import RAGGED, double, operands
from test_triton_kl_div import off_the_kink

import flce_ops
from flce_ops import aten
from flce_ops.aten import cross_entropy as aten_of_logits
from flce_ops.aten import kl_div as aten_of_divergence
from flce_ops.aten.with_grad import policy_with_grad

pytest.importorskip("triton")

from flce_ops.triton import launch_backward, launch_forward, launch_with_grad
from flce_ops.triton.divergence import kl_div
from flce_ops.triton.given_logits import cross_entropy as of_logits
from flce_ops.triton.steps.with_grad import launch_policy_with_grad

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on log2(0) and exp2 of large numbers
]

N, D, V = RAGGED
TOLERANCE = {torch.float32: 6e-6, torch.float16: 3e-3}
MASK = {"output_mask": [True, True, False]}
CAPPED = pytest.mark.parametrize("capped", [False, True], ids=["plain", "capped"])
SMALL = 1 << 16  # bytes of workspace: chunks, and tokens whose logits are made again


def of_tokens(capped: bool, *, equal: bool = False, strided: bool = False) -> dict[str, torch.Tensor]:
    """logit_scale, and softcap, of each token, as the entry makes them of a temperature."""
    temperature = torch.full((N,), 0.7) if equal else 0.3 + 2.0 * torch.rand(N)
    found = {"logit_scale": torch.tensor(0.9) / temperature}
    if capped:
        found["softcap"] = torch.tensor(4.0) / temperature
    return {name: torch.stack([numbers, -numbers], 1)[:, 0] for name, numbers in found.items()} if strided else found


def alike(found, exact, tolerance):
    for ours, truth in zip(found, exact, strict=True):
        assert ours.shape == truth.shape
        assert not truth.numel() or error(ours, truth) <= tolerance


def doubled(numbers: dict) -> dict:
    return dict(zip(numbers, double(*numbers.values())))


@CAPPED
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_forward_and_backward_agree_with_float64(capped, dtype, poisoned_memory):
    args = operands(RAGGED, dtype, {"bias": True, "class_weight": True})
    numbers = of_tokens(capped, strided=True)
    asked = {"logit_sum": True, "expected_log_prob": True, "mean_logit": True, "log_sum_sq_probs": True}
    *found, rest, _ = launch_forward(*args, **asked, **numbers)
    *exact, exact_rest, _ = aten.forward(*double(*args), **asked, **doubled(numbers))
    alike(found, exact, TOLERANCE[dtype])
    cotangents, mask = torch.randn(4, N).unbind(), {"output_mask": [True, True, True]}
    *of_loss, of_entropy = double(*cotangents)
    ours = launch_backward(
        *cotangents[:3], *args, found[1], **numbers, **mask,
        grad_expected_log_prob=cotangents[3], expected_log_prob=found[3], lse_rest=rest,
    )  # fmt: skip
    truth = aten.backward(
        *of_loss, *double(*args), exact[1], **doubled(numbers), **mask,
        grad_expected_log_prob=of_entropy, expected_log_prob=exact[3], lse_rest=exact_rest,
    )  # fmt: skip
    alike(ours, truth, 5 * TOLERANCE[dtype])


@CAPPED
@pytest.mark.parametrize("nbytes", [None, SMALL], ids=["one chunk", "small workspace"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_pass_agrees_with_float64(capped, nbytes, smoothing, poisoned_memory):
    if capped and smoothing:
        pytest.skip("not of rank 1: another path")
    args = operands(RAGGED, torch.float32, {"bias": True, "class_weight": True})
    numbers, asked = of_tokens(capped), {"entropy": True, "lse": True, "mean_logit": True}
    options = {**scalars({"z_loss": 1e-2}), "label_smoothing": smoothing, **asked}
    with flce_ops.workspace(nbytes or 512 << 20):
        found = launch_with_grad(*args, None, None, **options, **numbers, output_mask=[True, True, True])
    truth = aten.with_grad(
        *double(*args), None, None, **doubled_options(options), **doubled(numbers), output_mask=[True, True, True]
    )
    alike(found, truth, TOLERANCE[torch.float32])


def doubled_options(options: dict) -> dict:
    return {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


@CAPPED
def test_several_classes_of_a_token_agree_with_float64(capped, poisoned_memory):
    input, weight, target, *_ = operands(RAGGED, torch.float32, {})
    topk = torch.stack([target, target.clamp(min=0).flip(0), target.clamp(min=0)], 1)
    q, numbers = torch.rand(N, 3), of_tokens(capped)
    args = (input, weight, topk, None, None, None, None)
    found = launch_with_grad(*args, **numbers, **MASK, target_weight=q)
    truth = aten.with_grad(*double(*args[:5]), None, None, **doubled(numbers), **MASK, target_weight=q.double())
    alike(found[:4], truth[:4], TOLERANCE[torch.float32])


@CAPPED
def test_policies_agree_with_float64(capped, poisoned_memory):
    call, numbers = make_policy(RAGGED), of_tokens(capped)
    args = [call[name] for name in ("input", "linear_weight", "target", "linear_bias", "advantages", "old_log_probs")]
    options = inner_options(objective="ppo")._asdict()
    scale = torch.rand(N)
    found = launch_policy_with_grad(*args, None, scale, None, **options, **numbers, **MASK)
    truth = policy_with_grad(
        *double(*args), None, scale.double(), None, **doubled_options(options), **doubled(numbers), **MASK
    )
    alike(found[1:], truth[1:], 2e-5)  # a ratio is off by what its logarithm is


@CAPPED
@pytest.mark.parametrize("kind", KINDS)
def test_divergences_agree_with_float64(kind, capped, poisoned_memory):
    args = inner_args(make_pair((N, D, 24, V), requires_grad=False, bias=True))
    numbers = of_tokens(capped)
    numbers |= {f"teacher_{name}": value * 1.2 for name, value in of_tokens(capped).items()}
    options = {"kind": kind, "beta": torch.tensor(0.3) if kind == "jsd" else None}
    scale, mask = torch.rand(N), {"output_mask": [True, True, True]}
    if kind in KINKED:
        scale *= off_the_kink(args, {"kind": kind, **{n: v[:, None] for n, v in numbers.items()}}, torch.float32)
    found = kl_div.launch_kl_div_with_grad(*args, scale, **options, **numbers, **mask)
    exact = [*double(*args), scale.double()]
    truth = aten_of_divergence.with_grad(*exact, **doubled_options(options), **doubled(numbers), **mask)
    alike(found, truth, 2e-5)
    forward = kl_div.launch_kl_div_forward(*args, **options, **numbers)
    alike(
        forward[:1],
        aten_of_divergence.forward(*double(*args), **doubled_options(options), **doubled(numbers))[:1],
        1e-5,
    )
    if kind == "nla":
        scale *= forward[0].exp()  # as autograd does
    backward = kl_div.launch_kl_div_backward(scale, *args, *forward[1:], **options, **numbers, **mask)
    alike(backward, found[2:], 2e-5)


@CAPPED
def test_given_logits_agree_with_float64(capped, poisoned_memory):
    logits, target = 3.0 * torch.randn(7, V), torch.randint(V, (7,))
    target[2] = -100
    numbers = {name: values[:7].contiguous() for name, values in of_tokens(capped).items()}
    found = of_logits.launch_with_grad(logits, target, None, None, None, **numbers, label_smoothing=0.1)
    truth = aten_of_logits.with_grad(logits.double(), target, None, None, None, **doubled(numbers), label_smoothing=0.1)
    alike(found[:3], truth[:3], TOLERANCE[torch.float32])
    forward = of_logits.launch_forward(logits, target, None, **numbers)
    exact = aten_of_logits.forward(logits.double(), target, None, **doubled(numbers))
    alike(forward[:2], exact[:2], TOLERANCE[torch.float32])
    cotangents = torch.randn(2, 7)
    ours = of_logits.launch_backward(*cotangents, None, logits, target, None, forward[1], forward[4], **numbers)
    right = aten_of_logits.backward(
        *cotangents.double(), None, logits.double(), target, None, exact[1], exact[4], **doubled(numbers)
    )
    alike([ours], [right], TOLERANCE[torch.float32])


@CAPPED
def test_equal_numbers_have_the_bits_of_one(capped):
    args = operands(RAGGED, torch.float16, {"bias": True})
    each = of_tokens(capped, equal=True)
    one = {name: values[0].clone() for name, values in each.items()}
    pair = inner_args(make_pair((N, D, 24, V), requires_grad=False, dtype=torch.float16))
    scale = torch.rand(N)
    for run in (
        lambda numbers: launch_forward(*args, expected_log_prob=True, **numbers),
        lambda numbers: launch_with_grad(*args, None, None, entropy=True, **numbers, **MASK),
        lambda numbers: kl_div.launch_kl_div_with_grad(*pair, scale, **numbers, **MASK),
        lambda numbers: of_logits.launch_with_grad(args[0].float(), args[2].clamp(max=34), None, None, None, **numbers),
    ):
        for ours, expected in zip(run(each), run(one), strict=True):
            assert torch.equal(ours, expected)


def test_what_ignored_tokens_hold_is_not_read():
    args = operands(RAGGED, torch.float32, {})
    numbers = of_tokens(True)
    clean = launch_with_grad(*args, None, None, **numbers, **MASK)
    for values in numbers.values():
        values[args[2] < 0] = torch.nan
    for ours, expected in zip(launch_with_grad(*args, None, None, **numbers, **MASK), clean, strict=True):
        assert torch.equal(ours, expected)
