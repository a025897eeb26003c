"""Training of patched models has the curve of the unpatched one: in a plain loop, under Trainer, sharded by FSDP2."""

import copy
import re
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from fresh_process import ROOT
from tiny_models import MODELS, TOKENS, has_logits, make_batch, make_model
from torch.utils._pytree import tree_leaves
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from flce_ops.integrations.transformers import patch, patched, unpatch

# B batch, T tokens of one sequence, V vocabulary

STEPS = 30


# ---------------------------------------------------------------- Trainer


def make_rows(count: int = 24) -> list[dict]:
    """Sequences with 1 to T labels each, so that micro-batches have different numbers of labels."""
    rows = []
    for i in range(count):
        tokens = 3 + (torch.randint(90, (1,)) + 7 * torch.arange(TOKENS)) % 90
        labels = tokens.clone()
        labels[: i % (TOKENS - 2)] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def run_trainer(model, rows, out, *, eval_dataset=None, compute_metrics=None, **options) -> tuple[list[float], Trainer]:
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=5,
        per_device_train_batch_size=2,
        optim="sgd",  # with Adam a rounding difference in a gradient near 0 becomes a whole step
        learning_rate=0.1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=eval_dataset, compute_metrics=compute_metrics
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def check_same_parameters(ours, theirs) -> None:
    for (name, mine), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["Llama", "BERT, transform", "T5, scaled before its tied head"])
def test_trainer_with_gradient_accumulation_equals_the_unpatched_trainer(name, tmp_path):
    model, rows = make_model(name, initializer_range=0.1), make_rows()
    other = copy.deepcopy(model)
    theirs, _ = run_trainer(other, rows, tmp_path, gradient_accumulation_steps=3)
    ours, trainer = run_trainer(patch(model), rows, tmp_path, gradient_accumulation_steps=3)
    assert name != "Llama" or trainer.model_accepts_loss_kwargs  # num_items_in_batch has reached forward
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=0)
    check_same_parameters(model, other)


def test_trainer_evaluates_with_the_loss_alone(tmp_path):
    model, rows = make_model(initializer_range=0.1), make_rows(8)
    _, trainer = run_trainer(model, rows, tmp_path)
    theirs = trainer.evaluate(rows)["eval_loss"]
    with patched(model):
        assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(theirs, rel=1e-5)


EVALUATIONS = {
    "logits alone": {},
    "preprocessed": {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
    "hidden states": {"config": {"output_hidden_states": True}},
    "hidden states and attentions": {"config": {"output_hidden_states": True, "attn_implementation": "eager"}},
    "router logits": {"name": "Mixtral, router loss"},
    "metrics by the batch": {"arguments": {"batch_eval_metrics": True}},
    "losses and inputs": {"arguments": {"include_for_metrics": ["loss", "inputs"]}},
    "bf16": {"arguments": {"bf16": True}},
    "Seq2SeqTrainer": {"trainer": Seq2SeqTrainer, "arguments": {"predict_with_generate": False}},
    "generated": {
        "name": "T5, scaled before its tied head",
        "trainer": Seq2SeqTrainer,
        "arguments": {"predict_with_generate": True, "generation_max_length": 4},
    },
    "encoder-decoder": {"name": "BART, bias that is a buffer", "config": {"output_hidden_states": True}},
    "transform": {"name": "BERT, transform"},
    "transform, the class": {"name": "ESM, transform and bias", "of_class": True},
    "loss that is a module": {"name": "DistilBERT, loss that is a module", "config": {"output_hidden_states": True}},
    "PEFT": {"wrap": lambda model: adapted(model)},
    "the class": {"of_class": True},
}


def adapted(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


@pytest.mark.parametrize("case", EVALUATIONS)
def test_trainer_takes_the_predictions_of_the_unpatched_model(case, tmp_path):
    options = {"name": "Llama", "config": {}, "wrap": lambda model: model, "of_class": False, **EVALUATIONS[case]}
    model, rows = make_model(options["name"], **options["config"]), make_rows(6)
    trainer, seen = make_evaluator(options["wrap"](model), tmp_path, **options)

    def evaluate():
        seen.clear()
        metrics = {k: v for k, v in trainer.evaluate(rows).items() if not k.endswith(("time", "second"))}
        return metrics, list(seen), trainer.predict(rows).predictions

    with patched(type(model) if options["of_class"] else model):
        ours = evaluate()
        assert not has_logits(trainer.model(**make_batch(), return_dict=True))  # logits end with the evaluation
    theirs = evaluate()
    assert theirs[0]["eval_size"] > 0
    for mine, expected in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5 if case != "bf16" else 2e-2, atol=1e-6)


def make_evaluator(model, out, *, trainer=Trainer, arguments=None, preprocess_logits_for_metrics=None, **options):
    """compute_metrics appends everything it is given to the list."""
    seen = []

    def compute_metrics(prediction, compute_result=True):
        given = (prediction.predictions, prediction.label_ids, prediction.losses, prediction.inputs)
        seen.extend(torch.as_tensor(leaf) for leaf in tree_leaves(given) if leaf is not None)
        return {"size": sum(float(abs(leaf).sum()) for leaf in tree_leaves(prediction.predictions))}

    kind = Seq2SeqTrainingArguments if trainer is Seq2SeqTrainer else TrainingArguments
    arguments = kind(
        output_dir=out, report_to=[], use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=2, **(arguments or {})
    )
    return trainer(
        model=model,
        args=arguments,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    ), seen


def test_trainer_evaluates_without_logits_unless_it_takes_them(tmp_path):
    model, rows, given = patch(make_model()), make_rows(4), []
    model.register_forward_hook(lambda module, args, output: given.append(has_logits(output)))
    arguments = TrainingArguments(output_dir=tmp_path, report_to=[], use_cpu=True, disable_tqdm=True)
    Trainer(model=model, args=arguments).evaluate(rows)
    Trainer(model=model, args=arguments).predict(rows)
    arguments.prediction_loss_only = True
    Trainer(model=model, args=arguments, compute_metrics=lambda prediction: {}).evaluate(rows)
    assert given == [False, True, False]


def test_a_model_that_is_not_patched_trains_as_before_another_was_patched(tmp_path):
    peft = pytest.importorskip("peft")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model, rows = peft.get_peft_model(make_model("GPT-2, tied"), prompts), make_rows()
    expected, _ = run_trainer(copy.deepcopy(model), rows, tmp_path)
    with patched(make_model()):
        assert run_trainer(copy.deepcopy(model), rows, tmp_path)[0] == expected
    assert run_trainer(copy.deepcopy(model), rows, tmp_path)[0] == expected
    ours, _ = run_trainer(patch(model), rows, tmp_path)  # its base_model has no `model`
    assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("refusal", [AttributeError, NotImplementedError])  # it is gone; it takes other arguments
@pytest.mark.parametrize("method", ["prediction_step", "compute_loss", "train"])
def test_a_trainer_whose_methods_are_not_the_known_ones_is_refused_before_anything_changes(
    method, refusal, monkeypatch
):
    model = make_model()
    for name in ("prediction_step", "compute_loss", "train"):
        known = getattr(Trainer, name)
        monkeypatch.setattr(Trainer, name, getattr(known, "flce_original", known))
    if refusal is AttributeError:
        monkeypatch.delattr(Trainer, method)
    else:
        monkeypatch.setattr(Trainer, method, lambda trainer, batch: None)
    before = dict(vars(Trainer)), set(vars(model)), set(vars(model.lm_head))
    pinned = re.search(r"^transformers==(\d+\.\d+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    told = f"{method} to take .* flce_ops knows it in Transformers {pinned}$"
    with pytest.raises(refusal, match=method if refusal is AttributeError else told):
        patch(model)
    assert (dict(vars(Trainer)), set(vars(model)), set(vars(model.lm_head))) == before


def test_a_method_of_trainer_that_another_library_wraps_in_any_arguments_is_wrapped(monkeypatch, tmp_path):
    known = Trainer.compute_loss
    monkeypatch.setattr(Trainer, "compute_loss", lambda *args, **kwargs: known(*args, **kwargs))
    model, rows = make_model(), make_rows(4)
    expected, _ = run_trainer(copy.deepcopy(model), rows, tmp_path)
    assert run_trainer(patch(model), rows, tmp_path)[0] == pytest.approx(expected, rel=1e-5)


def test_a_trainer_that_has_moved_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr("flce_ops.integrations.full_logits._logged", set())
    monkeypatch.setitem(sys.modules, "transformers.trainer", None)
    for _ in range(2):
        patch(make_model())
    (message,) = [record.message for record in caplog.records if record.name == "flce_ops"]
    assert message.startswith("transformers.trainer cannot be imported (")


def test_a_trainer_leaves_nothing_on_its_model(tmp_path):
    model, rows = make_model(), make_rows(4)
    before = set(vars(model))
    with patched(model):
        _, trainer = run_trainer(model, rows, tmp_path, label_smoothing_factor=0.2)
        trainer.predict(rows)
    assert not any("flce" in name for name in set(vars(model)) - before)


class OwnStep(Trainer):
    """A Trainer whose prediction_step does not call Trainer's."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            output = model(**self._prepare_inputs(inputs))
        return output["loss"], tuple(output.values())[1:], inputs["labels"]


def test_a_trainer_with_a_step_of_its_own_gets_logits_or_an_error_never_something_else(tmp_path):
    model, rows = make_model(output_hidden_states=True), make_rows(4)
    arguments = TrainingArguments(output_dir=tmp_path, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = OwnStep(model=model, args=arguments)
    theirs = trainer.predict(rows).predictions
    with patched(model), pytest.raises(TypeError, match="flce_ops.*LogitsNotComputed"):
        trainer.predict(rows)
    with patched(model, eval_logits=True):
        ours = trainer.predict(rows).predictions
    torch.testing.assert_close(torch.from_numpy(ours[0]), torch.from_numpy(theirs[0]), rtol=0, atol=0)


def test_evaluations_during_training_get_logits_and_the_steps_do_not(tmp_path):
    model, rows, given = patch(make_model()), make_rows(8), []
    model.register_forward_hook(lambda module, args, output: given.append((module.training, has_logits(output))))
    run_trainer(
        model,
        rows,
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=rows[:2],
        compute_metrics=lambda prediction: {"classes": float(prediction.predictions.shape[-1])},
    )
    assert set(given) == {(True, False), (False, True)}


@pytest.mark.parametrize(
    "name",
    [
        "Llama",
        "Mixtral, router loss",  # Trainer leaves out the router loss under label smoothing
        "BART, causal",
        "BERT, transform",  # its forward takes no num_items_in_batch
        # Trainer does not shift its labels, because the model lacks the name of a causal head
        "Gemma4, softcap assigned in its test",
        "PEFT",
        "the class",
        "hooks",
    ],
)
def test_trainers_label_smoothing_needs_no_logits(name, tmp_path):
    model, rows = make_model(name if name in MODELS else "Llama", initializer_range=0.1), make_rows(8)
    given = []
    model.register_forward_hook(lambda module, args, output: given.append(has_logits(output)))
    model = adapted(model) if name == "PEFT" else model
    other = copy.deepcopy(model)
    options = {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2}
    theirs, their_trainer = run_trainer(other, rows, tmp_path, **options)
    assert given and all(given)
    expected = their_trainer.evaluate(rows)["eval_loss"]
    given.clear()
    if name == "hooks":  # the hooks see logits, so the model computes them
        model.lm_head.register_forward_hook(lambda module, args, logits: None)
    with patched(type(model) if name == "the class" else model):
        ours, trainer = run_trainer(model, rows, tmp_path, **options)
        assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected, rel=1e-5)
        assert given and set(given) == {name == "hooks"}
        assert not has_logits(model(**make_batch())) or name == "hooks"  # logits end with the training
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=0)
    check_same_parameters(model, other)


def test_trainers_label_smoothing_beside_predictions_uses_their_logits(tmp_path):
    model, rows = make_model(), make_rows(4)
    trainer, seen = make_evaluator(model, tmp_path, arguments={"label_smoothing_factor": 0.2})
    theirs = trainer.evaluate(rows)["eval_loss"], list(seen)
    seen.clear()
    with patched(model):
        ours = trainer.evaluate(rows)["eval_loss"], list(seen)
    for mine, expected in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)


def test_a_trainer_whose_loss_is_a_function_of_logits_is_named_once(tmp_path, caplog, monkeypatch):
    class Mine(Trainer):
        pass

    def loss_of(outputs, labels, num_items_in_batch):
        return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    monkeypatch.setattr("flce_ops.integrations.full_logits._logged", set())
    model, rows = make_model(), make_rows(8)
    arguments = TrainingArguments(output_dir=tmp_path, report_to=[], use_cpu=True, disable_tqdm=True, max_steps=2)
    trainer = Mine(model=model, args=arguments, train_dataset=rows, compute_loss_func=loss_of)
    trainer.train()
    with patched(model):
        trainer.train()
        trainer.train()
        Trainer(model=model, args=arguments, train_dataset=rows).train()
    (message,) = [record.message for record in caplog.records if record.name == "flce_ops"]
    assert message.startswith(
        "Mine takes its loss from the logits of its model (compute_loss_func is given): a training"
    )


def test_label_smoothing_of_patch_is_that_of_the_cross_entropy():
    model, batch = make_model("Gemma2"), make_batch()
    logits, target = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1], batch["labels"][:, 1:]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.2)
    theirs = torch.autograd.grad(expected, model.lm_head.weight)[0]
    with patched(model, label_smoothing=0.2):
        loss = model(**batch).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        ours = torch.autograd.grad(loss, model.lm_head.weight)[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
        model.lm_head.register_forward_hook(lambda module, args, logits: None)
        with pytest.raises(NotImplementedError, match="label_smoothing of patch.*hooks that see logits"):
            model(**batch)
    with pytest.raises(ValueError, match=r"patch: expected label_smoothing in \[0, 1\], got 1.5"):
        patch(model, label_smoothing=1.5)


def test_unpatching_after_trainer_with_bf16(tmp_path):
    model, rows = patch(make_model(initializer_range=0.1)), make_rows(8)
    run_trainer(model, rows, tmp_path, bf16=True)  # accelerate has wrapped forward in its autocast
    assert not has_logits(model(**make_batch()))
    unpatch(model)
    assert has_logits(model(**make_batch()))
