"""The cases of the fuzzer as a strategy of hypothesis, which shrinks a failure towards the plainest case."""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.cases import Case
from tests.fuzz.draw import drawn_by
from tests.fuzz.judge import examine

FINE = 10**4


class Choices:
    """What draw.py asks of a `random.Random`, out of integers that hypothesis shrinks towards 0.

    There the first of several values is chosen, and what is rare does not happen: `random() < share` is False.
    """

    def __init__(self, draw: Callable) -> None:
        self.draw = draw

    def integer(self, below: int) -> int:
        return self.draw(st.integers(0, below - 1))

    def fine(self) -> int:
        """Below FINE. In two digits: integers of a large range are mostly small ones to hypothesis."""
        return 100 * self.integer(100) + self.integer(100)

    def random(self) -> float:
        return 1.0 - (self.fine() + 1) / FINE

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.fine() / FINE

    def randint(self, low: int, high: int) -> int:
        return low + self.integer(high - low + 1)

    def getrandbits(self, bits: int) -> int:
        return (self.fine() * FINE + self.fine()) % (1 << bits)

    def choice(self, values):
        return values[self.integer(len(values))]

    def choices(self, values: list, weights: list[float]) -> list:
        ends = list(accumulate(weights))
        return [values[min(bisect_right(ends, ends[-1] * self.fine() / FINE), len(values) - 1)]]

    def sample(self, values, count: int) -> list:
        left = list(values)
        return [left.pop(self.integer(len(left))) for _ in range(count)]


@st.composite
def cases(draw: Callable, device: str) -> Case:
    return drawn_by(Choices(draw), device)


def hold(device: str, examples: int, first_seed: int, *, compiled: bool = True) -> None:
    """AssertionError at a case that is further from the truth than plain torch: the plainest one like it, printed."""

    @seed(first_seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(device))
    def as_near_as_plain_torch(case: Case) -> None:
        if case.mode.startswith("compile") and not compiled:  # seconds each
            return
        failures = examine(case, device).failures
        assert not failures, f"Case({case}): {failures}"

    as_near_as_plain_torch()
