"""patch(gradient_threshold=...): sparse gradients of the head in Transformers and TRL."""

# B batch, T tokens of one sequence, N tokens, D hidden, V vocabulary

import importlib

import pytest
import torch

pytest.importorskip("transformers")

from reference_loss import error
from tiny_models import VOCAB, make_batch, make_model
from torch.utils.checkpoint import checkpoint

import flce_ops
from flce_ops.integrations.transformers import patch, patched, unpatch

THRESHOLD = 2.0**-3  # large, because there are only 101 classes


def loss_and_gradient(model, batch, seed):
    torch.manual_seed(seed)
    loss = model(**batch).loss
    return loss.detach(), torch.autograd.grad(loss, model.lm_head.weight)[0]


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_patched_models_head_has_an_unbiased_sparse_gradient(name):
    model, batch = make_model(name), make_batch()
    exact_loss, exact = loss_and_gradient(patch(model), batch, 0)
    patch(model, gradient_threshold=THRESHOLD)
    loss, first = loss_and_gradient(model, batch, 1)
    assert torch.equal(loss, exact_loss)
    assert torch.equal(first, loss_and_gradient(model, batch, 1)[1])
    draws = [loss_and_gradient(model, batch, seed)[1] for seed in range(2, 18)]
    assert not torch.equal(first, draws[0])
    assert 0.02 < error(first, exact) and error(sum(draws) / 16, exact) < 0.5 * error(first, exact)
    with patched(model), patched(model, gradient_threshold=2.0**-2):
        pass
    assert torch.equal(first, loss_and_gradient(model, batch, 1)[1])
    assert torch.equal(loss_and_gradient(unpatch(model), batch, 1)[1], loss_and_gradient(model, batch, 2)[1])


def test_seeds_are_those_of_torchs_generator_and_only_of_training():
    model, batch = patch(make_model(), gradient_threshold=THRESHOLD), make_batch()
    expected = loss_and_gradient(model, batch, 3)[1]
    torch.manual_seed(3)
    found = checkpoint(lambda: model(**batch).loss, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(found, model.lm_head.weight)[0], expected)
    state = torch.get_rng_state()
    with torch.no_grad():
        model(**batch)
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match=r"patch: expected gradient_threshold in \[0, 1\), got 2"):
        patch(model, gradient_threshold=2)


def test_a_head_with_an_adapter_has_a_sparse_gradient():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    model, batch = peft.get_peft_model(make_model(), config), make_batch()
    adapter = model.base_model.model.lm_head.lora_B["default"].weight

    def gradient():
        return torch.autograd.grad(model(**batch).loss, adapter)[0]

    exact = gradient()
    patch(model, gradient_threshold=THRESHOLD)
    draws = torch.stack([gradient() for _ in range(40)])
    assert not torch.equal(draws[0], draws[1])
    spread = draws.std(0).norm() / 40**0.5
    assert (draws.mean(0) - exact).norm() < 2 * spread + 1e-5 * exact.norm()


def test_trls_head_has_a_sparse_gradient():
    pytest.importorskip("trl")
    from flce_ops.integrations import trl

    utils = importlib.import_module("trl.trainer.utils")
    hidden, weight = torch.randn(40, 24), torch.randn(VOCAB, 24).requires_grad_()
    targets = torch.randint(0, VOCAB, (40,))

    def gradient():
        torch.manual_seed(5)
        log_probs, entropy, *_ = utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 0.9, 32)
        assert entropy is not None
        return torch.autograd.grad(log_probs.sum(), weight)[0]

    theirs = gradient()
    torch.manual_seed(5)
    seed = torch.randint(2**62, ())
    options = {"temperature": 0.9, "gradient_threshold": THRESHOLD, "gradient_seed": seed}
    found = flce_ops.linear_log_probs(hidden, weight, targets, **options).log_probs
    expected = torch.autograd.grad(found.sum(), weight)[0]
    with trl.patched(gradient_threshold=THRESHOLD):
        sparse = gradient()
        with trl.patched():
            exact = gradient()
        assert torch.equal(gradient(), sparse)
    assert error(sparse, expected) < 1e-6 and error(exact, theirs) < 1e-5 and error(sparse, exact) > 0.02
    assert torch.equal(gradient(), theirs)
