"""Hooks on the modules of a patched model act as on the unpatched one."""

import copy
import functools

import pytest

pytest.importorskip("transformers")

import torch
from tiny_models import NUM_ITEMS, TOKENS, VOCAB, check_same, has_logits, loss_and_gradients, make_batch, make_model
from torch.utils._pytree import tree_leaves

from flce_ops.integrations.transformers import patch, unpatch


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
        assert max(differences) > 1e-3  # the hook has an effect
        patch(model)
        check_same(loss_and_gradients(model, **batch), expected)
        assert has_logits(model(**batch)) == (hook in SEES_THE_OUTPUT)
    finally:
        handle.remove()
    assert not has_logits(model(**batch))
    check_same(loss_and_gradients(model, **batch), plain)


def halve_input(module, args):
    return (args[0] / 2, *args[1:])


# the module, and whether its hooks see logits or only what is computed from them
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
    torch.compiler.reset()  # hooks do not guard graphs of other models
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
    copy.copy(model)(**batch)  # a replica of DataParallel is such a copy
    assert len(caplog.records) == 1
    copy.deepcopy(model)(**batch)  # another model with the same hook
    assert len(caplog.records) == 2


@pytest.mark.parametrize("count", NUM_ITEMS)
def test_the_head_gets_no_floating_argument_but_the_hidden_states(count):
    # FSDP's mixed precision would round a floating argument to bfloat16, so a number of items would be off by up to 0.4
    # %
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
