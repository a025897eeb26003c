"""One file per implementation. Each says, for a problem and a mode, how to take a step:

    provide(name, problem, mode) -> step    raises Unavailable(reason) where there is none
    VERSION_OF: str                         the distribution whose version goes into the table

A file is imported when one of its providers is asked for, so a missing library is a reason in a row and nothing else.
"""

from __future__ import annotations

import importlib
import sys
from fnmatch import fnmatch
from importlib import metadata

from ..data import Problem
from ..modes import Mode, Step
from .unavailable import Unavailable

# name -> file. In the order they are set up: should the time run out, the last ones are missing.
FILES = {
    "floor": "floor",
    "ours": "ours",
    "ours_compiled": "ours",
    "ours_captured": "ours",
    "ours_2GiB": "ours",
    "ours_retained": "ours",
    "ours_128MiB": "ours",
    "ours_64MiB": "ours",
    "ours_6MiB": "ours",
    "ours_recompute": "ours",
    "ours_compacted": "ours",
    "ours_sparse_10": "ours",
    "ours_sparse_11": "ours",
    "ours_sparse_12": "ours",
    "ours_drop_12": "ours",
    "ours_tiles_12": "ours",
    "ours_sparse_10_by_mean": "ours",
    "ours_sparse_12_by_mean": "ours",
    "ours_tiles_12_by_mean": "ours",
    "torch_compile": "torch_dense",
    "torch_eager": "torch_dense",
    "torch_chunked": "torch_chunked",
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
    "liger_cutedsl_scaled": "liger",
    "liger_cutile": "liger",
    "quack_autotuned": "quack",  # last: its first call takes minutes
}
_OURS, _OURS_AND_TORCH = ("floor", "ours"), ("floor", "ours", "torch_dense")
HAVE = {  # mode, or the first word of its name: the files that have it, where not all do
    "log_probs": (*_OURS_AND_TORCH, "trl", "verl"),  # the entropy, differentiable
    "soft64": _OURS_AND_TORCH,
    "smoothing": _OURS_AND_TORCH,
    "softcap": _OURS_AND_TORCH,
    "kl": (*_OURS_AND_TORCH, "liger"),
    "metric": _OURS,
    "metrics": _OURS,
}
QUICK_LEAVES_OUT = ("quack_autotuned",)


def choose(patterns: str, *, without: str = "") -> list[str]:
    """`floor,ours*` -> names in the order of FILES; `without` takes away, in the same notation."""
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
    """May raise anything: the libraries are not ours."""
    having = HAVE.get(mode.name, HAVE.get(mode.name.split("_")[0], (FILES[name],)))
    if FILES[name] not in having:
        raise Unavailable("not in this mode")
    return _module(name).provide(name, problem, mode)


def version(name: str) -> str:
    library = _module(name).VERSION_OF
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:  # on the path without having been installed
        return getattr(sys.modules.get(library), "__version__", "")


def _module(name: str):
    return importlib.import_module(f".{FILES[name]}", __name__)


__all__ = ["FILES", "QUICK_LEAVES_OUT", "Unavailable", "choose", "provide", "version"]
