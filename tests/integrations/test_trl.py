"""TRL's trainers with the operators in place of its fused head take the same steps as with TRL's own, in float32."""

import concurrent.futures
import contextlib
import importlib
import logging
import re
import sys
import types

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
import trl
from tiny_models import make_model
from transformers import Trainer, set_seed
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl_inputs import DISTILLATION, SFT, STEPS, UTILS, head_inputs, texts, trl_divergence, trl_utils, word_tokenizer

import flce_ops
from flce_ops.integrations.trl import patch, patched, patching, unpatch
from flce_ops.integrations.trl.divergence import chunked_divergence_loss
from flce_ops.integrations.trl.log_probs import ChunkedLogProbs

# N tokens, D hidden, E hidden of a teacher, V vocabulary

EPSILON = torch.finfo(torch.float32).eps


def prefer_even(completion_ids, **_) -> list[float]:
    return [float(sum(token % 2 == 0 for token in completion)) for completion in completion_ids]


TEXTS = {"text": texts(8, 9, seed=0)}
PROMPTS = {"prompt": texts(8, 4, seed=1)}
PAIRS = {**PROMPTS, "chosen": texts(8, 5, seed=2), "rejected": texts(8, 3, seed=3)}
COMPLETIONS = {**PROMPTS, "completion": [text[: 3 * length] for length, text in enumerate(texts(8, 9, seed=4), 1)]}
UNPAIRED = {**PROMPTS, "completion": texts(8, 5, seed=2), "label": [True, False] * 4}
SAMPLED = {"max_completion_length": 5}
ACCUMULATED = {"gradient_accumulation_steps": 2}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
POLICY = {**SAMPLED, "num_generations": 2, "temperature": 0.7, "reward_funcs": prefer_even, "learning_rate": 0.1}

# name: (trainer, data, options, model). The learning rates are large enough that STEPS move a parameter by more than
# its rounding.
RUNS = {
    "SFT": ("SFT", TEXTS, {"loss_type": "nll", "learning_rate": 0.5}, "Llama"),
    "SFT, tied head": ("SFT", TEXTS, {**ACCUMULATED, "learning_rate": 0.5}, "Llama tied"),
    "SFT, prompts ignored": ("SFT", COMPLETIONS, {"learning_rate": 0.5}, "Cohere"),
    "SFT, router loss": ("SFT", TEXTS, {**ACCUMULATED, "learning_rate": 0.5}, "Mixtral, router loss"),
    "SFT, compiled": ("SFT", COMPLETIONS, {**COMPILED, "learning_rate": 0.5}, "Gemma2"),
    "SFT by DFT, softcap": ("SFT", TEXTS, {"loss_type": "dft", "learning_rate": 20.0}, "Gemma2"),
    "DPO with WPO's weights": ("DPO", PAIRS, {"use_weighting": True, "learning_rate": 1.0}, "Granite"),
    "DPO, softcap": ("DPO", PAIRS, {"learning_rate": 1.0}, "Gemma2"),
    "KTO": ("KTO", UNPAIRED, {"learning_rate": 10.0}, "Cohere"),
    "GRPO, entropy bonus": ("GRPO", PROMPTS, {**POLICY, "beta": 0.1, "entropy_coef": 0.01}, "Llama"),
    "RLOO": ("RLOO", PROMPTS, POLICY, "Llama"),
    "distillation, reverse": ("Distillation", PROMPTS, {**SAMPLED, "beta": 1.0, "learning_rate": 0.2}, "Llama"),
    "distillation, jsd": ("Distillation", PROMPTS, {**SAMPLED, "beta": 0.4, "learning_rate": 0.2}, "Gemma2"),
}

MESSAGES = {
    "messages": [
        [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        for ask, answer in zip(PROMPTS["prompt"], PAIRS["chosen"], strict=True)
    ]
}
PRIVILEGED = {**PROMPTS, "privileged_context": PAIRS["chosen"]}
EXPERIMENTAL = {"ORPO": "orpo", "CPO": "cpo", "GKD": "gkd", "OnlineDPO": "online_dpo", "SDPO": "sdpo"}

# The trainers whose loss needs the logits of their model.
UNSERVED = {
    "ORPO": ("ORPO", PAIRS, {}, "Llama"),
    "CPO": ("CPO", PAIRS, {}, "Llama"),
    "GKD": ("GKD", MESSAGES, {"lmbda": 0.0}, "Llama"),
    "OnlineDPO": ("OnlineDPO", PROMPTS, {"max_new_tokens": 4, "reward_funcs": [prefer_even]}, "Llama"),
    "SDPO": (
        "SDPO",
        PRIVILEGED,
        {**SAMPLED, "num_generations": 2, "teacher_model_kind": "live", "reward_funcs": prefer_even},
        "Llama",
    ),
    "SFT, smoothed": ("SFT", TEXTS, {"loss_type": "nll", "label_smoothing_factor": 0.1}, "Llama"),
}


@pytest.fixture(scope="module")
def tokenizer():
    made = word_tokenizer()
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def make_trainer(name: str, tokenizer, folder, prepare=lambda model: model):
    from datasets import Dataset

    kind, data, options, model_name = {**RUNS, **UNSERVED}[name]
    library = importlib.import_module(f"trl.experimental.{EXPERIMENTAL[kind]}") if kind in EXPERIMENTAL else trl
    # every run of the tests has the same draw: where rounding decides, another token would be sampled
    set_seed(3)
    model = make_model(model_name)
    model.save_pretrained(folder / "model")  # TRL reads its reference model from there
    model.config._name_or_path = str(folder / "model")
    options = {**options}
    extra = {"reward_funcs": options.pop("reward_funcs")} if "reward_funcs" in options else {}
    if kind == "GKD":
        extra["teacher_model"] = make_model()
    if kind == "Distillation":
        extra["teacher_model"] = make_model("Phi, head with bias")  # the teacher has another hidden size
    args = getattr(library, f"{kind}Config")(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        optim="sgd",
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **options,
    )
    rows = Dataset.from_dict(data)
    if kind == "SFT":
        extra["eval_dataset"] = rows
    return getattr(library, f"{kind}Trainer")(
        model=prepare(model), args=args, train_dataset=rows, processing_class=tokenizer, **extra
    )


def train(name: str, tokenizer, folder) -> tuple[dict, dict, list[dict]]:
    """Returns (parameters before, parameters after STEPS, the log of each step)."""
    trainer = make_trainer(name, tokenizer, folder)
    before = {key: parameter.detach().clone() for key, parameter in trainer.model.named_parameters()}
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    after = {key: parameter.detach() for key, parameter in trainer.model.named_parameters()}
    return before, after, trainer.state.log_history


@pytest.mark.parametrize("name", RUNS)
def test_the_steps_of_a_trainer_are_those_of_trl(name, tokenizer, tmp_path, calls, warned):
    _, theirs, their_logs = train(name, tokenizer, tmp_path)
    assert not calls
    with patched():
        before, ours, our_logs = train(name, tokenizer, tmp_path)
    assert len(calls) >= STEPS and not warned()
    trainer, _, options, _ = RUNS[name]
    of_sums = trainer == "SFT" and options.get("loss_type") != "dft"
    of_tokens = "linear_kl_div" if trainer == "Distillation" else "linear_log_probs"
    # an evaluation takes the tokens' own log-probabilities
    assert set(calls) == {of_tokens, *(["linear_cross_entropy"] if of_sums else [])}
    largest = max(float((theirs[key] - before[key]).abs().max()) for key in theirs)
    for key, expected in theirs.items():
        # 5e-5 of the largest change was seen for WPO, 3e-6 for others, and a unit in the last place of the parameter
        atol = 1e-4 * largest + 2 * EPSILON * float(expected.abs().max())
        assert atol < 1e-3 * largest or "norm" in key, (key, atol, largest)
        torch.testing.assert_close(ours[key], expected, rtol=0, atol=atol, msg=lambda m, k=key: f"{k}: {m}")
    timed = ("runtime", "per_second", "step_time")
    for our_log, their_log in zip(our_logs, their_logs, strict=True):
        expected = {key: value for key, value in their_log.items() if not key.endswith(timed)}
        found = {key: our_log[key] for key in expected}
        assert found == pytest.approx(expected, rel=1e-4, abs=2e-6)  # 2.4e-5 was seen, for a norm of gradients


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Names of the operators that the integration called."""
    from flce_ops.integrations.trl import divergence, log_probs, sft

    made: list[str] = []

    def counted(function):
        return lambda *args, **kwargs: [made.append(function.__name__), function(*args, **kwargs)][1]

    of = {log_probs: flce_ops.linear_log_probs, sft: flce_ops.linear_cross_entropy, divergence: flce_ops.linear_kl_div}
    for module, function in of.items():
        monkeypatch.setattr(module, function.__name__, counted(function))
    return made


@pytest.fixture
def warned(caplog, monkeypatch):
    """Collects the warnings of this package, as if none had been given before."""
    monkeypatch.setattr("flce_ops.integrations.full_logits._logged", set())
    return lambda: [r.message for r in caplog.records if r.name == "flce_ops" and r.levelno >= logging.WARNING]


# ---------------------------------------------------------------- trainers that compute logits anyway


@pytest.mark.filterwarnings("ignore::UserWarning")  # warnings of experimental trainers
@pytest.mark.parametrize("name", UNSERVED)
def test_a_trainer_that_makes_logits_is_named_once(name, tokenizer, tmp_path, warned):
    trainer, reason = make_trainer(name, tokenizer, tmp_path), ""
    if name == "SFT, smoothed":
        reason = r" \(label_smoothing_factor is given\)"
    with patched():
        trainer.train()
        trainer.train()
    (message,) = warned()
    kind = type(trainer).__name__
    assert re.match(f"{kind} takes its loss from the logits of its model{reason}: .* docs/clients.md", message)
    assert not trainer.model._forward_hooks


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["SFT", "DPO, softcap", "ORPO", "CPO", "GKD"])
def test_a_trainer_of_trl_that_is_given_a_patched_model_is_named(name, tokenizer, tmp_path, warned):
    from flce_ops.integrations import transformers

    trainer = make_trainer(name, tokenizer, tmp_path, transformers.patch)
    trainer.train()
    asked, *others = warned()
    kind = type(trainer).__name__
    assert asked.startswith(f"{kind} never asks a patched model for its loss. flce_ops.integrations.trl.patch() serves")
    assert [message.split(":")[0] for message in others] == (
        [f"{kind} takes its loss from the logits of its model"] if name in UNSERVED else []
    )


# --- patch and unpatch ---


def test_unpatch_puts_everything_back():
    theirs = trl_divergence()
    patch()
    patch()  # a second call does nothing
    assert trl_utils()._ChunkedLogProbFunction is ChunkedLogProbs
    assert sys.modules[DISTILLATION]._chunked_divergence_loss is chunked_divergence_loss
    unpatch()
    assert trl_utils()._ChunkedLogProbFunction is ChunkedLogProbFunction
    assert sys.modules[DISTILLATION]._chunked_divergence_loss is theirs
    with pytest.raises(ValueError, match="trl is not patched"):
        unpatch()


def test_patched_leaves_patched_what_was_patched_before():
    with patched():
        with patched():
            pass
        assert trl_utils()._ChunkedLogProbFunction is ChunkedLogProbs
    assert trl_utils()._ChunkedLogProbFunction is ChunkedLogProbFunction


def test_a_compiled_head_follows_patch_and_unpatch(calls):
    utils = trl_utils()
    hidden, weight, _, targets = head_inputs(torch.float32, bias=False)

    def head(hidden):
        return utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32, None, 1.0, ("log_probs",))[0]

    expected, compiled = head(hidden), torch.compile(head, backend="eager")
    for context in (patched(), contextlib.nullcontext()):
        with context:
            torch.testing.assert_close(compiled(hidden), expected)
        assert calls == ["linear_log_probs"]


@pytest.fixture
def in_nll_step(monkeypatch):
    """Runs a function in the place of SFTTrainer's compute_loss for "nll", while TRL is patched."""

    def run(function):
        trainer = types.SimpleNamespace(args=types.SimpleNamespace(loss_type="nll"))
        with patched(), monkeypatch.context() as during:
            during.setitem(patching.REPLACEMENTS.originals, patching.SFT_LOSS, lambda _: function())
            return patching.compute_loss(trainer)

    return run


def in_another_thread(function):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_sums_of_an_nll_step_are_for_its_thread_and_for_gradients_alone(in_nll_step, compiled):
    (hidden, weight, _, targets), utils = head_inputs(torch.float32, bias=False), trl_utils()
    torch.compiler.reset()

    def head():
        return utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32)[0]

    expected = head()
    head = torch.compile(head, backend="eager", fullgraph=True) if compiled else head

    def step():
        mine, others = head(), in_another_thread(head)
        again = in_another_thread(lambda: in_nll_step(lambda: (head(), in_another_thread(head))))
        with torch.no_grad():
            return mine, others, *again, head()

    mine, others, summed, beside, evaluated = in_nll_step(step)
    for found in (mine, summed):
        torch.testing.assert_close(found, expected.mean().expand(37))
    for found in (others, beside, evaluated):
        torch.testing.assert_close(found, expected)
    assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction


def test_a_compute_loss_that_somebody_kept_is_that_of_trl_after_unpatch(tokenizer, tmp_path, calls):
    with patched():
        kept = trl.SFTTrainer.compute_loss
    trainer = make_trainer("SFT", tokenizer, tmp_path)
    trainer.compute_loss = types.MethodType(kept, trainer)
    trainer.train()
    assert not calls


def test_blocks_that_overlap_leave_nothing_behind():
    first, second = patched(), patched()
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None), second.__exit__(None, None, None)
    assert trl_utils()._ChunkedLogProbFunction is ChunkedLogProbFunction


class Renamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs): ...


@pytest.mark.parametrize(
    "where,name,value,message",
    [
        (UTILS, "_ChunkedLogProbFunction", None, "utils._ChunkedLogProbFunction is not there"),
        (UTILS, "_ChunkedLogProbFunction", Renamed, "_ChunkedLogProbFunction to take .*'logit_scale'.* got .*'scale'"),
        (UTILS, "add_fused_lm_head", lambda model: None, "add_fused_lm_head to call _ChunkedLogProbFunction, which"),
        (UTILS, "add_fused_lm_head", None, "add_fused_lm_head to call _ChunkedLogProbFunction, which"),
        (UTILS, "_use_triton", None, "utils._use_triton is not there"),
        (SFT, "SFTTrainer", None, "SFTTrainer.compute_loss is not there"),
        (DISTILLATION, "_chunked_divergence_loss", None, "_chunked_divergence_loss is not there"),
    ],
    ids=["gone", "other arguments", "not called", "caller gone", "ignored tokens", "no SFT", "divergence gone"],
)
def test_a_trl_that_has_moved_its_places_is_refused_by_name(where, name, value, message, monkeypatch):
    monkeypatch.setattr(importlib.import_module(where), name, value)
    monkeypatch.setattr(Trainer, "train", getattr(Trainer.train, "flce_original", Trainer.train))
    kept, train = {place: place.get() for place in patching.REPLACEMENTS.functions}, Trainer.train
    refusal = f"trl {trl.__version__}: .*{message}.*flce_ops knows it in trl 1.16; train without patch"
    with pytest.raises(NotImplementedError, match=refusal):
        patch()
    for place, value in kept.items():
        assert place.get() is value
    assert Trainer.train is train


def test_a_trl_whose_module_has_moved_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, DISTILLATION, None)
    with pytest.raises(
        NotImplementedError, match="_chunked_divergence_loss is not there. flce_ops knows it in trl 1.16"
    ):
        patch()
    assert not patching.REPLACEMENTS.in_place


def test_the_tested_version_is_the_one_that_the_refusal_names():
    assert trl.__version__.startswith(f"{patching.REPLACEMENTS.tested}.")


def test_an_output_that_is_not_known_is_refused():
    inputs = head_inputs(torch.float32, bias=False)
    with pytest.raises(NotImplementedError, match=r"TRL asks its head for \['top_k'\], which flce_ops does not have"):
        ChunkedLogProbs.apply(*inputs, 1.0, 32, None, 1.0, ("log_probs", "top_k"))
