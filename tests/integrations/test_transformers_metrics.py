"""patch(model, metrics=...) adds by-products of the loss to a model's output."""

# B batch, T tokens of one sequence, V vocabulary

import copy
import pickle

import pytest
import torch
from test_transformers_patch import make_batch, make_model
from torch.utils._pytree import tree_flatten, tree_unflatten

from flce_ops.integrations.transformers import patch, patched, unpatch
from flce_ops.integrations.transformers.forward import TAKEN_BY_TRAINER

NAMES = ("token_accuracy", "entropy", "is_top1", "lse", "mean_logit", "log_sum_sq_probs")


def dense(logits, target):
    """The metrics of the unpatched model's logits (B, T, V) and the labels that they predict (B, T)."""
    valid = target != -100
    log_p = logits.float().log_softmax(-1)
    right = valid & (logits.argmax(-1) == target)
    found = {
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": logits.float().logsumexp(-1),
        "mean_logit": logits.float().mean(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
    }
    found = {name: torch.where(valid, values, 0.0) for name, values in found.items()}
    return found | {"is_top1": right, "token_accuracy": right.sum() / valid.sum()}


@pytest.mark.parametrize(
    "name, causal",
    [("Llama", True), ("Gemma2", True), ("Granite", True), ("BERT, transform", False), ("GPT-2, tied", True)],
)
def test_the_output_has_the_metrics_of_the_logits(name, causal):
    model, batch = make_model(name).eval(), make_batch()
    theirs = model(**batch)
    labels = batch["labels"]
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if causal else labels
    without = patch(model)(**batch)
    ours = patch(model, metrics=NAMES)(**batch)
    assert torch.equal(ours.loss, without.loss) and isinstance(ours, type(without))
    assert list(ours) == [*without, *NAMES]
    for key, exact in dense(theirs.logits.detach(), target).items():
        assert not ours[key].requires_grad and ours[key] is getattr(ours, key)
        torch.testing.assert_close(ours[key], exact, rtol=1e-4, atol=1e-5, check_dtype=False)
    ours.loss.backward()
    assert not set(NAMES) & set(patch(model)(**batch))  # the last call of patch decides
    unpatch(model)
    assert type(model(**batch)) is type(theirs)


def test_a_class_a_tuple_and_logits_beside_them():
    model, batch = make_model("Mistral").eval(), make_batch()
    with patched(type(model), metrics=["entropy"]):
        ours, as_tuple = model(**batch), model(**batch, return_dict=False)
    assert len(as_tuple) == len(ours.to_tuple()) and torch.equal(as_tuple[-1], ours.entropy)
    both = patch(model, eval_logits=True, metrics=["entropy"])(**batch)
    assert torch.equal(both.entropy, ours.entropy) and both.logits.shape[-1] == model.config.vocab_size
    setattr(model, TAKEN_BY_TRAINER, True)  # Trainer then takes everything beside the loss
    assert "entropy" not in model(**batch)


def test_who_makes_outputs_anew_keeps_the_metrics():
    accelerate = pytest.importorskip("accelerate.utils.operations")
    output = patch(make_model(), metrics=["entropy", "token_accuracy"])(**make_batch())
    leaves, spec = tree_flatten(output)
    for other in (accelerate.convert_to_fp32(output), tree_unflatten(leaves, spec), copy.copy(output)):
        assert type(other) is type(output) and torch.equal(other.entropy, output.entropy)
    read = pickle.loads(pickle.dumps(type(output)(loss=output.loss.detach(), entropy=output.entropy)))
    assert torch.equal(read.entropy, output.entropy) and read.token_accuracy is None


def test_compiled_in_one_graph():
    model, batch = patch(make_model(), metrics=["entropy"]), make_batch()
    eager = model(**batch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch)
    torch.testing.assert_close(compiled.entropy, eager.entropy)
    torch.testing.assert_close(compiled.loss, eager.loss)


def test_names_that_do_not_exist_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="patch: expected metrics to name some of .*entropy.* got 'perplexity'"):
        patch(model, metrics=["perplexity"])
    with pytest.raises(TypeError, match="patch: expected metrics to be a sequence of names, got 'entropy'"):
        patch(model, metrics="entropy")
