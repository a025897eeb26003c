"""A table of paths: of its rows the first one whose conditions all hold is taken.

What a condition looks at is the table's own: a call (ops/paths.py), the sizes of a problem (triton/steps/chunking.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Condition(NamedTuple):
    name: str  # as "expects ..."
    holds: Callable[[Any], bool]


class Path(NamedTuple):
    name: str
    conditions: tuple[Condition, ...]
    kernel: str = ""  # "module:function"
    why: str = ""

    def ruled_out_by(self, facts: Any) -> list[str]:
        return [condition.name for condition in self.conditions if not condition.holds(facts)]


def choose(paths: tuple[Path, ...], facts: Any) -> Path:
    for path in paths:
        for condition in path.conditions:
            if not condition.holds(facts):
                break
        else:
            return path
    raise AssertionError("the last path of a table has no condition")
