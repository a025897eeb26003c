"""Patching and unpatching: instances, classes, copies, saved models, resized vocabularies."""

import copy
import functools
import gc
import inspect
import io
import pickle
import threading
import weakref
from types import MethodType

import pytest

pytest.importorskip("transformers")

import torch
from tiny_models import VOCAB, check_same, has_logits, loss_and_gradients, make_batch, make_model
from transformers import LlamaForCausalLM, MistralForCausalLM

from flce_ops.integrations.transformers import head, patch, patched, unpatch


def test_unpatch_puts_an_instance_back():
    model, batch = make_model(), make_batch()
    before = set(vars(model)), set(vars(model.lm_head)), model.forward
    assert unpatch(patch(model)) is model
    assert (set(vars(model)), set(vars(model.lm_head)), model.forward) == before
    assert has_logits(model(**batch))
    with pytest.raises(ValueError, match="LlamaForCausalLM is not patched"):
        unpatch(model)


def test_unpatch_puts_a_class_back():
    original = LlamaForCausalLM.forward
    model = make_model()
    assert patch(patch(LlamaForCausalLM)) is LlamaForCausalLM  # a second patch changes nothing
    try:
        assert not has_logits(model(**make_batch()))  # a model made before patch
        assert not has_logits(make_model()(**make_batch()))  # a model made after patch
        assert has_logits(make_model("Mistral")(**make_batch()))  # a model of another class
    finally:
        unpatch(LlamaForCausalLM)
    assert LlamaForCausalLM.forward is original
    assert has_logits(model(**make_batch()))
    with pytest.raises(ValueError, match="is not patched"):
        unpatch(LlamaForCausalLM)


def test_a_class_that_inherits_its_forward_inherits_it_again():
    class Derived(MistralForCausalLM):
        pass

    with patched(Derived):
        assert "forward" in vars(Derived)
        assert MistralForCausalLM.forward is not Derived.forward
    assert "forward" not in vars(Derived)
    with patched(MistralForCausalLM):
        assert unpatch(patch(Derived)).forward is MistralForCausalLM.forward
    assert "forward" not in vars(Derived) and not any("flce" in name for name in vars(Derived))


def test_patched_is_over_after_an_exception():
    model = make_model()
    with pytest.raises(KeyError), patched(model):
        assert not has_logits(model(**make_batch()))
        raise KeyError
    assert has_logits(model(**make_batch()))


@pytest.mark.parametrize("kind", ["model", "class"])
def test_patched_leaves_patched_what_was_patched_before(kind):
    model = make_model()
    target = model if kind == "model" else type(model)
    with patched(target, metrics=["entropy"]):
        with patched(target):
            assert "entropy" not in model(**make_batch())
        assert "entropy" in model(**make_batch())
    assert has_logits(model(**make_batch()))


HEADS = [
    "BERT, transform",  # a module in a module
    "ESM, transform and bias",  # the bias is added outside of the linear layer
    "BART, bias that is a buffer",  # the forward has its own cross-entropy, as in the next one
    "DistilBERT, loss that is a module",
]


@pytest.mark.parametrize("name", ["Llama", *HEADS])
def test_a_copy_of_a_patched_model_is_patched_and_on_its_own(name):
    model, batch = patch(make_model(name)), make_batch()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.get_output_embeddings().weight.mul_(2)
    loss, gradients = loss_and_gradients(copied, **batch)
    assert model.get_output_embeddings().weight.grad is None
    check_same((loss, gradients), loss_and_gradients(unpatch(copied), **batch))
    assert not has_logits(model(**batch))  # unpatching the copy left the original alone


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("carry", [saved_and_loaded, lambda m: pickle.loads(pickle.dumps(m))], ids=["save", "pickle"])
@pytest.mark.parametrize("name", ["Llama tied", "Gemma2", *HEADS])
def test_a_patched_model_that_was_written_and_read_is_patched(name, carry):
    model, batch = patch(make_model(name), eval_logits=True), make_batch()
    expected = loss_and_gradients(model, **batch)
    read = carry(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # does not change `read`, which has its own weight
    check_same(loss_and_gradients(read, **batch), expected)
    assert not has_logits(read(**batch))
    assert has_logits(read.eval()(**batch))
    assert inspect.signature(read.forward) == inspect.signature(model.forward)
    unpatch(read)
    assert not any("forward" in vars(module) for module in read.modules())
    check_same(loss_and_gradients(read, **batch), expected)


def test_a_model_with_a_transform_that_another_process_reads_compiles_at_once(monkeypatch):
    # the classes of stand-ins are made where the model is read, which torch.compile cannot do
    model, batch = patch(make_model("ModernBERT, loss without a shift", num_hidden_layers=1)), make_batch()
    expected, written = model(**batch).loss, pickle.dumps(model)
    monkeypatch.setattr(head, "CLASSES", {})
    compiled = torch.compile(pickle.loads(written), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**batch).loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["Mistral", "BERT, transform"])
def test_a_model_written_while_its_class_is_patched_is_read_where_it_is_not(name):
    model, batch = make_model(name), make_batch()
    with patched(type(model)):
        expected = loss_and_gradients(model, **batch)  # now the head has been prepared
        written = pickle.dumps(model)
        assert not has_logits(pickle.loads(written)(**batch))
    read = pickle.loads(written)
    assert has_logits(read(**batch))
    check_same(loss_and_gradients(read, **batch), expected)
    assert b"flce_ops" not in pickle.dumps(unpatch(read))


def test_state_dict_and_signature_are_the_models_own(tmp_path):
    model = make_model()
    names, signature = list(model.state_dict()), inspect.signature(model.forward)
    patch(model)
    assert list(model.state_dict()) == names
    assert inspect.signature(model.forward) == signature  # Trainer reads its columns and **kwargs from the signature
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    batch = make_batch()
    torch.testing.assert_close(loaded(**batch).loss, model(**batch).loss, rtol=1e-5, atol=0)


def test_head_of_a_resized_vocabulary():
    model = patch(make_model())
    model.resize_token_embeddings(VOCAB + 6, mean_resizing=False)
    batch = make_batch()
    batch["labels"][0, -1] = VOCAB + 3
    theirs = copy.deepcopy(model)
    check_same(loss_and_gradients(model, **batch), loss_and_gradients(unpatch(theirs), **batch))


def test_a_traceback_shows_the_lines_of_a_forward_that_computes_its_own_cross_entropy():
    model = patch(make_model("T5, scaled before its tied head"))
    with pytest.raises(ValueError, match="expected a label for each of the 33 positions") as error:
        model(**make_batch() | {"decoder_input_ids": make_batch()["input_ids"], "labels": torch.zeros(2, 5).long()})
    shown = [str(entry.statement).strip() for entry in error.traceback if entry.path.name == "modeling_t5.py"]
    assert shown == ["loss = loss_fct(lm_logits.view(-1, lm_logits.size(-1)), labels.view(-1))"]


def names_by_module(model):
    return {place: set(vars(module)) for place, module in model.named_modules()}


@pytest.mark.parametrize("kind", ["model", "class"])
@pytest.mark.parametrize("name", ["Llama", *HEADS])
def test_unpatch_puts_every_module_back(name, kind):
    model, batch = make_model(name), make_batch()
    before, theirs = names_by_module(model), model(**batch)
    with patched(model if kind == "model" else type(model)):
        assert not has_logits(model(**batch))
        copied = copy.deepcopy(model)
    assert names_by_module(model) == before
    assert b"flce_ops" not in pickle.dumps(model)  # a process without this package can read it
    assert torch.equal(model(**batch).logits, theirs.logits)
    assert names_by_module(unpatch(copied) if kind == "model" else copied) == before


def test_unpatch_of_a_class_leaves_its_patched_instances_patched():
    model = patch(make_model())
    with patched(LlamaForCausalLM):
        assert not has_logits(model(**make_batch()))
    assert not has_logits(model(**make_batch()))
    assert has_logits(unpatch(model)(**make_batch()))


@pytest.mark.parametrize("target", [LlamaForCausalLM, None])
def test_a_forward_that_somebody_kept_before_unpatch_is_the_models_own(target):
    model = make_model()
    with patched(model if target is None else target):
        kept = model.forward.__func__
        assert not has_logits(kept(model, **make_batch()))
    assert has_logits(kept(model, **make_batch()))


@pytest.mark.parametrize("target", [LlamaForCausalLM, None])
def test_unpatch_leaves_a_wrapper_of_somebody_else_where_it_is(target):
    model = make_model()
    with patched(model if target is None else target):
        inner = model.forward.__func__  # accelerate's autocast and TRL's fused head copy its attributes
        model.forward = MethodType(functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs)), model)
        wrapper = model.forward
        assert not has_logits(model(**make_batch()))
        if target is not None:
            unpatch(patch(model))
    assert model.forward is wrapper
    assert has_logits(model(**make_batch()))


def test_a_refused_patch_leaves_the_model_as_it_was():
    model = make_model()
    model.forward = lambda *args, **kwargs: None
    before = names_by_module(model)
    with pytest.raises(NotImplementedError, match="has a forward of its own"):
        patch(model)
    assert names_by_module(model) == before


def test_unpatch_restores_a_head_that_peft_has_wrapped():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(patch(make_model()), peft.LoraConfig(target_modules=["lm_head"]))
    assert not has_logits(model(**make_batch()))
    assert b"flce_ops" not in pickle.dumps(unpatch(model))


def test_calls_of_other_threads_do_not_see_the_loss_of_this_one():
    model, batch, found = patch(make_model(), label_smoothing=0.3).eval(), make_batch(), []
    expected = model(**batch).loss

    def call_in_another_thread(*_):
        handle.remove()
        thread = threading.Thread(target=lambda: found.extend([model(batch["input_ids"]), model(**batch)]))
        thread.start()
        thread.join()

    handle = model.model.register_forward_pre_hook(call_in_another_thread)
    assert torch.equal(model(**batch).loss, expected)
    assert has_logits(found[0]) and torch.equal(found[1].loss, expected)


def test_a_patched_model_is_freed():
    model = patch(make_model())
    model(**make_batch())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_wrapper_around_forward_survives_unpatch_and_patch():
    model = patch(make_model())
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)  # as accelerate's autocast does
    assert not has_logits(model(**make_batch()))
    unpatch(model)
    assert has_logits(model(**make_batch()))
    patch(model)
    assert not has_logits(model(**make_batch()))
