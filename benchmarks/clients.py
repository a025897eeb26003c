"""python -m benchmarks.clients: training steps of TRL and of Transformers with their own heads, and with ours.

A model of Qwen3-1.7B's layers, fewer of them, with random weights; AdamW's learning rate is 0, so that steps repeat.

    step    what a user waits for: forward, backward, optimizer; peak_MiB over parameters and the optimizer's state
    head    the same call with the trunk's hidden states given: forward and backward of the head and the loss
            err_...: of the loss and of the gradients of hidden states and weight, relative to dense float32's

A row is one loss and one provider. `own` is the client's default head: TRL's Triton kernels, Transformers' logits.
`flce_ops_retaining` may keep RETAINED bytes of logits for backward, which is all: a matter of losses per token, TRL's.
`equal` says that no error of the row is above TOLERANCE, nor above SLACK times that of the client's own head.
"""

import argparse
import contextlib
import copy
import gc
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import flce_ops
from flce_ops.integrations.transformers import patched as patched_model

from .data import IGNORE_INDEX, make_problem
from .memory import MIB, peak_bytes_cuda
from .report import Environment, Report, environment, say
from .shapes import Shape
from .timing import time_steps

# B sequences of T tokens, N = B T, D hidden, V vocabulary

TOLERANCE, SLACK = 2e-2, 1.25  # relative, of bfloat16's products
RETAINED = 3 * 2**30  # bytes; by default twice the workspace, 1 GiB
OWN, OURS, RETAINING, LIGER = "own", "flce_ops", "flce_ops_retaining", "liger"
TRAINERS = {  # loss: (trainer, its options)
    "SFT nll": ("SFT", {}),
    "SFT dft": ("SFT", {"loss_type": "dft"}),
    "DPO": ("DPO", {}),
    "GRPO": ("GRPO", {}),
}
CASES = ("trl:SFT nll", "transformers:labels", "trl:DPO", "trl:GRPO", "trl:SFT nll:float32", "trl:SFT dft")


@dataclass
class ClientRow(Environment):
    client: str
    version: str
    transformers: str
    loss: str
    weights: str  # their dtype; computed in bfloat16, which is autocast's where the weights are float32
    B: int
    T: int
    D: int
    V: int
    layers: int
    provider: str
    step_ms: float | None = None
    step_spread: float | None = None
    step_peak_MiB: float | None = None
    head_ms: float | None = None
    head_spread: float | None = None
    head_peak_MiB: float | None = None
    err_loss: float | None = None
    err_dx: float | None = None
    err_dw: float | None = None
    tolerance: float = TOLERANCE
    equal: bool | None = None
    reason: str = ""


class Given(nn.Module):
    """A trunk that was run: the same hidden states (B, T, D) at every call."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.hidden)

    def get_input_embeddings(self) -> None:
        """Transformers finds no output embeddings where this is not there."""


@dataclass
class Client:
    model: Any
    loss_and_backward: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    providers: dict[str, Callable[[], contextlib.AbstractContextManager]]
    dense: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # heads that make all logits
    reference: Any = None  # a second model, where the loss asks for one

    def step(self) -> None:
        self.loss_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def head(self) -> Tensor:
        self.model.model.hidden.grad = self.model.lm_head.weight.grad = None
        return self.loss_and_backward()

    @contextlib.contextmanager
    def given(self, hidden: Tensor, reference_hidden: Tensor, weight: Tensor) -> Iterator[None]:
        """What the trunks make, (B, T, D), and the weight of the heads, (V, D)."""
        models = [self.model] if self.reference is None else [self.model, self.reference]
        kept = [(model.model, model.lm_head.weight) for model in models]
        for model, states in zip(models, (hidden.requires_grad_(), reference_hidden)):
            model.model, model.lm_head.weight = Given(states), nn.Parameter(weight)
        yield
        for model, (trunk, own_weight) in zip(models, kept):
            model.model, model.lm_head.weight = trunk, own_weight

    def gradients(self) -> list[Tensor]:
        """Of a given trunk: loss, those of hidden states and weight."""
        loss = self.head()
        return [loss.detach().double(), self.model.model.hidden.grad, self.model.lm_head.weight.grad]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


# ---------------------------------------------------------------- the two clients


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

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    providers = {OWN: contextlib.nullcontext, OURS: partial(patched_model, model), LIGER: partial(liger, model)}
    return Client(model, loss_and_backward, optimizer, providers)


@contextlib.contextmanager
def liger(model: Any) -> Iterator[None]:
    """Its fused head, and nothing else of it."""
    from liger_kernel.transformers.model.qwen3 import lce_forward

    model.forward = MethodType(lce_forward, model)
    try:
        yield
    finally:
        del model.forward


def trl_client(loss: str, options: argparse.Namespace, dtype: torch.dtype, labels: Tensor) -> Client:
    """A trainer as it comes (bfloat16 by autocast, gradient checkpointing), fed with one batch."""
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
    trainer._prepare_inputs = lambda given: given  # GRPO's would sample
    prepared = trainer.accelerator.prepare(trainer.model)
    trainer.current_gradient_accumulation_steps = 1

    def loss_and_backward() -> Tensor:
        return trainer.training_step(prepared, dict(inputs), count)

    providers = {OWN: contextlib.nullcontext, OURS: patched, RETAINING: retaining}
    return Client(
        model, loss_and_backward, trainer.create_optimizer(), providers, dense_log_probs, extra.get("ref_model")
    )


@contextlib.contextmanager
def retaining() -> Iterator[None]:
    from flce_ops.integrations.trl import patched

    with patched(), flce_ops.workspace(retained=RETAINED):
        yield


TEXTS = {  # what a trainer is made with
    "SFT": {"text": ["w w w"] * 4},
    "DPO": {"prompt": ["w w"] * 4, "chosen": ["w"] * 4, "rejected": ["w w"] * 4},
    "GRPO": {"prompt": ["w w"] * 8},
}


def no_reward(completions: list, **_: Any) -> list[float]:
    return [0.0] * len(completions)


def batch_of(kind: str, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What the trainer's collator makes, and the number of its tokens. A quarter of a sequence is the prompt."""
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
    """TRL's head as the formula, in the dtype of its operands."""
    from trl.trainer import utils

    def apply(hidden: Tensor, weight: Tensor, _: None, targets: Tensor, *__: Any) -> tuple[Tensor | None, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            log_p = (hidden @ weight.T).log_softmax(1)
        one = torch.ones_like(targets)
        return log_p.gather(1, targets[:, None])[:, 0], one.float(), one.float(), one.float(), one.bool()

    kept, utils._ChunkedLogProbFunction = utils._ChunkedLogProbFunction, SimpleNamespace(apply=apply)
    yield
    utils._ChunkedLogProbFunction = kept


# ---------------------------------------------------------------- measuring


def measure(case: str, options: argparse.Namespace, device: torch.device) -> list[ClientRow]:
    client_name, loss, *weights = case.split(":")
    dtype = getattr(torch, weights[0] if weights else "bfloat16")
    shape = Shape(options.sequences * options.tokens, options.hidden, options.vocabulary)
    problem = make_problem(shape, dtype=dtype, device=device, seed=0)
    # the label of a position is what the position before it predicts
    labels = problem.target.view(options.sequences, options.tokens).roll(1, 1)
    hidden = problem.input.view(options.sequences, options.tokens, -1)
    make = transformers_client if client_name == "transformers" else partial(trl_client, loss)
    client = make(options, dtype, labels)
    here = environment(device, options.commit)
    facts = (here.gpu, here.torch, here.triton, here.commit, client_name, version(client_name))
    size = (options.sequences, options.tokens, options.hidden, options.vocabulary, options.layers)
    rows = {
        name: ClientRow(*facts, version("transformers"), loss, str(dtype).split(".")[1], *size, name)
        for name in client.providers
    }
    # a reference model whose logits differ by some hundredths
    operands = (hidden, (hidden.float() + 0.02 * torch.randn_like(hidden, dtype=torch.float32)).to(dtype))
    operands = (*operands, problem.linear_weight)
    with client.given(*(operand.float() for operand in operands)), client.dense():
        exact = client.gradients()
    with client.given(*operands):
        for name, row in rows.items():
            with working(row), client.providers[name]():
                row.err_loss, row.err_dx, row.err_dw = map(relative, client.gradients(), exact)
                own = rows[OWN]
                errors = zip((row.err_loss, row.err_dx, row.err_dw), (own.err_loss, own.err_dx, own.err_dw))
                row.equal = all(ours <= TOLERANCE and ours <= max(SLACK * theirs, 1e-5) for ours, theirs in errors)
        del exact
        time_and_peak(rows, client, client.head, "head", options, device)
    time_and_peak(rows, client, client.step, "step", options, device)
    return list(rows.values())


@contextlib.contextmanager
def working(row: ClientRow) -> Iterator[None]:
    """A provider that fails leaves its reason."""
    try:
        yield
    except Exception as error:
        row.reason = row.reason or f"{type(error).__name__}: {error}".splitlines()[0][:120]


def time_and_peak(
    rows: dict[str, ClientRow],
    client: Client,
    step: Callable[[], Any],
    what: str,
    options: argparse.Namespace,
    device: torch.device,
) -> None:
    times: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for name in list(rows)[:: 1 if number % 2 else -1]:
            row = rows[name]
            if row.reason:
                continue
            with working(row), client.providers[name]():
                step()
                if number == 0 and device.type == "cuda":
                    setattr(row, f"{what}_peak_MiB", peak_bytes_cuda(step) / MIB)

                def failed(_: str, failure: Exception) -> None:
                    raise failure

                timing = time_steps({name: step}, device=device, rounds=1, ms=options.ms, on_failure=failed)[name]
                times.setdefault(name, []).append(timing.ms)
    for name, found in times.items():
        middle = statistics.median(found)
        setattr(rows[name], f"{what}_ms", middle)
        setattr(rows[name], f"{what}_spread", (max(found) - min(found)) / middle)


def table(rows: Sequence[ClientRow]) -> str:
    lines = [
        f"{'provider':19}{'step ms':>10}{'+-':>7}{'MiB':>8}{'head ms':>10}{'+-':>7}{'MiB':>8}"
        f"{'err loss':>10}{'dX':>9}{'dW':>9}  equal to {TOLERANCE:g} and {SLACK:g} of own"
    ]
    for row in rows:
        cells = (
            *((row.step_ms, "10.2f"), (row.step_spread, "7.1%"), (row.step_peak_MiB, "8.0f")),
            *((row.head_ms, "10.2f"), (row.head_spread, "7.1%"), (row.head_peak_MiB, "8.0f")),
            *((row.err_loss, "10.1e"), (row.err_dx, "9.1e"), (row.err_dw, "9.1e")),
        )
        text = "".join(" " * int(re.match(r"\d+", form)[0]) if v is None else f"{v:{form}}" for v, form in cells)
        lines.append(f"{row.provider:19}{text}  {row.equal}  {row.reason}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.clients", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="client:loss or client:loss:dtype of the weights")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=200, help="back-to-back time of a provider in a round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="to note in the CSV, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    start = time.perf_counter()
    report = Report(options.out / environment(device).slug / "clients.csv")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        for case in options.cases.split(","):
            rows = measure(case, options, device)
            report.add(rows)
            say(f"{case} {rows[0].weights}, after {time.perf_counter() - start:.0f} s\n{table(rows)}")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
