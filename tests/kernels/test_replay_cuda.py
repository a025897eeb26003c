"""On a GPU, repeated steps have the same bits as steps that Python runs."""

import ctypes

import pytest
import torch
from test_triton_layouts import ON_GPU

import flce_ops

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
replay = pytest.importorskip("flce_ops.triton.launch.replay")
driver_launch = pytest.importorskip("flce_ops.triton.launch.driver_launch")

gpu = pytest.mark.skipif(not ON_GPU, reason="launches are repeated on a GPU")

OPTIONS = {
    "plain": {},
    "bias, softcap": {"linear_bias": True, "softcap": 8.0},
    "z_loss, token_weight": {"z_loss": 1e-3, "token_weight": True},
    "class weights": {"weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "none": {"reduction": "none"},
}


def made(tokens, hidden, classes, dtype, options):
    """Operands of a call. A third of the tokens are ignored, and one has a loss that needs the rescue."""
    x = torch.randn(tokens, hidden, device="cuda").to(dtype).requires_grad_()
    w = (torch.randn(classes, hidden, device="cuda") / hidden**0.5).to(dtype).requires_grad_()
    with torch.no_grad():
        x[0] *= 60
    target = torch.randint(classes, (tokens,), device="cuda")
    target[torch.rand(tokens, device="cuda") < 0.3] = -100
    options = dict(options)
    for name, size in (("linear_bias", classes), ("weight", classes), ("token_weight", tokens)):
        if options.pop(name, False):
            options[name] = torch.rand(size, device="cuda", dtype=torch.float32 if name == "token_weight" else dtype)
    return x, w, target, options


def results(x, w, target, options):
    for tensor in (x, w):
        tensor.grad = None
    loss = flce_ops.linear_cross_entropy(x, w, target, **options)
    (loss if loss.dim() == 0 else loss.sum()).backward()
    return [loss.detach().clone(), x.grad.clone(), w.grad.clone()]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("workspace", [512 << 20, 4 << 20, 1 << 20], ids=lambda n: f"{n >> 20}MiB")
@pytest.mark.parametrize("shape", [(700, 136, 5003), (130, 512, 8000), (300, 67, 1001)], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_repeated_steps_give_the_bits_of_a_step_as_it_is_written(options, shape, workspace, dtype, poisoned_memory):
    with flce_ops.workspace(workspace):
        calls = [made(*shape, dtype, OPTIONS[options]) for _ in range(4)]
        expected = []
        for call in calls:
            replay._known.clear()
            expected.append(results(*call))
        replay._known.clear()
        found = [results(*call) for call in calls]
    for of_call, should in zip(found, expected):
        for one, other in zip(of_call, should):
            assert torch.equal(one, other) or torch.equal(one.isnan(), other.isnan())
    if options != "bias, softcap" and workspace == 512 << 20:
        assert any(isinstance(known, replay.Replay) for known in replay._known.values())


LOGITS_OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "number": {"normalizer": 7.0},
    "normalizer": {"normalizer": torch.tensor(123.0)},
    "token_weight": {"token_weight": torch.rand(300)},
    "class weights": {"weight": torch.rand(1003) + 0.1},
    "smoothing, z_loss": {"label_smoothing": 0.1, "z_loss": 1e-3},
    "softcap, metrics": {"softcap": 5.0, "return_metrics": True},
}


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", LOGITS_OPTIONS)
def test_repeated_losses_of_given_logits_in_place_and_not_in_turn(options, dtype, poisoned_memory):
    """Two operators with similar arguments. A mean and a sum are the same operator with and without a denominator."""
    options = {
        name: value.to("cuda") if isinstance(value, torch.Tensor) else value
        for name, value in LOGITS_OPTIONS[options].items()
    }
    calls = [torch.randn(300, 1003, device="cuda").to(dtype).requires_grad_() for _ in range(4)]
    targets = [torch.randint(1003, (300,), device="cuda") for _ in calls]
    for target in targets:
        target[torch.rand(300, device="cuda") < 0.3] = -100

    def gradients(logits, target):
        found = []
        for inplace_backward in (False, True):
            loss = flce_ops.cross_entropy(logits * 2.0, target, inplace_backward=inplace_backward, **options)
            loss = loss[0] if isinstance(loss, tuple) else loss
            found += [loss.detach().clone(), *torch.autograd.grad(loss.sum(), logits)]
        return found

    expected = []
    for call in zip(calls, targets):
        replay._known.clear()
        expected.append(gradients(*call))
    replay._known.clear()
    for call, (loss, gradient, *in_place) in zip(zip(calls, targets), expected):
        assert torch.equal(loss, in_place[0]) and torch.equal(gradient, in_place[1])
        assert all(map(torch.equal, gradients(*call), (loss, gradient, *in_place)))
    assert any(isinstance(known, replay.Replay) for known in replay._known.values())


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_repeated_losses_of_given_logits_are_right(dtype):
    """Kinds of calls that differ only in their reduction, one after the other."""
    for _ in range(4):
        logits, target = torch.randn(300, 1003, device="cuda").to(dtype), torch.randint(1003, (300,), device="cuda")
        target[:90] = -100
        for options, divisor in (({}, 210.0), ({"reduction": "sum"}, 1.0), ({"normalizer": 7.0}, 7.0)):
            for inplace_backward in (False, True):
                exact, given = logits.double().requires_grad_(), logits.clone().requires_grad_()
                right = torch.nn.functional.cross_entropy(exact, target, reduction="sum") / divisor
                found = flce_ops.cross_entropy(given * 1.0, target, inplace_backward=inplace_backward, **options)
                torch.testing.assert_close(found.double(), right, rtol=2e-6, atol=0.0)
                of_found, of_right = torch.autograd.grad(found, given)[0], torch.autograd.grad(right, exact)[0]
                error = (of_found.double() - of_right).norm() / of_right.norm()
                assert error < (4e-3 if dtype == torch.bfloat16 else 3e-6)


@triton.jit
def add_one_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1.0)


def launch_by_ctypes(compiled, x):
    """Launches a kernel that Triton compiled, without Triton."""
    function = ctypes.c_void_p(compiled.function)
    values = [ctypes.c_uint64(x.data_ptr()), *(ctypes.c_uint64(0) for _ in driver_launch.sizes_of(function.value)[1:])]
    parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    numbers = map(ctypes.c_uint, (1, 1, 1, 32 * compiled.metadata.num_warps, 1, 1, compiled.metadata.shared))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    driver_launch.check(driver_launch.driver().cuLaunchKernel(function, *numbers, stream, parameters, None))


def set_by_the_driver(compiled, x):
    """Runs an operation of the driver that is no kernel."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    one = ctypes.c_uint(0x3F800000)
    set_numbers = driver_launch.driver().cuMemsetD32Async
    driver_launch.check(set_numbers(ctypes.c_uint64(x.data_ptr()), one, ctypes.c_size_t(1), stream))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("other, repeatable", [(launch_by_ctypes, True), (set_by_the_driver, False)])
def test_what_is_launched_by_other_means_is_launched_again_or_refused(other, repeatable):
    compiled = add_one_kernel[(1,)](torch.zeros(1, device="cuda"))

    def step(x):
        other(compiled, x)
        add_one_kernel[(1,)](x)

    replay._known.clear()
    for _ in range(5):
        x = torch.zeros(1, device="cuda")
        replay.repeated(step, x)
        assert x.item() == 2.0
    (known,) = replay._known.values()
    assert isinstance(known, replay.Replay) if repeatable else known is replay.NOT_REPEATABLE
