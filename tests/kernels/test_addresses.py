"""A kernel in Triton's interpreter that uses memory beside its arguments fails by name, in the process of pytest and in
those of a group.
"""

import interpreter
import pytest
import torch
from process_pool import run_in_world

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not in the interpreter")


def use_entries(operation: str, offset: int) -> torch.Tensor:
    """Uses the 8 entries of a tensor from `offset` on."""
    import triton
    import triton.language as tl

    def load(pointer, offset: tl.constexpr):
        tl.load(pointer + offset + tl.arange(0, 8))

    def store(pointer, offset: tl.constexpr):
        tl.store(pointer + offset + tl.arange(0, 8), 1.0)

    def add(pointer, offset: tl.constexpr):
        tl.atomic_add(pointer + offset + tl.arange(0, 8), 1.0)

    # the memory beside the tensor is nobody else's, for the case that the check is missing
    entries = torch.frombuffer(bytearray(96), dtype=torch.float32, offset=32, count=8)
    triton.jit({"load": load, "store": store, "atomic_rmw": add}[operation])[(1,)](entries, offset)
    return entries


@pytest.mark.parametrize("operation", ["load", "store", "atomic_rmw"])
def test_memory_beside_an_argument_is_refused_by_name(operation, monkeypatch):
    interpreter.check_addresses(monkeypatch)
    refuses_memory_beside_an_argument(torch.device("cpu"), operation)


@pytest.mark.parametrize("operation", ["load", "store", "atomic_rmw"])
def test_memory_beside_an_argument_is_refused_in_a_process_of_a_group(operation):
    run_in_world(("cpu", 2), refuses_memory_beside_an_argument, operation)


def refuses_memory_beside_an_argument(device, operation):
    assert (use_entries(operation, 0) == (operation != "load")).all()
    for offset in (1, -1):
        with pytest.raises(Exception, match=f"{operation} of memory that is no argument's"):
            use_entries(operation, offset)
