"""One file for each implementation. Each file makes the step for a problem and a mode:

    provide(name, problem, mode) -> step    raises Unavailable(reason) if there is none
    VERSION_OF: str                         the distribution whose version goes into the table

A file is imported when one of its providers is requested. So a missing library only gives a row with a reason.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from importlib import metadata

import torch

from ..data import Problem
from ..modes import Mode, Step, step_of
from .unavailable import Unavailable

# name -> file, in the order of setup: if time runs out, the last ones are missing.
FILES = {
    "floor": "floor",
    "ours": "ours",
    "ours_compiled": "ours",
    "ours_captured": "ours",
    "ours_2GiB": "ours",
    "ours_retained": "ours",
    "ours_256MiB": "ours",
    "ours_128MiB": "ours",
    "ours_6MiB": "ours",
    "ours_compacted": "ours",
    "ours_sparse_10": "ours",
    "ours_sparse_11": "ours",
    "ours_sparse_12": "ours",
    "ours_drop_12": "ours",
    "torch_compile": "torch_dense",
    "torch_eager": "torch_dense",
    "torch_function": "torch_dense",
    "torch_chunked": "torch_chunked",
    "torch_chunked_accurate": "torch_chunked",
    "liger": "liger",
    "liger_fp32": "liger",
    "quack_chunked": "quack",
    "quack_scaled_exp": "quack",
    "cce": "cce",
    "cce_kahan_full_c": "cce",
    "cce_exact": "cce",
    "trl": "trl",
    "verl": "verl",
    "liger_cutedsl": "liger",
    "quack_autotuned": "quack",  # last: its first call takes minutes
}
_OURS, _OURS_AND_TORCH = ("floor", "ours"), ("floor", "ours", "torch_dense")
HAVE = {  # for modes that not all files have: the mode, or the first word of its name, and the files that have it
    "log_probs": (*_OURS_AND_TORCH, "trl", "verl"),  # the entropy, differentiable
    "soft64": _OURS_AND_TORCH,
    "smoothing": _OURS_AND_TORCH,
    "softcap": _OURS_AND_TORCH,
    "kl": (*_OURS_AND_TORCH, "liger"),
    "invariant": _OURS,
    "metric": _OURS,
    "metrics": _OURS,
}
QUICK_LEAVES_OUT = ("quack_autotuned",)


def choose(patterns: str, *, without: str = "") -> list[str]:
    """`floor,ours*` -> names in the order of FILES. `without` removes names, in the same notation."""
    wanted, unwanted = patterns.split(","), without.split(",")
    for pattern in filter(None, wanted + unwanted):
        if not any(fnmatch(name, pattern) for name in FILES):
            raise ValueError(f"expected one of {', '.join(FILES)} or a pattern such as ours*, got {pattern!r}")
    return [
        name
        for name in FILES
        if any(fnmatch(name, pattern) for pattern in wanted) and not any(fnmatch(name, p) for p in unwanted)
    ]


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    """The step. It may raise anything, because other libraries make it."""
    having = HAVE.get(mode.name, HAVE.get(mode.name.split("_")[0], (FILES[name],)))
    if FILES[name] not in having:
        raise Unavailable("not in this mode")
    return _module(name).provide(name, problem, mode)


def stepping(name: str, mode: Mode, *, dynamic: bool | None = None) -> Callable[[Problem], Step]:
    """Steps for problems of many sizes. torch.compile has one function for all of them, as users have it."""
    if name != "torch_compile":
        return lambda problem: provide(name, problem, mode)
    dense = _module(name)
    loss = torch.compile(
        dense.dense_log_probs if mode.reduction == "log_probs" else dense.dense_loss, dynamic=dynamic, fullgraph=True
    )
    return lambda problem: step_of(loss, problem, mode)


def version(name: str) -> str:
    return version_of(_module(name).VERSION_OF)


def version_of(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:  # can be imported, but pip did not install it
        return getattr(sys.modules.get(library), "__version__", "").partition("+")[0]


def _module(name: str):
    return importlib.import_module(f".{FILES[name]}", __name__)


__all__ = ["FILES", "QUICK_LEAVES_OUT", "Unavailable", "choose", "provide", "stepping", "version", "version_of"]
