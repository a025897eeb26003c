"""What a patched model takes and returns, beside its unpatched self; patching and unpatching; compilation."""

import copy
import dataclasses
import functools
import inspect
import io
import pickle

import pytest

pytest.importorskip("transformers")

import torch
from tiny_models import TOKENS, VOCAB, check_same, has_logits, loss_and_gradients, make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import LlamaForCausalLM, MistralForCausalLM

import flce_ops
from flce_ops.integrations.transformers import patch, patched, transform_head, unpatch
from flce_ops.integrations.transformers.no_logits import LOGITS_NOT_COMPUTED

# ---------------------------------------------------------------- arguments of forward


NUM_ITEMS = {
    "number": 17,
    "0-d tensor": torch.tensor(17),
    "0-d floating tensor": torch.tensor(17.5),  # Trainer under tensor parallelism
    "1-d tensor": torch.tensor([17]),  # Trainer under DataParallel
}


@pytest.mark.parametrize("count", NUM_ITEMS)
def test_num_items_in_batch_divides_the_sum(count):
    model, batch = make_model(), make_batch() | {"num_items_in_batch": NUM_ITEMS[count]}
    theirs, ours = model(**batch).loss, patch(model)(**batch).loss
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    mean = model(**make_batch()).loss
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
    # a decorated forward, and those that make tuples themselves
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
        patch(model)  # the last call counts
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


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


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


# ---------------------------------------------------------------- patching and unpatching


def test_unpatch_puts_an_instance_back():
    model, batch = make_model(), make_batch()
    before = set(vars(model)), set(vars(model.lm_head)), model.forward
    assert unpatch(patch(model)) is model
    assert (set(vars(model)) - {"_flce_loss_without_logits"}, set(vars(model.lm_head)), model.forward) == before
    assert has_logits(model(**batch))
    with pytest.raises(ValueError, match="LlamaForCausalLM is not patched"):
        unpatch(model)


def test_unpatch_puts_a_class_back():
    original = LlamaForCausalLM.forward
    model = make_model()
    assert patch(patch(LlamaForCausalLM)) is LlamaForCausalLM  # the second time changes nothing
    try:
        assert not has_logits(model(**make_batch()))  # made before
        assert not has_logits(make_model()(**make_batch()))  # made after
        assert has_logits(make_model("Mistral")(**make_batch()))  # another class
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


def test_patched_is_over_after_an_exception():
    model = make_model()
    with pytest.raises(KeyError), patched(model):
        assert not has_logits(model(**make_batch()))
        raise KeyError
    assert has_logits(model(**make_batch()))


def test_patching_twice_is_patching_once():
    model = make_model()
    patch(model), patch(model)
    unpatch(model)
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
    "BART, bias that is a buffer",  # a cross-entropy of the forward's own, as the next one
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
    assert not has_logits(model(**batch))  # unpatching the copy left it alone


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
        model.get_output_embeddings().weight.zero_()  # the one that was read is on its own
    check_same(loss_and_gradients(read, **batch), expected)
    assert not has_logits(read(**batch))
    assert has_logits(read.eval()(**batch))
    assert inspect.signature(read.forward) == inspect.signature(model.forward)
    unpatch(read)
    assert not any("forward" in vars(module) for module in read.modules())
    check_same(loss_and_gradients(read, **batch), expected)


def test_a_model_with_a_transform_that_another_process_reads_compiles_at_once(monkeypatch):
    # heads are read from their sources, which torch.compile cannot do
    model, batch = patch(make_model("ESM, transform and bias", num_hidden_layers=1)), make_batch()
    expected, written = model(**batch).loss, pickle.dumps(model)
    monkeypatch.setattr(transform_head, "INNER", {})
    compiled = torch.compile(pickle.loads(written), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**batch).loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["Mistral", "BERT, transform"])
def test_a_model_written_while_its_class_is_patched_is_read_where_it_is_not(name):
    model, batch = make_model(name), make_batch()
    with patched(type(model)):
        expected = loss_and_gradients(model, **batch)  # the head is prepared now
        written = pickle.dumps(model)
        assert not has_logits(pickle.loads(written)(**batch))
    read = pickle.loads(written)
    assert has_logits(read(**batch))
    check_same(loss_and_gradients(read, **batch), expected)


def test_state_dict_and_signature_are_the_models_own(tmp_path):
    model = make_model()
    names, signature = list(model.state_dict()), inspect.signature(model.forward)
    patch(model)
    assert list(model.state_dict()) == names
    assert inspect.signature(model.forward) == signature  # Trainer reads its columns and **kwargs from it
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


def halve_output(module, args, output):
    return output / 2


def halve_output_with_kwargs(module, args, kwargs, output):
    return output / 2


def triple_grad_input(module, grad_input, grad_output):
    assert grad_output[0].shape == (3, TOKENS, VOCAB)
    return tuple(3 * gradient for gradient in grad_input)


def triple_grad_output(module, grad_output):
    assert grad_output[0].shape == (3, TOKENS, VOCAB)
    return tuple(3 * gradient for gradient in grad_output)


def halve_hidden(module, args):
    return (args[0] / 2,)


SEES_THE_OUTPUT = {
    "forward": lambda head: head.register_forward_hook(halve_output),
    "forward, kwargs": lambda head: head.register_forward_hook(halve_output_with_kwargs, with_kwargs=True),
    "a partial": lambda head: head.register_forward_hook(functools.partial(halve_output)),
    "backward": lambda head: head.register_full_backward_hook(triple_grad_input),
    "before backward": lambda head: head.register_full_backward_pre_hook(triple_grad_output),
    "on all modules": lambda head: torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output / 2 if module is head else None
    ),
}
HOOKS = SEES_THE_OUTPUT | {"before forward": lambda head: head.register_forward_pre_hook(halve_hidden)}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_on_the_head_acts_as_on_the_unpatched_model(hook):
    model, batch = make_model(), make_batch()
    plain = loss_and_gradients(model, **batch)
    handle = HOOKS[hook](model.lm_head)
    try:
        expected = loss_and_gradients(model, **batch)
        differences = [(expected[1][n] - g).abs().max() for n, g in plain[1].items()]
        assert max(differences) > 1e-3  # the hook does something
        patch(model)
        check_same(loss_and_gradients(model, **batch), expected)
        assert has_logits(model(**batch)) == (hook in SEES_THE_OUTPUT)
    finally:
        handle.remove()
    assert not has_logits(model(**batch))
    check_same(loss_and_gradients(model, **batch), plain)


def halve_input(module, args):
    return (args[0] / 2, *args[1:])


# which module; whether its hooks see logits, or what is computed from them alone
INNER_MODULES = {
    "cls": ("BERT, transform", True),
    "cls.predictions": ("BERT, transform", True),
    "cls.predictions.decoder": ("BERT, transform", True),
    "cls.predictions.transform": ("BERT, transform", False),
    "cls.predictions.transform.dense": ("BERT, transform", False),
    "lm_head.decoder": ("ESM, transform and bias", True),
    "lm_head.dense": ("ESM, transform and bias", False),
    "lm_head": ("BART, bias that is a buffer", True),
    "vocab_projector": ("DistilBERT, loss that is a module", True),
    "mlm_loss_fct": ("DistilBERT, loss that is a module", True),
}
INNER_HOOKS = {
    "forward": lambda module: module.register_forward_hook(halve_output),
    "backward": lambda module: module.register_full_backward_hook(
        lambda module, grad_input, grad_output: tuple(None if g is None else 3 * g for g in grad_input)
    ),
    "before forward": lambda module: module.register_forward_pre_hook(halve_input),
}


@pytest.mark.parametrize("hook", INNER_HOOKS)
@pytest.mark.parametrize("place", INNER_MODULES)
def test_a_hook_inside_of_a_head_or_on_a_loss_acts_as_on_the_unpatched_model(place, hook):
    name, sees_logits = INNER_MODULES[place]
    model, batch = make_model(name), make_batch()
    plain = loss_and_gradients(model, **batch)
    handle = INNER_HOOKS[hook](model.get_submodule(place))
    expected = loss_and_gradients(model, **batch)
    assert any((expected[1][n] - g).abs().max() > 1e-3 for n, g in plain[1].items() if g is not None)
    check_same(loss_and_gradients(patch(model), **batch), expected)
    by_logits = sees_logits and (hook != "before forward" or place == "mlm_loss_fct")
    assert has_logits(model(**batch)) == by_logits
    handle.remove()
    assert not has_logits(model(**batch))


def test_a_hook_on_the_head_acts_in_a_compiled_model():
    model, batch = make_model(), make_batch() | {"use_cache": False}
    model.lm_head.register_forward_hook(halve_output)
    expected = model(**batch).loss
    torch.compiler.reset()  # graphs of other models are not guarded by hooks
    compiled = torch.compile(patch(model), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**batch).loss, expected, rtol=1e-5, atol=0)


def test_hooks_that_need_logits_are_named_once_in_the_log(caplog):
    model, batch = patch(make_model()), make_batch()

    def watcher_of_logits(module, args, output):
        pass

    model.lm_head.register_forward_hook(watcher_of_logits)
    with caplog.at_level("WARNING", logger="flce_ops"):
        model(**batch), model(**batch)
    assert [record.name for record in caplog.records] == ["flce_ops"]
    assert "from logits, as unpatched" in caplog.text and "watcher_of_logits" in caplog.text


@pytest.mark.parametrize("count", NUM_ITEMS)
def test_the_head_gets_no_floating_argument_but_the_hidden_states(count):
    # FSDP's mixed precision would round it to bfloat16, a number of items by up to 0.4 %
    model, floating = patch(make_model()), []

    def look(module, args, kwargs):
        floating.extend(x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point())

    model.lm_head.register_forward_pre_hook(look, with_kwargs=True)
    model(**make_batch(), num_items_in_batch=NUM_ITEMS[count])
    assert [tuple(tensor.shape) for tensor in floating] == [(3, TOKENS, 24)]


def test_a_hook_of_accelerates_kind_that_changes_the_logits_acts_on_logits():
    hooks = pytest.importorskip("accelerate.hooks")
    model, batch = patch(make_model()), make_batch()

    class Halve(hooks.ModelHook):
        def post_forward(self, module, output):
            return output / 2

    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook(execution_device="cpu"))
    assert not has_logits(model(**batch))
    hooks.add_hook_to_module(model.lm_head, Halve(), append=True)
    ours = model(**batch)
    torch.testing.assert_close(ours.loss, unpatch(model)(**batch).loss, rtol=0, atol=0)


@pytest.mark.parametrize("first", ["hooks", "patch"])
def test_hooks_of_accelerate_run_before_and_after_patch(first):
    hooks = pytest.importorskip("accelerate.hooks")
    model, batch, seen = make_model(), make_batch(), []

    class Seen(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    expected = loss_and_gradients(model, **batch)
    steps = [lambda: [hooks.add_hook_to_module(m, Seen()) for m in (model, model.lm_head)], lambda: patch(model)]
    for step in steps if first == "hooks" else reversed(steps):
        step()
    assert not has_logits(model(**batch))
    assert seen == ["LlamaForCausalLM", "Linear"]
    check_same(loss_and_gradients(model, **batch), expected)
    unpatch(model)
    assert has_logits(model(**batch))
    assert seen[-2:] == ["LlamaForCausalLM", "Linear"]


def test_a_traceback_shows_the_lines_of_a_forward_that_computes_its_own_cross_entropy():
    model = patch(make_model("T5, scaled before its tied head"))
    with pytest.raises(ValueError, match="expected a label for each of the 33 positions") as error:
        model(**make_batch() | {"decoder_input_ids": make_batch()["input_ids"], "labels": torch.zeros(2, 5).long()})
    shown = [str(entry.statement).strip() for entry in error.traceback if entry.path.name == "modeling_t5.py"]
    assert shown == ["loss = loss_fct(lm_logits.view(-1, lm_logits.size(-1)), labels.view(-1))"]


@pytest.mark.parametrize("name", HEADS)
def test_unpatch_puts_every_module_back(name):
    model, batch = make_model(name), make_batch()
    modules = dict(model.named_modules())
    before = {place: set(vars(module)) for place, module in modules.items()}
    theirs = model(**batch)
    unpatch(patch(model))
    before[""].add("_flce_loss_without_logits")
    assert {place: set(vars(module)) for place, module in modules.items()} == before
    assert torch.equal(model(**batch).logits, theirs.logits)


def test_a_wrapper_around_forward_survives_unpatch_and_patch():
    model = patch(make_model())
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)  # as accelerate's autocast
    assert not has_logits(model(**make_batch()))
    unpatch(model)
    assert has_logits(model(**make_batch()))
    patch(model)
    assert not has_logits(model(**make_batch()))


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


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Cohere", "ESM, transform and bias"])
def test_compiles_as_one_graph(name):
    model, batch = make_model(name), make_batch()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if not name.startswith("ESM"):  # which means over its own tokens
        batch["num_items_in_batch"] = torch.tensor(17)
    expected = loss_and_gradients(model, **batch)
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(**batch).loss
    loss.backward()
    check_same((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), expected)


def test_a_patched_class_compiles_as_one_graph_after_a_first_loss_in_eager_mode():
    model, batch = make_model("Mistral"), make_batch() | {"use_cache": False}
    expected = model(**batch).loss
    with patched(MistralForCausalLM):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="must run in eager mode"):
            torch.compile(model, fullgraph=True, backend="eager")(**batch)
        model(**batch)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(**batch).loss, expected, rtol=1e-5, atol=0)


def test_a_patched_class_with_a_transform_is_not_read_while_it_is_compiled(monkeypatch):
    monkeypatch.setattr(transform_head, "INNER", {})
    model, batch = make_model("ESM, transform and bias"), make_batch()
    with patched(type(model)), pytest.raises(torch._dynamo.exc.Unsupported, match="must run in eager mode"):
        torch.compile(model, fullgraph=True, backend="eager")(**batch)


def patched_copy(model):
    return patch(copy.deepcopy(model))


def check_same_output(ours, theirs) -> None:
    """But for the logits, in whose place there is something else."""
    assert list(ours) == list(theirs)
    assert ours.logits is LOGITS_NOT_COMPUTED
    for name in set(ours) - {"logits"}:
        leaves = [(x, y) for x, y in zip(tree_leaves(ours[name]), tree_leaves(theirs[name]), strict=True)]
        for mine, expected in leaves:
            if isinstance(mine, torch.Tensor):
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
