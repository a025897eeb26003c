"""What a patched model takes and returns, beside its unpatched self; patching and unpatching; compilation."""

import copy
import inspect

import pytest

pytest.importorskip("transformers")

import torch
from tiny_models import TOKENS, VOCAB, check_same, loss_and_gradients, make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM, MistralForCausalLM

import flce_ops
from flce_ops.integrations.transformers import patch, patched, unpatch

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
    assert ours.logits is None
    check_same_output(ours, theirs)


@pytest.mark.parametrize("name", ["Llama", "GPT-2, tied"])  # a decorated forward, and one that makes tuples itself
def test_tuples_leave_the_logits_out(name):
    model = make_model(name)
    batch = make_batch() | {"output_hidden_states": True, "use_cache": False, "return_dict": False}
    theirs, ours = model(**batch), patch(model)(**batch)
    assert isinstance(ours, tuple)
    assert len(ours) == len(theirs) - 1
    for mine, expected in zip(tree_leaves(ours), tree_leaves(theirs[:1] + theirs[2:]), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=0)


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


# ---------------------------------------------------------------- patching and unpatching


def test_unpatch_puts_an_instance_back():
    model, batch = make_model(), make_batch()
    before = set(vars(model)), set(vars(model.lm_head)), model.forward
    assert unpatch(patch(model)) is model
    assert (set(vars(model)) - {"_flce_loss_without_logits"}, set(vars(model.lm_head)), model.forward) == before
    assert model(**batch).logits is not None
    with pytest.raises(ValueError, match="LlamaForCausalLM is not patched"):
        unpatch(model)


def test_unpatch_puts_a_class_back():
    original = LlamaForCausalLM.forward
    model = make_model()
    assert patch(patch(LlamaForCausalLM)) is LlamaForCausalLM  # the second time changes nothing
    try:
        assert model(**make_batch()).logits is None  # made before
        assert make_model()(**make_batch()).logits is None  # made after
        assert make_model("Mistral")(**make_batch()).logits is not None  # another class
    finally:
        unpatch(LlamaForCausalLM)
    assert LlamaForCausalLM.forward is original
    assert model(**make_batch()).logits is not None
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
        assert model(**make_batch()).logits is None
        raise KeyError
    assert model(**make_batch()).logits is not None


def test_patching_twice_is_patching_once():
    model = make_model()
    patch(model), patch(model)
    unpatch(model)
    assert model(**make_batch()).logits is not None


def test_a_copy_of_a_patched_model_is_patched_and_on_its_own():
    model, batch = patch(make_model()), make_batch()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.mul_(2)
    loss, gradients = loss_and_gradients(copied, **batch)
    assert model.lm_head.weight.grad is None
    check_same((loss, gradients), loss_and_gradients(unpatch(copied), **batch))
    assert model(**batch).logits is None  # unpatching the copy left it alone


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


def test_hooks_on_the_head_run():
    model, seen = make_model(), []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    patch(model)(**make_batch())
    assert seen == ["before", torch.Size([])]


@pytest.mark.parametrize("count", NUM_ITEMS)
def test_the_head_gets_no_floating_argument_but_the_hidden_states(count):
    # FSDP's mixed precision would round it to bfloat16, a number of items by up to 0.4 %
    model, floating = patch(make_model()), []

    def look(module, args, kwargs):
        floating.extend(x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point())

    model.lm_head.register_forward_pre_hook(look, with_kwargs=True)
    model(**make_batch(), num_items_in_batch=NUM_ITEMS[count])
    assert [tuple(tensor.shape) for tensor in floating] == [(3, TOKENS, 24)]


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
    assert model(**batch).logits is None
    assert seen == ["LlamaForCausalLM", "Linear"]
    check_same(loss_and_gradients(model, **batch), expected)
    unpatch(model)
    assert model(**batch).logits is not None
    assert seen[-2:] == ["LlamaForCausalLM", "Linear"]


def test_a_traceback_shows_the_lines_of_a_forward_that_computes_its_own_cross_entropy():
    model = patch(make_model("T5, scaled before its tied head"))
    with pytest.raises(ValueError, match="expected a label for each of the 33 positions") as error:
        model(**make_batch() | {"decoder_input_ids": make_batch()["input_ids"], "labels": torch.zeros(2, 5).long()})
    shown = [str(entry.statement).strip() for entry in error.traceback if entry.path.name == "modeling_t5.py"]
    assert shown == ["loss = loss_fct(lm_logits.view(-1, lm_logits.size(-1)), labels.view(-1))"]


@pytest.mark.parametrize("name", ["BERT, transform", "ESM, transform and bias"])
def test_unpatch_puts_a_head_with_a_transform_back(name):
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
    assert model(**make_batch()).logits is None
    unpatch(model)
    assert model(**make_batch()).logits is not None
    patch(model)
    assert model(**make_batch()).logits is None


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


def patched_copy(model):
    return patch(copy.deepcopy(model))


def check_same_output(ours, theirs) -> None:
    assert set(ours) == set(theirs) - {"logits"}
    for name in ours:
        leaves = [(x, y) for x, y in zip(tree_leaves(ours[name]), tree_leaves(theirs[name]), strict=True)]
        for mine, expected in leaves:
            if isinstance(mine, torch.Tensor):
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
