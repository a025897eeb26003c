"""A table of paths: the first row whose conditions all hold is chosen.

Conditions read whatever the table is about: a call (ops/paths.py), or the sizes of a problem
(triton/steps/chunks.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Condition(NamedTuple):
    name: str  # completes "expects ..."
    holds: Callable[[Any], bool]


class Path(NamedTuple):
    name: str
    conditions: tuple[Condition, ...]
    kernel: str = ""  # "module:function"

    def ruled_out_by(self, facts: Any) -> list[str]:
        return [condition.name for condition in self.conditions if not condition.holds(facts)]


def choose(paths: tuple[Path, ...], facts: Any) -> Path:
    for path in paths:
        if all(condition.holds(facts) for condition in path.conditions):
            return path
    raise AssertionError("the last path of a table has no condition")
