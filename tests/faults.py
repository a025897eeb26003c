"""Faults on purpose: the k-th operation of ATen inside a call raises, whichever kernel of the package it is in."""

import gc
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

import flce_ops
from flce_ops.ops import paths
from flce_ops.support import workspace
from flce_ops.support.refusals import running

PACKAGE = os.path.dirname(flce_ops.__file__) + os.sep


class Fault(TorchDispatchMode):
    """Raises in place of operation number `at` that is no view, and knows what all others returned.

    An operation may allocate its result or what it needs meanwhile, so these are all places where memory can run out.
    What autograd's engine calls by itself is left out: an error there keeps a plain graph of torch in memory, too.
    """

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.at, self.error = at, error
        self.count = 0
        self.made: list[weakref.ref] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "flce" and not func.is_view and called_by_the_package():
            self.count += 1
            if self.count == self.at:
                raise self.error()  # made here: one that is kept holds what its frames hold
        result = func(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        made = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and id(leaf) not in given)
        self.made += map(weakref.ref, made)
        return result

    def left(self) -> list[Tensor]:
        """What operations have made and somebody still holds."""
        return [tensor for tensor in (reference() for reference in self.made) if tensor is not None]


def called_by_the_package() -> bool:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame is not None


@contextmanager
def fault(monkeypatch, at: int, error: Callable[[], BaseException]):
    """A mode sees an operator of the package as one call: it is entered once more around what that runs."""
    mode, function = Fault(at, error), paths.function

    def with_fault(kernel: str) -> Callable:
        launch = function(kernel)

        def run(call):
            with mode:
                return launch(call)

        return run

    with monkeypatch.context() as patched:
        patched.setattr(paths, "function", with_fault)
        with mode:
            yield mode


def state() -> tuple:
    """All that a call could leave behind."""
    return (
        flce_ops.get_workspace(),
        getattr(workspace._taken, "nbytes", 0),
        len(workspace.temporary.blocks),
        running.function,
        len(_get_current_dispatch_mode_stack()),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._functorch.peek_interpreter_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )


def failing_calls(monkeypatch, step: Callable, error: Callable[[], BaseException], next_call_every: int = 1) -> int:
    """Runs `step` with a fault at each operation, one after another; gives how many there are.

    After each the state is as before and nothing of the call is in memory. After every `next_call_every`-th the step
    has its results.
    """
    expected, before, at = step(), state(), 1
    while True:
        raised = False
        try:
            with fault(monkeypatch, at, error) as mode:
                step()
        except type(error()):
            raised = True
        if not raised:
            assert mode.count < at
            return at
        assert state() == before, at
        if mode.left():  # a cycle through the traceback
            gc.collect()
        assert not mode.left(), (at, [tuple(tensor.shape) for tensor in mode.left()])
        if at % next_call_every == 0:
            assert all(map(torch.equal, step(), expected)), at
        at += 1
