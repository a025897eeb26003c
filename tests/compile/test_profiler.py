"""torch.profiler shows the operators under their own names, in eager and compiled steps, forward and backward."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from inputs import make_inputs
from torch.profiler import ProfilerActivity, profile

import flce_ops

# reduction -> the operators of a training step
OPERATORS = {
    "mean": ("flce::linear_cross_entropy_with_grad",),
    "none": ("flce::linear_cross_entropy_forward", "flce::linear_cross_entropy_backward"),
}


def step(loss, inputs, reduction):
    loss(*inputs.args, reduction=reduction).sum().backward()


def events_of(loss, inputs, reduction):
    activities = [ProfilerActivity.CPU]
    if inputs.input.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    step(loss, inputs, reduction)  # the first call compiles
    with profile(activities=activities, record_shapes=True) as profiler:
        step(loss, inputs, reduction)
    return profiler.events()


def inside(event, outer) -> bool:
    while event is not None and event is not outer:
        event = event.cpu_parent
    return event is outer


def named(events, name):
    """The operator's range. In eager mode that of a backward operator contains a second one of the same name: the outer
    one is the call on the autograd key, the inner one the call below autograd.
    """
    found = [event for event in events if event.name == name]
    outermost = [event for event in found if not any(inside(event, other) for other in found if other is not event)]
    assert len(outermost) == 1, f"{name}: {len(outermost)} ranges"
    return outermost[0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reduction", OPERATORS)
def test_each_operator_is_a_range_that_holds_its_work(device, reduction, compiled):
    # aot_eager instead of inductor, whose code calls the same operators and takes seconds longer to compile
    loss = torch.compile(flce_ops.linear_cross_entropy, backend="aot_eager") if compiled else None
    events = events_of(loss or flce_ops.linear_cross_entropy, make_inputs((40, 11, 31), device=device), reduction)
    for name in OPERATORS[reduction]:
        operator = named(events, name)
        assert [40, 11] in operator.input_shapes and [31, 11] in operator.input_shapes
        products = [event for event in events if event.name in ("aten::mm", "aten::addmm") and inside(event, operator)]
        assert products, f"no product of matrices is inside {name}"
    if not compiled:
        entry = named(events, "flce::linear_cross_entropy")
        assert inside(named(events, OPERATORS[reduction][0]), entry)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reduction", OPERATORS)
def test_triton_kernels_belong_to_their_operator(reduction, compiled):
    inputs = make_inputs((256, 64, 1021), device="cuda", dtype=torch.bfloat16)
    loss = torch.compile(flce_ops.linear_cross_entropy) if compiled else flce_ops.linear_cross_entropy
    events = events_of(loss, inputs, reduction)
    for name in OPERATORS[reduction]:
        operator = named(events, name)
        assert operator.device_time_total > 0
        kernels = [
            kernel.name for event in events if event.kernels and inside(event, operator) for kernel in event.kernels
        ]
        made_by = "stored_tiles_kernel" if name.endswith("_backward") else "logits_gemm_kernel"
        assert [kernel for kernel in kernels if made_by in kernel], kernels
