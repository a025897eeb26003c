"""The functions and modules of the package as a case calls them."""

import functools
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import flce_ops
from tests.fuzz import oracle
from tests.fuzz.cases import ARGMAX_METRICS, Case
from tests.fuzz.problem import Tensors

# What has classes, and so a shard of them, beside the rows of logits.
OF_CLASSES = ("weight", "bias", "class_weight", "teacher_weight")
NUMBERS = ("learnt", "normalizer", "gradient_seed")

MODULES = {"head": flce_ops.LinearCrossEntropyHead, "loss_module": flce_ops.LinearCrossEntropyLoss}


@functools.cache
def registered(source: str):
    names: dict = {"torch": torch}
    exec(source, names)
    return flce_ops.token_loss(names["of_token"], name=f"fuzz.of_{hashlib.md5(source.encode()).hexdigest()}")


class Ours:
    """Returns the outputs by name, as oracle.call does."""

    def __init__(self, case: Case) -> None:
        self.module = None
        self.loss_of_token = registered(oracle.source_of(case)) if case.function == "token_loss" else None
        if case.function in MODULES:
            options = logit_options(case) | {"label_smoothing": case.label_smoothing, "z_loss": case.z_loss}
            if case.function == "loss_module":
                options |= {"reduction": case.reduction}
                options |= {"weight": torch.empty(case.V, device="meta")} if case.class_weight else {}
            self.module = MODULES[case.function](case.D, case.V, bias=bool(case.bias), device="meta", **options)

    def __call__(self, case: Case, at: Tensors) -> Tensors:
        if not case.mesh:
            return self.call(case, at)
        return {name: whole(found) for name, found in self.call(case, on_mesh(case, at)).items()}

    def call(self, case: Case, at: Tensors) -> Tensors:
        arguments = (at["input"], at["weight"], at["target"], at.get("bias"))
        options = logit_options(case) | {"temperature": case.temperature}
        if case.learnt in options:
            options[case.learnt] = at["learnt"]
        if case.shift:
            options["shift"] = True
        if case.function == "log_probs":
            return self.log_probs(case, arguments, options)
        sums = {"token_weight": at.get("token_weight")}
        if case.normalizer:
            sums["normalizer"] = oracle.normalizer_of(case, at)
        if case.function == "kl_div":
            return {"loss": self.divergence(case, at, **options, **sums)}
        if case.function == "policy":
            return self.policy(case, at, options | sums)
        if case.function == "token_loss":
            return self.token_loss(case, at, options | sums)
        sums["weight"], sums["reduction"] = at.get("class_weight"), case.reduction
        if case.function in MODULES:
            return {"loss": self.of_module(case, at, sums)}
        options |= {"label_smoothing": case.label_smoothing, "z_loss": case.z_loss}
        if case.learnt == "z_loss":
            options["z_loss"] = at["learnt"]
        if case.function == "given_logits":
            logits = oracle.given_logits(at)
            return {
                "loss": flce_ops.cross_entropy(
                    logits, at["target"], inplace_backward=case.handed_over, **options, **sums
                )
            }
        if case.topk:
            options["target_weight"] = at["target_weight"]
        if case.sparse:
            options |= {"gradient_threshold": case.threshold, "gradient_mode": case.sparse}
            options["gradient_seed"] = at["gradient_seed"] if case.sparse == "unbiased" else None
        if case.class_order:
            options["gradient_class_order"] = at["class_order"]
        if case.main_grad:
            options["main_grad"] = at["main_grad"]
        if case.function != "metrics":
            return {"loss": flce_ops.linear_cross_entropy(*arguments, **options, **sums)}
        if case.metrics:
            loss, metrics = flce_ops.linear_cross_entropy(*arguments, **options, **sums, return_metrics=case.metrics)
            return {"loss": loss, **named_metrics(metrics)}
        loss, metrics = flce_ops.linear_cross_entropy(*arguments, **options, **sums, return_metrics=True)
        return {"loss": loss, "token_accuracy": metrics.token_accuracy, "argmax": metrics.argmax}

    def log_probs(self, case: Case, arguments: tuple, options: dict) -> Tensors:
        asked = {"entropy": case.entropy, "argmax": case.argmax, "tail": case.tail}
        if not case.metrics:
            found, metrics = flce_ops.linear_log_probs(*arguments, **asked, **options), {}
        else:
            found, metrics = flce_ops.linear_log_probs(*arguments, **asked, **options, return_metrics=case.metrics)
        found = {name: t for name, t in found._asdict().items() if t is not None} | named_metrics(metrics)
        return found | ({"tail": found.pop("tail_log_prob").exp()} if case.tail else {})

    def policy(self, case: Case, at: Tensors, options: dict) -> Tensors:
        operands = [at.get(name) for name in ("input", "weight", "target", *oracle.OF_POLICY, "bias")]
        found = flce_ops.linear_policy_loss(
            *operands,
            objective=case.objective,
            clip_low=case.clip_low,
            clip_high=case.clip_high,
            dual_clip=case.dual_clip if case.objective == "ppo" else None,
            beta=case.kl_factor,
            kl_estimator=case.kl_estimator,
            reduction=case.reduction,
            **options,
        )
        return {"loss": found.loss} | ({} if "token_weight" in at else {"metric log_probs": found.log_probs})

    def token_loss(self, case: Case, at: Tensors, options: dict) -> Tensors:
        head = at["input"], at["weight"], at["target"]
        options |= {"linear_bias": at.get("bias"), "reduction": case.reduction}
        found = flce_ops.linear_token_loss(*head, self.loss_of_token, at["a"], 0.7, **options)
        return {"loss": found.loss} | ({} if "token_weight" in at else {"metric log_probs": found.log_probs})

    def of_module(self, case: Case, at: Tensors, options: dict) -> Tensor:
        prefix = "linear." if case.function == "loss_module" else ""
        parameters = {prefix + name: at[name] for name in ("weight", "bias") if name in at}
        if case.function == "loss_module":
            options = {name: value for name, value in options.items() if name not in ("weight", "reduction")}
            parameters |= {"weight": at["class_weight"]} if "class_weight" in at else {}
        return torch.func.functional_call(self.module, parameters, (at["input"], at["target"]), options)

    def divergence(self, case: Case, at: Tensors, **options) -> Tensor:
        nothing_ignored = not case.ignored and case.ignore_index == -100 and not case.shift
        return flce_ops.linear_kl_div(
            at["input"],
            at["weight"],
            at.get("teacher_input"),
            at.get("teacher_weight"),
            teacher_probs=at.get("teacher_probs"),
            linear_bias=at.get("bias"),
            kind=case.kind,
            beta=case.beta,
            target=None if nothing_ignored else at["target"],
            reduction=case.reduction,
            teacher_logit_scale=case.teacher_scale,
            teacher_softcap=case.teacher_softcap,
            **options,
        )


def named_metrics(metrics: dict[str, Tensor]) -> Tensors:
    return {name if name in ARGMAX_METRICS else f"metric {name}": found for name, found in metrics.items()}


def logit_options(case: Case) -> dict:
    return {"ignore_index": case.ignore_index, "softcap": case.softcap, "logit_scale": case.logit_scale}


@functools.cache
def mesh():
    """Of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def on_mesh(case: Case, at: Tensors) -> Tensors:
    """Tokens or classes are sharded; from_local's derivative is the identity."""

    def placement(name: str, tensor: Tensor):
        if case.mesh == "classes":
            return Shard(0) if name in OF_CLASSES else Replicate()
        return Replicate() if name in OF_CLASSES or not tensor.dim() else Shard(0)

    return {
        name: tensor
        if name in NUMBERS
        else DTensor.from_local(tensor, mesh(), [placement(name, tensor)], run_check=False)
        for name, tensor in at.items()
    }


def whole(found: Tensor) -> Tensor:
    return found.full_tensor() if isinstance(found, DTensor) else found
