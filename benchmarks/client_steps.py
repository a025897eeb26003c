"""Training steps of Transformers and of TRL's trainers on one batch, and the heads that they can use: for clients.py.

The models have Qwen3-1.7B's layers with random weights. AdamW's learning rate is 0, so that a step can be repeated.
"""

import argparse
import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import flce_ops

from .data import IGNORE_INDEX

# B sequences of T tokens, N = B T, D hidden, V vocabulary

RETAINED = 3 * 2**30  # bytes for saved logits; the default is twice the workspace, 1 GiB
OWN, OURS, RETAINING = "own", "flce_ops", "flce_ops_retaining"
LIGERS_LOSS, LIGER, LIGER_AND_OURS = "liger_loss_alone", "liger", "liger_kernels_flce_ops_loss"
# loss: (trainer, its options)
TRAINERS = {"SFT nll": ("SFT", {}), "SFT dft": ("SFT", {"loss_type": "dft"}), "DPO": ("DPO", {}), "GRPO": ("GRPO", {})}


class Given(nn.Module):
    """A trunk whose result is given: it returns the same hidden states (B, T, D) in every call."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.hidden)

    def get_input_embeddings(self) -> None:
        """Without this method, Transformers finds no output embeddings."""


@dataclass
class Client:
    model: Any
    loss_and_backward: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    providers: dict[str, Callable[[], contextlib.AbstractContextManager]]
    # context in which heads compute all logits
    dense: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    reference: Any = None  # a second model, if the loss needs one

    def step(self) -> None:
        self.loss_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def head(self) -> Tensor:
        self.model.model.hidden.grad = self.model.lm_head.weight.grad = None
        return self.loss_and_backward()

    @contextlib.contextmanager
    def given(self, hidden: Tensor, reference_hidden: Tensor, weight: Tensor) -> Iterator[None]:
        """The hidden states of both trunks, (B, T, D), and the weight of the heads, (V, D)."""
        models = [self.model] if self.reference is None else [self.model, self.reference]
        kept = [(model.model, model.lm_head.weight) for model in models]
        for model, states in zip(models, (hidden.requires_grad_(), reference_hidden)):
            model.model, model.lm_head.weight = Given(states), nn.Parameter(weight)
        yield
        for model, (trunk, own_weight) in zip(models, kept):
            model.model, model.lm_head.weight = trunk, own_weight

    def gradients(self) -> list[Tensor]:
        """The loss, and the gradients of hidden states and weight, for given trunks."""
        loss = self.head()
        return [loss.detach().double(), self.model.model.hidden.grad, self.model.lm_head.weight.grad]


# ---------------------------------------------------------------- Transformers


def make_model(options: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=max(1, options.hidden // 256),
        head_dim=128,
        max_position_embeddings=options.tokens,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with device:
        return transformers.Qwen3ForCausalLM(config).to(dtype)


def transformers_client(options: argparse.Namespace, dtype: torch.dtype, labels: Tensor) -> Client:
    """model(labels=...) in a loop, in bfloat16."""
    model, tokens = make_model(options, dtype, labels.device), labels.clamp(min=0)

    def loss_and_backward() -> Tensor:
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        return loss.detach()

    from flce_ops.integrations.transformers import patched

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    providers = {
        OWN: contextlib.nullcontext,
        OURS: partial(patched, model),
        LIGERS_LOSS: partial(liger, model, kernels=False, loss=True),
        LIGER: partial(liger, model, kernels=True, loss=True),
        LIGER_AND_OURS: partial(liger_and_ours, model),
    }
    return Client(model, loss_and_backward, optimizer, providers)


@contextlib.contextmanager
def liger(model: Any, *, kernels: bool, loss: bool) -> Iterator[None]:
    """Liger's kernels (RMSNorm, rotary positions, SwiGLU), its fused loss, or both, put on the model as it is."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    from liger_kernel.transformers.model.qwen3 import lce_forward
    from transformers.models.qwen3 import modeling_qwen3

    module = modeling_qwen3.__dict__  # Liger replaces names of it
    names = {name: module[name] for name in ("apply_rotary_pos_emb", "Qwen3RMSNorm", "Qwen3MLP")}
    attributes = {each: dict(each.__dict__) for each in model.modules()}
    if kernels and not isinstance(model.model, Given):  # which has no layers
        apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=loss, cross_entropy=False, model=model)
    elif loss:
        model.forward = MethodType(lce_forward, model)
    try:
        yield
    finally:
        module.update(names)
        for each, before in attributes.items():
            for name in each.__dict__.keys() - before.keys():
                delattr(each, name)
            for name, value in before.items():
                each.__dict__[name] = value


@contextlib.contextmanager
def liger_and_ours(model: Any) -> Iterator[None]:
    from flce_ops.integrations.transformers import patched

    with liger(model, kernels=True, loss=False), patched(model):
        yield


# ---------------------------------------------------------------- TRL


def trl_client(loss: str, options: argparse.Namespace, dtype: torch.dtype, labels: Tensor) -> Client:
    """A trainer with its defaults (bfloat16 by autocast, gradient checkpointing), which gets one batch."""
    import trl
    from datasets import Dataset

    from flce_ops.integrations.trl import patched

    kind, chosen = TRAINERS[loss]
    model = make_model(options, dtype, labels.device)
    extra = {"reward_funcs": no_reward} if kind == "GRPO" else {}
    if kind == "DPO":
        extra["ref_model"] = copy.deepcopy(model)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(
            output_dir=str(options.folder),
            per_device_train_batch_size=len(labels),
            learning_rate=0.0,
            report_to="none",
            use_cpu=labels.device.type == "cpu",
            **chosen,
        ),
        train_dataset=Dataset.from_dict(TEXTS[kind]),
        processing_class=make_tokenizer(),
        **extra,
    )
    inputs, count = batch_of(kind, labels)
    trainer._prepare_inputs = lambda given: given  # GRPO's own would sample
    prepared = trainer.accelerator.prepare(trainer.model)
    trainer.current_gradient_accumulation_steps = 1

    def loss_and_backward() -> Tensor:
        return trainer.training_step(prepared, dict(inputs), count)

    providers = {OWN: contextlib.nullcontext, OURS: patched, RETAINING: retaining}
    if loss == "SFT nll":  # makes its gradients in forward
        del providers[RETAINING]
    return Client(
        model, loss_and_backward, trainer.create_optimizer(), providers, dense_log_probs, extra.get("ref_model")
    )


@contextlib.contextmanager
def retaining() -> Iterator[None]:
    from flce_ops.integrations.trl import patched

    with patched(), flce_ops.workspace(retained=RETAINED):
        yield


TEXTS = {  # what a trainer is constructed with
    "SFT": {"text": ["w w w"] * 4},
    "DPO": {"prompt": ["w w"] * 4, "chosen": ["w"] * 4, "rejected": ["w w"] * 4},
    "GRPO": {"prompt": ["w w"] * 8},
}


def no_reward(completions: list, **_: Any) -> list[float]:
    return [0.0] * len(completions)


def batch_of(kind: str, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The output of the trainer's collator, and its number of tokens. A quarter of a sequence is the prompt."""
    tokens, everywhere = labels.clamp(min=0), torch.ones_like(labels)
    count = (labels[:, 1:] != IGNORE_INDEX).sum()
    if kind == "SFT":
        return {"input_ids": tokens, "labels": labels, "attention_mask": everywhere}, count
    prompt = labels.shape[1] // 4
    completion = (labels != IGNORE_INDEX).long()
    if kind == "DPO":
        completion[:, :prompt] = 0
        return {"input_ids": tokens, "attention_mask": everywhere, "completion_mask": completion}, count
    return {
        "prompt_ids": tokens[:, :prompt],
        "prompt_mask": everywhere[:, :prompt],
        "completion_ids": tokens[:, prompt:],
        "completion_mask": completion[:, prompt:],
        "advantages": torch.linspace(-1, 1, len(labels), device=labels.device),
        "num_items_in_batch": completion[:, prompt:].sum(),
    }, count


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "w": 1, "<eos>": 2}, "w"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w")


@contextlib.contextmanager
def dense_log_probs() -> Iterator[None]:
    """TRL's head as a formula, in the dtype of its operands."""
    from trl.trainer import utils

    def apply(hidden: Tensor, weight: Tensor, _: None, targets: Tensor, *__: Any) -> tuple[Tensor | None, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            log_p = (hidden @ weight.T).log_softmax(1)
        one = torch.ones_like(targets)
        return log_p.gather(1, targets[:, None])[:, 0], one.float(), one.float(), one.float(), one.bool()

    kept, utils._ChunkedLogProbFunction = utils._ChunkedLogProbFunction, SimpleNamespace(apply=apply)
    yield
    utils._ChunkedLogProbFunction = kept
