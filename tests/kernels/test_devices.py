"""Tensors on two devices are refused by name, whichever argument is on the other device. "meta" stands for the other
device.
"""

# N tokens, D and E hidden sizes, V vocabulary, K positions of a K-dimensional loss

import pytest
import torch

import flce_ops

N, D, E, V, K = 6, 4, 5, 9, 2

HIDDEN, HEAD = {"input": torch.randn(N, D)}, {"linear_weight": torch.randn(V, D), "linear_bias": torch.randn(V)}
LABELS = {"target": torch.randint(V, (N,))}
FACTORS = {"weight": torch.rand(V), "token_weight": torch.rand(N)}
NUMBERS = {"normalizer": torch.tensor(3.0)}  # may be on the CPU beside tensors of a GPU
SCALES = {"logit_scale": torch.tensor(2.0), "temperature": torch.tensor(0.5)}  # may be on the CPU, too
TEACHER = {"teacher_input": torch.randn(N, E), "teacher_weight": torch.randn(V, E), "teacher_bias": torch.randn(V)}
OF_TOKENS = {name: torch.randn(N) for name in ("advantages", "old_log_probs", "ref_log_probs")}
POSITIONS = {
    "linear_weight": torch.randn(V, K, D),
    "linear_bias": torch.randn(V, K),
    "target": torch.randint(V, (N, K)),
    "token_weight": torch.rand(N, K),
}

CALLS = {
    "loss": (flce_ops.linear_cross_entropy, HIDDEN | HEAD | LABELS | FACTORS | NUMBERS),
    "learnt scale": (flce_ops.linear_cross_entropy, HIDDEN | HEAD | LABELS | SCALES),
    "probabilities": (flce_ops.linear_cross_entropy, HIDDEN | HEAD | {"target": torch.rand(N, V)}),
    "positions": (flce_ops.linear_cross_entropy, HIDDEN | POSITIONS),
    "soft targets": (
        flce_ops.linear_cross_entropy,
        HIDDEN | HEAD | {"target": torch.randint(V, (N, K)), "target_weight": torch.rand(N, K)},
    ),
    "policy": (flce_ops.linear_policy_loss, HIDDEN | HEAD | LABELS | OF_TOKENS | {"token_weight": torch.rand(N)}),
    "log-probabilities": (flce_ops.linear_log_probs, HIDDEN | HEAD | LABELS),
    "given logits": (flce_ops.cross_entropy, {"logits": torch.randn(N, V)} | LABELS | FACTORS | NUMBERS),
    "divergence": (flce_ops.linear_kl_div, HIDDEN | HEAD | LABELS | TEACHER | {"token_weight": torch.rand(N)}),
    "teacher_probs": (flce_ops.linear_kl_div, HIDDEN | HEAD | {"teacher_probs": torch.rand(N, V)}),
}


@pytest.mark.parametrize(("call", "odd"), [(call, name) for call, (_, given) in CALLS.items() for name in given])
def test_a_tensor_on_another_device_is_refused_by_name(call, odd):
    function, arguments = CALLS[call]
    of = next(iter(arguments))
    name = rf"\w+: expected (?!{of} ).* on the device of {of}, meta, got cpu; pass \w+\.to\({of}\.device\), or {of}\.to"
    if odd != of:
        name = rf"^{function.__name__}: expected {odd} on the device of {of}, cpu, got meta"
    before = flce_ops.last_path()
    with pytest.raises(ValueError, match=name):
        function(**arguments | {odd: arguments[odd].to("meta")})
    assert flce_ops.last_path() is before, "a kernel ran before the refusal"


def test_all_on_one_device_are_not_refused():
    for function, arguments in CALLS.values():
        function(**arguments)


def test_a_tensor_that_stayed_behind_on_the_cpu_is_refused_too():
    for function, arguments in CALLS.values():
        of, *others = arguments
        for odd in set(others) - set(NUMBERS) - set(SCALES):
            elsewhere = {name: tensor if name == odd else tensor.to("meta") for name, tensor in arguments.items()}
            with pytest.raises(ValueError, match=rf"^{function.__name__}: expected {odd} on the device of {of}, meta"):
                function(**elsewhere)


def test_numbers_may_stay_on_the_cpu():
    elsewhere = {name: tensor.to("meta") for name, tensor in (HIDDEN | HEAD | LABELS).items()}
    assert flce_ops.linear_cross_entropy(**elsewhere, **NUMBERS, **SCALES).is_meta


def test_the_inner_operators_refuse_factors_of_rows_elsewhere():
    flce, rows = torch.ops.flce, torch.ones(N, device="meta")
    head, logits = (*HIDDEN.values(), HEAD["linear_weight"]), torch.randn(N, V)
    with pytest.raises(ValueError, match="linear_cross_entropy_with_grad: expected row_scale on cpu, got meta"):
        flce.linear_cross_entropy_with_grad(*head, LABELS["target"], None, None, rows, output_mask=[True] * 3)
    with pytest.raises(ValueError, match="cross_entropy_with_grad: expected row_scale on cpu, got meta"):
        flce.linear_cross_entropy_with_grad(logits, None, LABELS["target"], None, None, rows, output_mask=[True] * 3)
