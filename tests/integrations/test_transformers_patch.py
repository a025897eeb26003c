"""What a patched model takes and returns, compared with the unpatched one; compilation."""

import copy
import dataclasses
import inspect
import pickle

import pytest
from test_memory import LargestTensor

pytest.importorskip("transformers")

import torch
from tiny_models import NUM_ITEMS, TOKENS, VOCAB, check_same, has_logits, loss_and_gradients, make_batch, make_model
from torch.utils._pytree import tree_leaves, tree_map
from transformers import MistralForCausalLM

import flce_ops
from flce_ops.integrations.transformers import patch, patched
from flce_ops.integrations.transformers.no_logits import LOGITS_NOT_COMPUTED

# ---------------------------------------------------------------- arguments of forward


@pytest.mark.parametrize("count", NUM_ITEMS)
def test_num_items_in_batch_divides_the_sum(count):
    model, batch = make_model(), make_batch() | {"num_items_in_batch": NUM_ITEMS[count]}
    theirs, ours = model(**batch).loss, patch(model)(**batch).loss
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    mean = model(**{name: value for name, value in batch.items() if name != "num_items_in_batch"}).loss
    assert (ours - mean).abs().max() > 1e-2


def test_ignore_index_is_the_callers():
    model, batch = make_model(), make_batch()
    ignored = batch["labels"] == -100
    batch |= {"labels": batch["labels"].masked_fill(ignored, 5), "ignore_index": 5}
    check_same(loss_and_gradients(patched_copy(model), **batch), loss_and_gradients(model, **batch))


def test_shift_labels_take_the_place_of_the_shift():
    model, batch = make_model(), make_batch()
    shifted = torch.nn.functional.pad(batch["labels"], (0, 2), value=-100)[
        ..., 2:
    ].contiguous()  # the token after the next
    batch["shift_labels"] = shifted
    check_same(loss_and_gradients(patched_copy(model), **batch), loss_and_gradients(model, **batch))


KEEP = {
    "the last 4": 4,
    "positions": torch.tensor([1, 3, 8]),
    "mask": torch.arange(3 * TOKENS).view(3, TOKENS) % 3 == 0,
}


@pytest.mark.parametrize("keep", KEEP)
def test_logits_to_keep_leaves_their_labels(keep):
    model, batch = make_model(), make_batch() | {"logits_to_keep": KEEP[keep]}
    positions = torch.zeros(3, TOKENS, dtype=torch.long)
    kept = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.shape[:-1]
    batch |= {"labels": positions, "shift_labels": torch.randint(VOCAB, kept)}
    check_same(loss_and_gradients(patched_copy(model), **batch), loss_and_gradients(model, **batch))


def test_labels_of_positions_not_kept_are_an_error():
    batch = make_batch() | {"logits_to_keep": 4}
    with pytest.raises(ValueError):
        make_model()(**batch)
    with pytest.raises(ValueError, match="label for each of the 12 positions that logits_to_keep leaves, got 33"):
        patch(make_model())(**batch)


def test_labels_may_be_positional():
    model, batch = make_model(), make_batch()
    arguments = list(inspect.signature(model.forward).parameters)
    args = [batch.get(name) for name in arguments[: arguments.index("labels") + 1]]
    check_same_output(patched_copy(model)(*args), model(*args))


def test_embeddings_in_place_of_tokens():
    model, batch = make_model(), make_batch()
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    check_same_output(patched_copy(model)(**batch), model(**batch))


# ---------------------------------------------------------------- what forward returns


def test_output_has_everything_but_the_logits():
    model = make_model(attn_implementation="eager")
    batch = make_batch() | {"output_hidden_states": True, "output_attentions": True, "use_cache": True}
    theirs, ours = model(**batch), patch(model)(**batch)
    check_same_output(ours, theirs)


@pytest.mark.parametrize("eval_logits", [False, True])
@pytest.mark.parametrize(
    "name",
    # a decorated forward, and forwards that make tuples themselves
    ["Llama", "GPT-2, tied", "T5, scaled before its tied head", "DistilBERT, loss that is a module"],
)
def test_entries_of_a_tuple_keep_their_places(name, eval_logits):
    model = make_model(name, output_hidden_states=True, use_cache=False).eval()
    batch = make_batch() | {"return_dict": False}
    theirs, ours = model(**batch), patch(model, eval_logits=eval_logits)(**batch)
    assert isinstance(ours, tuple)
    assert len(ours) == len(theirs)
    if not eval_logits:
        with pytest.raises(AttributeError, match="flce_ops has patched the model"):
            ours[1].shape  # noqa: B018
        ours, theirs = ours[:1] + ours[2:], theirs[:1] + theirs[2:]
    for mine, expected in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=0)


# ---------------------------------------------------------------- logits beside the loss


@pytest.mark.parametrize(
    "name",
    [
        *("Llama", "Gemma2", "Granite", "GPT-2, tied", "T5Gemma, softcap of the decoder"),
        *("T5, scaled before its tied head", "BART, bias that is a buffer", "DistilBERT, loss that is a module"),
        *("BERT, transform", "ESM, transform and bias", "ModernBERT, loss without a shift"),
    ],
)
def test_eval_logits_are_the_unpatched_models_and_the_loss_is_the_operators(name):
    model, batch = make_model(name).eval(), make_batch()
    theirs = model(**batch)
    ours = patch(model, eval_logits=True)(**batch)
    assert torch.equal(ours.logits, theirs.logits)
    assert ours.loss.grad_fn.name() != theirs.loss.grad_fn.name()
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=0)
    assert not has_logits(model.train()(**batch))


def test_eval_logits_of_a_class_are_over_with_its_patch():
    model, batch = make_model("Mistral").eval(), make_batch()
    with patched(MistralForCausalLM, eval_logits=True):
        assert has_logits(model(**batch))
    with patched(MistralForCausalLM):
        assert not has_logits(model(**batch))
        patch(model, eval_logits=True)
        assert has_logits(model(**batch))
        patch(model)  # the last call of patch decides
        assert not has_logits(model(**batch))


USES = {
    "attribute": lambda logits: logits.shape,
    "method": lambda logits: logits.argmax(-1),
    "index": lambda logits: logits[..., :-1, :],
    "iteration": list,
    "length": len,
    "truth": bool,
    "arithmetic": lambda logits: logits / 0.7,
    "tensor on the left": lambda logits: torch.ones(2) * logits,
    "comparison with a tensor": lambda logits: torch.ones(2) == logits,
    "function of torch": lambda logits: torch.nn.functional.cross_entropy(logits, torch.ones(2)),
    "conversion": torch.tensor,
    "numpy": lambda logits: logits_of_numpy(logits),
}


@pytest.mark.parametrize("use", USES)
def test_logits_that_were_not_computed_say_so_when_used(use):
    message = r"flce_ops has patched the model, .* patch\(model, eval_logits=True\)"
    with pytest.raises((AttributeError, RuntimeError), match=message):
        USES[use](LOGITS_NOT_COMPUTED)


def logits_of_numpy(logits):
    return pytest.importorskip("numpy").argmax(logits, axis=-1)


def test_outputs_without_logits_pass_through_what_carries_outputs():
    with torch.no_grad():
        output = patch(make_model())(**make_batch(), use_cache=False)
    operations = pytest.importorskip("accelerate.utils.operations")
    carried = {
        "pickle": pickle.loads(pickle.dumps(output)),
        "deepcopy": copy.deepcopy(output),
        "a map over its tensors": tree_map(lambda leaf: leaf, output),  # FSDP2
        "dataclasses": dataclasses.replace(output),  # FSDP1
        "accelerate's casts": operations.convert_to_fp32(output),
        "accelerate's moves": operations.send_to_device(output, "cpu"),
    }
    for how, copied in carried.items():
        assert type(copied) is type(output), how
        assert list(copied) == ["loss", "logits"], how
        assert copied.logits is LOGITS_NOT_COMPUTED, how
        assert torch.equal(copied.loss, output.loss), how
    assert all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output))
    of_replicas = torch.nn.parallel.gather([output.logits, output.logits], "cpu")  # DataParallel
    with pytest.raises(AttributeError, match="flce_ops has patched"):
        of_replicas.shape  # noqa: B018


def test_no_labels_and_tuple():
    model, batch = make_model(), make_batch() | {"return_dict": False, "use_cache": False}
    del batch["labels"]
    theirs, ours = model(**batch), patch(model)(**batch)
    assert len(ours) == len(theirs) == 1
    assert torch.equal(ours[0], theirs[0])


def test_generation_is_unchanged():
    model = make_model().eval()
    prompt = make_batch()["input_ids"][:1, :5]
    theirs = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(patch(model).generate(prompt, max_new_tokens=8, do_sample=False), theirs)


def test_all_labels_ignored_gives_nan_and_zero_gradients_as_unpatched():
    model, batch = make_model(), make_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss, gradients = loss_and_gradients(patch(model), **batch)
    assert loss.isnan()
    assert all(gradient.count_nonzero() == 0 for gradient in gradients.values())


def test_no_tensor_has_the_size_of_the_logits():
    vocabulary = 2003
    model = make_model(vocab_size=vocabulary, max_position_embeddings=512)
    tokens = torch.randint(vocabulary, (2, 400))
    largest = {}
    for name in ("unpatched", "patched"):
        with LargestTensor() as mode, flce_ops.workspace(1 << 20):
            model(input_ids=tokens, labels=tokens).loss.backward()
        largest[name] = mode.numel
        patch(model)
    assert largest["unpatched"] >= 800 * vocabulary
    assert largest["patched"] < 800 * vocabulary / 3


def test_a_patched_model_is_exported_with_its_loss_alone():
    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = patch(make_model())

        def forward(self, tokens):
            return self.model(input_ids=tokens, labels=tokens, use_cache=False)

    module, tokens = Loss(), make_batch()["input_ids"]
    exported = torch.export.export(module, (tokens,)).module()
    torch.testing.assert_close(exported(tokens).loss, module(tokens).loss)
    assert list(exported(tokens)) == ["loss"]


# ---------------------------------------------------------------- numerics beyond float32, compilation


def test_autocast_to_bfloat16():
    model, batch = make_model(), make_batch()
    exact = model(**batch).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, ours = model(**batch).loss, patched_copy(model)(**batch).loss
    assert ours.dtype == theirs.dtype == torch.float32
    assert abs(ours - exact) <= 1.5 * abs(theirs - exact) + 1e-2


def test_a_model_in_bfloat16():
    model, batch = make_model(), make_batch()
    exact = model(**batch).loss
    model.bfloat16()
    theirs, ours = model(**batch).loss, patch(model)(**batch).loss
    assert ours.dtype == theirs.dtype == torch.float32
    assert abs(ours - exact) <= 1.5 * abs(theirs - exact) + 1e-2


def test_gradient_checkpointing_of_the_blocks():
    model, batch = make_model(), make_batch()
    expected = loss_and_gradients(model, **batch)
    model.activation_checkpointing_enable()
    check_same(loss_and_gradients(patch(model), **batch), expected)


@pytest.mark.parametrize(
    "name", ["Llama", "Gemma2", "Cohere", "ModernBERT, loss without a shift", "DistilBERT, loss that is a module"]
)
def test_compiles_as_one_graph(name):
    model, batch = make_model(name), make_batch()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if not name.startswith("DistilBERT"):  # DistilBERT averages over its own tokens
        batch["num_items_in_batch"] = torch.tensor(17)
    expected = loss_and_gradients(model, **batch)
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(**batch).loss
    loss.backward()
    check_same((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), expected)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])  # a softcap becomes a symbol
def test_compiles_once_for_several_sizes_of_a_batch(name):
    model = patch(make_model(name, use_cache=False))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for sequences in (2, 3, 5):
        batch = make_batch(sequences)
        torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["ESM, transform and bias", "T5, scaled before its tied head"])
def test_a_model_that_makes_its_cross_entropy_compiles_with_a_graph_break(name):
    """torch traces nn.CrossEntropyLoss() by itself, and then takes tensors alone."""
    model, batch = make_model(name, use_cache=False), make_batch()
    expected = loss_and_gradients(model, **batch)
    compiled = torch.compile(patch(model), backend="eager")
    check_same(loss_and_gradients(compiled, **batch)[:1] + ({},), expected[:1] + ({},))
    check_same(loss_and_gradients(model, **batch), expected)


def test_a_patched_class_compiles_as_one_graph_after_a_first_loss_in_eager_mode():
    model, batch = make_model("Mistral"), make_batch() | {"use_cache": False}
    expected = model(**batch).loss
    with patched(MistralForCausalLM):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="must run in eager mode"):
            torch.compile(model, fullgraph=True, backend="eager")(**batch)
        model(**batch)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(**batch).loss, expected, rtol=1e-5, atol=0)


def test_a_head_is_not_looked_for_while_a_patched_class_is_compiled():
    model, batch = make_model("ESM, transform and bias"), make_batch()
    with patched(type(model)), pytest.raises(torch._dynamo.exc.Unsupported, match="must run in eager mode"):
        torch.compile(model, fullgraph=True, backend="eager")(**batch)


def patched_copy(model):
    return patch(copy.deepcopy(model))


def check_same_output(ours, theirs) -> None:
    """Compares everything but the logits, in whose place the patched model has something else."""
    assert list(ours) == list(theirs)
    assert ours.logits is LOGITS_NOT_COMPUTED
    for name in set(ours) - {"logits"}:
        leaves = [(x, y) for x, y in zip(tree_leaves(ours[name]), tree_leaves(theirs[name]), strict=True)]
        for mine, expected in leaves:
            if isinstance(mine, torch.Tensor):
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
