"""The table of paths: what it says is what runs, and docs/paths.md shows it."""

# N tokens, D hidden, V vocabulary

import contextvars
import sys
from pathlib import Path

import pytest
import torch
from inputs import make_inputs
from torch.utils.checkpoint import checkpoint

import flce_ops
from flce_ops import aten, explain
from flce_ops.meta.arguments import KlDivForward
from flce_ops.ops.call_facts import CallFacts, facts_of
from flce_ops.ops.paths import KERNELS, LOSS, SAVE_LOGITS
from flce_ops.support.path import Choice
from flce_ops.support.table import choose
from flce_ops.support.vendor import H200, Compiling, compiling

DOCS = Path(__file__).parents[2] / "docs"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HALF = [torch.bfloat16, torch.float16]
SMOOTHED_AND_CAPPED = {"label_smoothing": 0.1, "softcap": 5.0}


def running(text):
    """{choice: path} of the lines in which `explain` says what runs."""
    found, title = {}, ""
    for line in text.splitlines():
        title = title if line.startswith(" ") else line
        if line.endswith(" runs"):
            found[title] = line.split("  ")[1]
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.1, "softcap": 5.0},
        {"gradient_threshold": 0.1, "gradient_mode": "drop"},
        {"gradient_threshold": 0.1, "gradient_mode": "drop", "label_smoothing": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_explain_names_the_operator_and_the_implementation_that_run(device, dtype, reduction, options):
    if dtype == torch.float16 and "gradient_threshold" in options:
        pytest.skip("refused by name")
    inputs = make_inputs((24, 16, 50), device=device, dtype=dtype)
    said = running(explain(flce_ops.linear_cross_entropy, *inputs.args, reduction=reduction, **options))
    flce_ops.linear_cross_entropy(*inputs.args, reduction=reduction, **options)
    path = flce_ops.last_path()
    assert said[f"flce::{path.op}"] == path.implementation


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
        elif op == "linear_cross_entropy_double_backward":
            taken = []
        elif op.endswith("with_grad") and not op.startswith("linear_kl_div"):
            taken = [torch.bfloat16]
        assert (choose(paths, CallFacts("cuda", dtype)).name == "triton") is (dtype in taken), op
        assert choose(paths, CallFacts("cpu", dtype)).name == "aten", op


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, SMOOTHED_AND_CAPPED], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frozen_head_with_a_pair_is_copied_under_transforms_alone(dtype, options):
    """On an NVIDIA GPU, too. Without a copy, the pair has its own operator."""

    def path(**facts):
        asked = {"wants_gradient": True} | options | facts
        return choose(LOSS["a scalar loss of a head with a low-rank pair"], CallFacts("cuda", dtype, **asked)).name

    in_forward = "recompute" if dtype == torch.float16 else "one pass"
    assert path() == in_forward
    for facts in ({"wants_gradient": False}, {"saved_tensor_hooks": True}, {"checkpoint": True}):
        assert path(**facts) == "recompute"
    assert path(functorch=True) == path(trains_weight=True) == "concatenated"


def test_explain_of_a_head_with_a_pair():
    entry = torch.ops.flce.linear_cross_entropy_low_rank
    inputs = make_inputs((24, 16, 50))
    pair = torch.randn(24, 3), torch.randn(50, 3).requires_grad_()
    for frozen in (True, False):
        weight = inputs.linear_weight.detach().requires_grad_(not frozen)
        call = inputs.input, weight, *pair, inputs.target
        for options in ({}, {"reduction": "none"}):
            said = running(explain(entry, *call, **options))
            entry(*call, **options)
            path = flce_ops.last_path()
            assert said["a scalar loss of a head with a low-rank pair"] == ("one pass" if frozen else "concatenated")
            assert said[f"flce::{path.op}"] == path.implementation
    text = explain(entry, *call)
    assert "one pass      ruled out: expects a linear_weight without a gradient" in text


def test_probabilities_have_their_smoothing_in_them():
    """Probabilities are smoothed in advance, so smoothing rules out no path for them, with any softcap."""
    facts = CallFacts("cuda", torch.bfloat16, wants_gradient=True, **SMOOTHED_AND_CAPPED)
    assert choose(LOSS["a scalar loss"], facts).name == "recompute"
    inputs = make_inputs((24, 16, 50), dtype=torch.bfloat16)
    call = (*inputs.args[:2], torch.rand(24, 50))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["flce_ops.explain"], "facts_of_call", lambda call: facts)
        text = explain(flce_ops.linear_cross_entropy, *call, **SMOOTHED_AND_CAPPED)
    assert running(text) == {"a scalar loss": "one pass", "flce::linear_kl_div_with_grad": "triton"}


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


@pytest.mark.parametrize("dtype", HALF)
def test_explain_knows_autocast_and_who_asks_for_gradients(dtype):
    inputs = make_inputs((24, 16, 50))
    with torch.autocast("cpu", dtype):
        said = running(explain(flce_ops.linear_cross_entropy, *inputs.args))
        flce_ops.linear_cross_entropy(*inputs.args)
    assert f"flce::{flce_ops.last_path().op}" in said
    with torch.no_grad():
        said = running(explain(flce_ops.linear_cross_entropy, *inputs.args))
    assert said == {"a scalar loss": "recompute", "flce::linear_cross_entropy_forward": "aten"}


def test_explain_says_what_rules_a_path_out():
    inputs = make_inputs((24, 16, 50), dtype=torch.float16)
    text = explain(flce_ops.linear_cross_entropy, *inputs.args, label_smoothing=0.1)
    assert "one pass      ruled out: expects another dtype than float16" in text
    assert "triton        ruled out: expects an NVIDIA GPU" in text

    def inside(input):
        said.append(explain(flce_ops.linear_cross_entropy, input, *inputs.args[1:]))
        return flce_ops.linear_cross_entropy(input, *inputs.args[1:])

    said = []
    inputs = make_inputs((24, 16, 50))
    checkpoint(inside, inputs.input, use_reentrant=False)
    assert "one pass      ruled out: expects no saved-tensor hooks" in said[0]


@pytest.mark.parametrize(
    ("shape", "workspace", "options", "first", "others"),
    [
        ((130, 24, 67), 512 << 20, {}, "as others", "chunks"),
        ((2000, 1024, 8304), 24 << 20, {}, "as others", "chunks"),
        ((2000, 1024, 8304), 16 << 20, {}, "overlay", "chunks"),
        ((2000, 1024, 8304), 3 << 20, {}, "overlay", "recompute"),
        ((2000, 1024, 8304), 3 << 20, {"label_smoothing": 0.1}, "as others", "recompute"),
        ((150, 24, 300), 1, {}, "as others", "recompute"),
    ],
)
def test_explain_says_how_triton_takes_the_tokens(shape, workspace, options, first, others, monkeypatch):
    """The test pretends to have a GPU. The tile table is that of Triton's interpreter."""
    chunking = pytest.importorskip("flce_ops.triton.steps.chunking")
    facts = CallFacts("cuda", torch.bfloat16, wants_gradient=True, label_smoothing=bool(options))
    monkeypatch.setattr(sys.modules["flce_ops.explain"], "facts_of_call", lambda call: facts)
    inputs = make_inputs(shape).clone(torch.bfloat16)  # whose product for the targets takes a CPU seconds
    with flce_ops.workspace(workspace):
        said = running(explain(flce_ops.linear_cross_entropy, *inputs.args, **options))
        problem = chunking.problem_of(shape[0], inputs.linear_weight, [True, True, False], smoothed=bool(options))
        found = chunking.best_chunking(problem)
    assert said["the first tokens of a step in Triton"] == first
    assert said["the other tokens of a step in Triton"] == others
    assert (first == "overlay", others == "recompute") == (found.overlay is not None, found.recompute)


def test_explain_of_the_other_functions_and_refusals():
    inputs = make_inputs((24, 16, 50))
    text = explain(flce_ops.linear_log_probs, *inputs.args)
    assert text.endswith("logits of 24 of 24 tokens saved")
    assert running(text) == {
        "logits between a forward operator and its backward one": "save",
        "flce::linear_cross_entropy_forward": "aten",
        "flce::linear_cross_entropy_backward": "aten",
    }
    teacher = (torch.randn(24, 7), torch.randn(50, 7))
    said = running(explain(flce_ops.linear_kl_div, *inputs.args[:2], *teacher))
    assert said == {"a scalar loss": "one pass", "flce::linear_kl_div_with_grad": "aten"}
    with pytest.raises(TypeError, match="expected first linear_cross_entropy, .* or cross_entropy"):
        explain(torch.nn.functional.cross_entropy, *inputs.args)
    with pytest.raises(TypeError, match="missing a required argument: 'target'"):
        explain(flce_ops.linear_cross_entropy, *inputs.args[:2])


def test_tensors_on_meta_stand_for_those_of_another_device():
    inputs = make_inputs((24, 16, 50))
    meta = [None if argument is None else argument.to("meta") for argument in inputs.args]
    assert "flce::linear_cross_entropy_with_grad" in running(explain(flce_ops.linear_cross_entropy, *meta))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_explain_of_every_function_on_a_gpu(reduction, dtype):
    """The test pretends to have an H200."""
    pytest.importorskip("triton")

    def on_meta(*shape, dtype=dtype, **options):
        return torch.empty(shape, dtype=dtype, device="meta", **options)

    input, linear_weight = on_meta(512, 64, requires_grad=True), on_meta(1000, 64, requires_grad=True)
    target, per_token = on_meta(512, dtype=torch.int64), on_meta(512, dtype=torch.float32)
    calls = {
        flce_ops.linear_cross_entropy: (input, linear_weight, target),
        flce_ops.linear_policy_loss: (input, linear_weight, target, per_token),
        flce_ops.linear_kl_div: (input, linear_weight, on_meta(512, 32), on_meta(1000, 32)),
        flce_ops.cross_entropy: (on_meta(512, 1000, requires_grad=True), target),
    }

    def all_in_triton():
        compiling.set(Compiling(H200))
        for function, call in calls.items():
            said = running(explain(function, *call, reduction=reduction))
            of_operators = {choice: path for choice, path in said.items() if choice.startswith("flce::")}
            assert of_operators and set(of_operators.values()) == {"triton"}, function

    contextvars.copy_context().run(all_in_triton)


def test_explain_refuses_what_the_call_refuses():
    inputs = make_inputs((24, 16, 50))
    probabilities, main_grad = torch.rand(24, 50), torch.zeros(50, 16)
    with pytest.raises(NotImplementedError, match="explain: these arguments are not implemented together"):
        explain(flce_ops.linear_cross_entropy, *inputs.args[:2], probabilities, main_grad=main_grad)


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
        ("vocab_parallel_with_grad", CallFacts("cuda", torch.bfloat16, label_smoothing=True), True),
        ("vocab_parallel_with_grad", CallFacts("cuda", torch.bfloat16, label_smoothing=True, softcap=True), False),
        ("vocab_parallel_with_grad", CallFacts("cuda", torch.bfloat16, sparse=True), True),
        ("vocab_parallel_with_grad", CallFacts("cuda", torch.bfloat16, sparse=True, label_smoothing=True), False),
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
