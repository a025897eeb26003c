"""Where TRL's trainers compute: two private names, and what this package expects of each.

    trl.trainer.utils._ChunkedLogProbFunction                       called by the forward that add_fused_lm_head sets
    trl.trainer.distillation_trainer._chunked_divergence_loss       called by DistillationTrainer

TRL promises nothing about either, so they are read before anything is put there: that the name exists, that it takes
the arguments it is known to take, and that the function which should ask for it still does.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

TESTED = "1.16"  # the TRL that the tests run


@dataclass(frozen=True)
class Place:
    module: str
    name: str
    arguments: tuple[str, ...]  # of what is there, in order
    caller: str  # dotted, in the same module: looks the name up when it runs

    @property
    def where(self) -> str:
        return f"{self.module}.{self.name}"

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)

    def check(self) -> None:
        """NotImplementedError by name where TRL has moved or changed it."""
        module = self.load()
        found = getattr(module, self.name, None)
        if found is None:
            raise moved(self, f"{self.where} is not there")
        arguments = tuple(inspect.signature(function_of(found)).parameters)
        if arguments != self.arguments:
            raise moved(self, f"expected {self.where} to take {self.arguments}, got {arguments}")
        caller: Any = module
        for part in self.caller.split("."):
            caller = getattr(caller, part, None)
        if caller is None or self.name not in names_in(inspect.unwrap(caller).__code__):
            raise moved(self, f"expected {self.module}.{self.caller} to call {self.name}, which it does not")


LOG_PROBS = Place(
    "trl.trainer.utils",
    "_ChunkedLogProbFunction",
    (
        *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
        *("final_logit_softcapping", "logit_scale", "outputs"),
    ),
    caller="add_fused_lm_head",
)
DIVERGENCE = Place(
    "trl.trainer.distillation_trainer",
    "_chunked_divergence_loss",
    (
        *("student_hidden_states", "teacher_hidden_states", "student_lm_head_weight", "teacher_lm_head_weight"),
        *("completion_mask", "beta", "num_items_in_batch", "student_lm_head_bias", "teacher_lm_head_bias"),
        *("student_logit_scale", "teacher_logit_scale", "student_final_logit_softcapping"),
        *("teacher_final_logit_softcapping", "temperature"),
    ),
    caller="DistillationTrainer._compute_loss",
)


def function_of(found: Any) -> Callable:
    """forward of an autograd Function."""
    return found.forward if isinstance(found, type) and hasattr(found, "forward") else found


def names_in(code: CodeType) -> Iterator[str]:
    """Names that a function and the functions in it look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)


def moved(place: Place, what: str) -> NotImplementedError:
    import trl

    return NotImplementedError(
        f"TRL {trl.__version__}: {what}. flce_ops knows TRL {TESTED}, where {place.caller} calls it; train without "
        "patch, or with that version"
    )
