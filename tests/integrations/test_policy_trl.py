"""With the arguments of docs/policy_loss.md, linear_policy_loss computes what TRL's GRPOTrainer computes."""

# B sequences of T tokens, V vocabulary

import importlib
from collections import defaultdict
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
from reference_loss import error
from reference_policy import dense_log_probs, run_policy
from test_policy import B, T, sequences

import flce_ops

MOST = 12  # max_completion_length
# loss_type -> (other options of TRL, arguments here)
OPTIONS = {
    "grpo": ({}, lambda m: {"token_weight": m / m.sum(1, keepdim=True), "normalizer": B}),
    "bnpo": ({"delta": 3.0}, lambda m: {"dual_clip": 3.0}),
    "dr_grpo": ({}, lambda m: {"normalizer": B * MOST}),
    "dapo": ({"epsilon_high": 0.28}, lambda m: {"clip_high": 0.28, "normalizer": 31.0}),
    "cispo": (
        {"epsilon_high": 1.5},
        lambda m: {"objective": "cispo", "clip_low": torch.inf, "clip_high": 1.5 - 1, "normalizer": 31.0},
    ),
}


def trl_loss(loss_type, options, mask, log_probs, call):
    """Calls GRPOTrainer's own method on an object with the attributes that it reads."""
    method = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer._compute_loss
    accelerator = SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, **_: t)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        args=SimpleNamespace(delta=options.get("delta"), use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _metrics=defaultdict(lambda: defaultdict(list)),
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=options.get("epsilon_high", 0.2),
        beta=0.04,
        max_completion_length=MOST,
        importance_sampling_level="token",
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )
    tokens = torch.zeros(B, T, dtype=torch.int64)
    inputs = {
        **{"prompt_ids": tokens, "prompt_mask": mask, "completion_ids": tokens, "completion_mask": mask},
        **{"advantages": call["advantages"][:, 0], "num_items_in_batch": torch.tensor(31.0)},
        **{"old_per_token_logps": call.get("old_log_probs"), "ref_per_token_logps": call["ref_log_probs"]},
    }
    return method(trainer, None, inputs)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("loss_type", OPTIONS)
def test_grpo_losses_are_trls(loss_type, on_policy):
    options, arguments_of = OPTIONS[loss_type]
    call, mask = sequences()
    call["advantages"] = call["advantages"][:, :1].expand(B, T)
    if on_policy:
        call["old_log_probs"] = None

    def theirs(**fresh):
        log_probs = dense_log_probs(fresh["input"], fresh["linear_weight"], fresh["target"])
        return trl_loss(loss_type, options, mask, log_probs, fresh), (log_probs * mask).detach()

    def ours(**fresh):
        return flce_ops.linear_policy_loss(**fresh, beta=0.04, **arguments_of(mask))

    expected = run_policy(theirs, call)
    for name, found in run_policy(ours, call).items():
        assert error(found, expected[name]) < 1e-12, name
