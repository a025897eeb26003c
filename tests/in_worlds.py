"""Tests whose body runs in every process of a group (process_pool.py)."""

import functools
import inspect
from collections.abc import Callable

import pytest
from process_pool import run_in_world


def in_worlds(worlds: list) -> Callable:
    """`test(device, ...)` runs in every process of each world, which pytest gives in the place of the device."""

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def test(world, **arguments):
            run_in_world(world, run_body, test, **arguments)

        _, *others = inspect.signature(body).parameters.values()
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([world, *others])
        return pytest.mark.parametrize("world", worlds)(test)

    return decorate


def run_body(device, test: Callable, **arguments) -> None:
    """A process finds a test by its name."""
    test.__wrapped__(device, **arguments)
