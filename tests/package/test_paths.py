"""The table of paths: what it says is what runs, and last_path() gives the reason."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs

import flce_ops
from flce_ops import aten
from flce_ops.meta.arguments import KlDivForward
from flce_ops.ops.paths import KERNELS, LOSS, CallFacts, facts_of
from flce_ops.ops.saved_logits import SAVE_LOGITS
from flce_ops.support.path import Choice, choose

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HALF = [torch.bfloat16, torch.float16]
SMOOTHED_AND_CAPPED = {"label_smoothing": 0.1, "softcap": 5.0}


def test_the_reason_names_what_rules_out_the_paths_before():
    inputs = make_inputs((24, 16, 50), ignored=0.5)
    flce_ops.linear_cross_entropy(*inputs.args)
    expected = "cpu tensors in torch.float32 (triton expects an NVIDIA GPU, half operands), without ignored tokens"
    assert flce_ops.last_path().reason == expected
    teacher = (torch.randn(24, 7), torch.randn(50, 7))
    flce_ops.linear_kl_div(*inputs.args[:2], *teacher)
    expected = "cpu tensors in torch.float32 (triton expects an NVIDIA GPU, half operands, a half teacher)"
    assert flce_ops.last_path().reason == expected
    facts = CallFacts("cuda", torch.bfloat16, label_smoothing=True, softcap=True)
    op = "linear_cross_entropy_with_grad"
    expected = "cuda tensors in torch.bfloat16 (triton expects no label smoothing under a softcap)"
    assert Choice(op, KERNELS[op], choose(KERNELS[op], facts), facts).reason() == expected


@pytest.mark.parametrize(
    ("options", "op"),
    [({"label_smoothing": 0.1}, "with_grad"), ({"softcap": 5.0}, "with_grad"), (SMOOTHED_AND_CAPPED, "forward")],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_smoothing_under_a_softcap_recomputes_where_triton_would(options, op, reduction, monkeypatch):
    """Where the path is chosen, the test pretends to have an NVIDIA GPU. The operators run on the CPU."""
    monkeypatch.setattr(
        "flce_ops.ops.paths.loss_facts",
        lambda *operands, **known: CallFacts("cuda", torch.bfloat16, wants_gradient=True, **known),
    )
    inputs = make_inputs((24, 16, 50))
    token_weight = torch.rand(24) if reduction == "sum" else None
    flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction, token_weight=token_weight, **options)
    assert flce_ops.last_path().op == f"linear_cross_entropy_{op}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_takes_half_operands_and_given_logits_in_float32_too(dtype):
    """On an NVIDIA GPU; a scalar loss in float16 makes its gradients in backward, so that operator is not for it."""
    for op, paths in KERNELS.items():
        taken = HALF
        if op.startswith("cross_entropy"):
            taken = [*HALF, torch.float32]
        elif op.endswith("with_grad") and not op.startswith("linear_kl_div"):
            taken = [torch.bfloat16]
        assert (choose(paths, CallFacts("cuda", dtype)).name == "triton") is (dtype in taken), op
        assert choose(paths, CallFacts("cpu", dtype)).name == "aten", op


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_that_runs_is_the_one_that_the_table_of_losses_names(device, dtype, reduction):
    inputs = make_inputs((24, 16, 50), device=device, dtype=dtype)
    facts = CallFacts(device, dtype, wants_gradient=True)
    in_forward = reduction == "mean" and choose(LOSS["a scalar loss"], facts).name == "one pass"
    assert in_forward == (reduction == "mean" and dtype != torch.float16)
    flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction)
    op = "linear_cross_entropy_" + ("with_grad" if in_forward else "forward")
    path = flce_ops.last_path()
    assert (path.op, path.implementation) == (op, choose(KERNELS[op], facts).name)


def test_a_kernel_called_by_itself_was_chosen_by_no_table():
    aten.forward(*make_inputs((24, 16, 50), ignored=0.0, requires_grad=False).args)
    assert flce_ops.last_path() == flce_ops.Path("", "", "called by itself", rows_per_chunk=24, chunks=1)


def test_each_distinct_answer_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr("flce_ops.support.path._logged", set())
    inputs = make_inputs((24, 16, 50), ignored=0.0)
    with caplog.at_level("INFO", logger="flce_ops"):
        for _ in range(2):
            flce_ops.linear_cross_entropy(*inputs.args)
    path = flce_ops.last_path()
    assert caplog.messages == [f"{path.op} runs on {path.implementation} ({path.reason}): 1 chunks of 24 rows"]


@pytest.mark.parametrize("paths", [*LOSS.values(), *SAVE_LOGITS.values(), *KERNELS.values()])
def test_every_table_ends_in_a_path_without_conditions(paths):
    """So some path runs for all facts."""
    assert not paths[-1].conditions and all(path.conditions for path in paths[:-1])


@pytest.mark.parametrize(
    ("op", "facts", "triton"),
    [
        ("with_grad", CallFacts("cuda", torch.bfloat16), True),
        ("with_grad", CallFacts("cuda", torch.bfloat16, label_smoothing=True), True),
        ("with_grad", CallFacts("cuda", torch.bfloat16, label_smoothing=True, softcap=True), False),
        ("with_grad", CallFacts("cuda", torch.float16), False),
        ("with_grad", CallFacts("cuda", torch.bfloat16, empty=True), False),
        ("with_grad", CallFacts("cuda", torch.bfloat16, one_class=True), False),
        ("with_grad", CallFacts("cpu", torch.bfloat16), False),
        ("forward", CallFacts("cuda", torch.float16, label_smoothing=True, softcap=True), True),
        ("forward", CallFacts("cuda", torch.float32), False),
        ("backward", CallFacts("cuda", torch.float16), True),
    ],
)
def test_kernels_that_triton_takes(op, facts, triton):
    assert (choose(KERNELS[f"linear_cross_entropy_{op}"], facts).name == "triton") == triton


@pytest.mark.parametrize(
    ("facts", "triton"),
    [
        (CallFacts("cuda", torch.bfloat16, teacher=torch.float16, softcap=True), True),
        (CallFacts("cuda", torch.bfloat16, teacher=torch.float16, one_class=True), False),
        (CallFacts("cuda", torch.float16), True),  # class probabilities
        (CallFacts("cuda", torch.bfloat16, teacher=torch.float32), False),
        (CallFacts("cuda", torch.float32, teacher=torch.bfloat16), False),
        (CallFacts("cuda", torch.bfloat16, teacher=torch.bfloat16, rank_without_classes=True), False),
        (CallFacts("cuda", torch.bfloat16, teacher=torch.bfloat16, empty=True), False),
        (CallFacts("cpu", torch.bfloat16, teacher=torch.bfloat16), False),
    ],
)
@pytest.mark.parametrize("op", ["forward", "backward", "with_grad"])
def test_divergences_that_triton_takes(op, facts, triton):
    assert (choose(KERNELS[f"linear_kl_div_{op}"], facts).name == "triton") == triton


def test_the_facts_of_a_divergence_are_the_same_on_all_ranks():
    operands = [torch.zeros(4, 8), torch.zeros(1, 8), None, torch.zeros(4, 6), torch.zeros(1, 6), None, None, None]
    call = KlDivForward.bind(*operands, group="any", ranks=3, vocab_size=4)
    assert facts_of(call) == CallFacts(vocabulary_dimensions=1, rank_without_classes=True, teacher=torch.float32)
