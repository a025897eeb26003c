"""Launches that are written down once and repeated: the same bits, in memory that is used by nothing else."""

import ctypes
import inspect
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from test_triton_layouts import ON_GPU

import flce_ops

replay = pytest.importorskip("flce_ops.triton.replay")
driver_launch = pytest.importorskip("flce_ops.triton.driver_launch")
launch_graphs = pytest.importorskip("flce_ops.triton.launch_graphs")

gpu = pytest.mark.skipif(not ON_GPU, reason="launches are repeated on a GPU")


class Launcher:
    """As Triton's: called with what a compiled kernel is launched with."""

    num_ctas = 1
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *arguments):
        self.launch(x, y, z, stream, function, *arguments)


class LaunchesWithoutDriver:
    """In place of DriverLaunches: the launcher itself, with the addresses that are in the Places."""

    def __init__(self, written, places, device):
        assert len(set(places)) == len(places)
        self.written, self.launches = written, []

    def run(self, stream):
        for compiled, grid, arguments in self.written:
            compiled.run(*grid, stream, compiled.function, None, None, None, None, *arguments)


class Spy:
    """A kernel whose launches say what addresses they were given."""

    arg_names = ("a", "b", "c")
    signature = inspect.signature(lambda a, b, c=7: None)
    function, packed_metadata = "function", None

    def __init__(self):
        self.seen = []
        self.run = Launcher(self.launch)

    def launch(self, x, y, z, stream, function, *arguments):
        assert function == self.function
        found = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in arguments]
        self.seen.append(((x, y, z), found, stream))

    def __getitem__(self, grid):
        def run(*args, **options):
            self.launch(*(*grid, 1, 1)[:3], None, self.function, *args, *options.values())
            return self

        return run


def launches_without_driver(written, places, device):
    return LaunchesWithoutDriver(written, places, device) if all(map(driver_launch.is_plain, written)) else None


@pytest.fixture
def on_any_device(monkeypatch):
    monkeypatch.setattr(replay, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(replay, "current_stream", lambda device: 5)
    monkeypatch.setattr(replay, "driver_launches", launches_without_driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(replay, "_known", {})


@pytest.fixture
def spy():
    return Spy()


def launches_of(spy, step, *arguments):
    spy.seen.clear()
    replay.repeated(step, *arguments)
    return list(spy.seen)


def test_the_third_call_launches_what_was_written_down_at_its_own_addresses(on_any_device, spy):
    kernel, calls = replay.Kernel(spy), []

    def step(x, pair):
        calls.append(1)
        kernel[(3,)](x[1:], pair[0], c=4)
        kernel[(3, 2)](pair[1].view(-1), 9)
        return "result"

    for expected_calls in (1, 2, 2, 2):
        x, y = torch.zeros(4), torch.zeros(2, 3)
        seen = launches_of(spy, step, x, (y, y.new_zeros(6)))
        assert len(calls) == expected_calls
        assert [addresses[0] for _, addresses, _ in seen][0] == x.data_ptr() + 4
        assert seen[0][1][1] == y.data_ptr()
    assert [(grid, stream) for grid, _, stream in seen] == [((3, 1, 1), 5), ((3, 2, 1), 5)]
    assert seen[0][1][2] == 4 and seen[1][1][1:] == [9, 7]
    assert replay.repeated(step, x, (y, y.new_zeros(6))) == "result"


def test_calls_with_more_results_of_their_own_are_another_kind(on_any_device, spy):
    """An operator's results, and those of one like it that writes to an argument in place of the last."""
    kernel = replay.Kernel(spy)

    def step(x, *results):
        kernel[(1,)](results[-1] if len(results) > 1 else x, 0)

    x = torch.zeros(4)
    for _ in range(4):
        loss, grad = torch.zeros(1), torch.zeros(4)
        for results, written in (((loss, grad), grad), ((loss,), x)):
            spy.seen.clear()
            replay.repeated(step, x, fresh=results)
            ((_, (address, *_), _),) = spy.seen
            assert address == written.data_ptr()
    assert [type(known) for known in replay._known.values()] == [replay.Replay] * 2


def test_memory_in_use_together_is_apart_and_other_memory_is_shared(on_any_device, spy):
    kernel = replay.Kernel(spy)

    def step(x):
        first, second = x.new_empty(1000), x.new_empty(3000)
        kernel[(1,)](x, first)
        kernel[(1,)](first, second)
        kernel[(1,)](second, x.new_empty(900))

    x = torch.zeros(4)
    for _ in range(3):
        seen = launches_of(spy, step, x)
    (known,) = replay._known.values()
    (_, (_, first, _), _), (_, (_, second, _), _), (_, (_, third, _), _) = seen
    assert {abs(first - second) >= 4000, abs(second - third) >= 3600} == {True}
    assert first == third and sum(known.blocks) < 4 * (1000 + 3000 + 900)


def test_large_memory_is_allocated_in_the_sizes_of_the_step(on_any_device, spy):
    kernel, number = replay.Kernel(spy), replay.LARGE // 4

    def step(x):
        first = x.new_empty(3 * number)
        kernel[(1,)](x, first)
        for size in (number, 2 * number, 100):  # one after another
            kernel[(1,)](first, x.new_empty(size))

    for _ in range(3):
        replay.repeated(step, torch.zeros(4))
    (known,) = replay._known.values()
    assert known.blocks == [12 * number, 8 * number, 400]


def other_work(kernel, x):
    kernel[(1,)](x + 1, x)


def host_read(kernel, x):
    kernel[(1,)](x, int(x[0]))


@pytest.mark.parametrize("step", [other_work, host_read])
def test_a_step_that_does_more_than_launch_is_run_as_it_is_written(on_any_device, spy, step):
    kernel, x = replay.Kernel(spy), torch.zeros(4)
    calls = []

    def counted(x):
        calls.append(1)
        step(kernel, x)

    for _ in range(4):
        replay.repeated(counted, x)
    assert len(calls) == 4 and list(replay._known.values()) == [replay.NOT_REPEATABLE]


@pytest.mark.parametrize("change", ["no launcher as we know it", "scratch memory", "clusters", "many launches"])
def test_what_cannot_be_prepared_is_run_as_it_is_written(on_any_device, spy, monkeypatch, change):
    kernel, x, calls = replay.Kernel(spy), torch.zeros(4), []
    if change == "no launcher as we know it":
        spy.run = None
    if change == "scratch memory":
        spy.run.global_scratch_size = 128
    if change == "clusters":
        spy.run.num_ctas = 2
    if change == "many launches":
        monkeypatch.setattr(replay, "LAUNCHES_AT_MOST", 1)

    def step(x):
        calls.append(1)
        kernel[(1,)](x, 1)
        kernel[(1,)](x, 2)

    for _ in range(4):
        assert len(launches_of(spy, step, x)) == 2
    assert len(calls) == 4 and list(replay._known.values()) == [replay.NOT_REPEATABLE]


def test_arguments_that_share_memory_are_not_repeated(on_any_device, spy):
    kernel, both = replay.Kernel(spy), torch.zeros(8)

    def step(x, y):
        kernel[(1,)](x, y)

    for _ in range(3):
        replay.repeated(step, both[:5], both[3:])
    assert list(replay._known.values()) == [replay.NOT_REPEATABLE]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x.double(), 1),
        lambda x: (torch.zeros(7, 4).T, 1),
        lambda x: (torch.zeros(29)[1:].view(4, 7), 1),  # another alignment
        lambda x: (x, 2),
        lambda x: (torch.zeros(4, 8), 1),
    ],
)
def test_another_kind_of_call_is_written_down_for_itself(on_any_device, spy, other):
    kernel, x = replay.Kernel(spy), torch.zeros(4, 7)

    def step(x, number):
        kernel[(1,)](x, number)

    for _ in range(3):
        replay.repeated(step, x, 1)
    y, number = other(x)
    for _ in range(3):
        ((_, found, _),) = launches_of(spy, step, y, number)
    assert len(replay._known) == 2 and found[:2] == [y.data_ptr(), number]


def test_launches_that_somebody_watches_are_not_repeated(on_any_device, spy, monkeypatch):
    kernel, calls = replay.Kernel(spy), []

    def step(x):
        calls.append(1)
        kernel[(1,)](x, 1)

    x = torch.zeros(4)
    for _ in range(3):
        replay.repeated(step, x)
    monkeypatch.setattr(replay.triton.knobs.runtime.launch_enter_hook, "calls", [print])
    replay.repeated(step, x)
    assert len(calls) == 3


@pytest.mark.parametrize("hook, watched", [(None, False), (print, True)])
def test_a_hook_may_be_no_chain(monkeypatch, hook, watched):
    monkeypatch.setattr(replay.triton.knobs.runtime, "launch_enter_hook", hook)
    assert replay.watched() is watched


def test_what_the_interpreter_runs_is_not_repeated(monkeypatch):
    tensor = SimpleNamespace(device=torch.device("cuda", 0))
    for interpret in (False, True):
        monkeypatch.setattr(replay.triton.knobs.runtime, "interpret", interpret)
        assert replay.on_gpu(tensor) is not interpret


def test_another_workspace_is_another_kind(on_any_device, spy):
    kernel, x = replay.Kernel(spy), torch.zeros(4)

    def step(x):
        kernel[(1,)](x, flce_ops.get_workspace() if hasattr(flce_ops, "get_workspace") else 0)

    for nbytes in (1 << 20, 2 << 20):
        with flce_ops.workspace(nbytes):
            replay.repeated(step, x)
    assert len(replay._known) == 2


def test_old_kinds_are_forgotten(on_any_device, spy, monkeypatch):
    monkeypatch.setattr(replay, "KINDS_AT_MOST", 3)
    kernel = replay.Kernel(spy)

    def step(x, number):
        kernel[(1,)](x, number)

    for number in (1, 2, 3, 1, 4, 5):
        replay.repeated(step, torch.zeros(4), number)
    assert [kind[-1] for kind in replay._known] == [1, 4, 5]


def test_threads_forget_old_kinds_together(on_any_device, monkeypatch):
    monkeypatch.setattr(replay, "KINDS_AT_MOST", 2)
    x, errors, interval = torch.zeros(4), [], sys.getswitchinterval()

    def calls(thread):
        try:
            for number in range(3000):
                replay.repeated(lambda *_: None, x, thread, number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(thread,)) for thread in range(6)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_what_is_private_to_triton_is_there():
    """The launcher is called as Triton calls it, and says what a launch is beside its function and parameters."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    jit = pytest.importorskip("triton.runtime.jit")
    called_with = "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
    assert called_with in inspect.getsource(jit.JITFunction.run)
    made = inspect.getsource(driver.CudaLauncher.__init__)
    assert all(f"self.{name} = " in made for name in driver_launch.PLAIN)
    for hook in (replay.triton.knobs.runtime.launch_enter_hook, replay.triton.knobs.runtime.launch_exit_hook):
        assert hook.calls == []


class Driver:
    """Of the functions of libcuda: launches are written down, a tensor map holds its address in its first word."""

    def __init__(self):
        self.launched = []

    def cuCtxGetCurrent(self, context):
        context._obj.value = 1
        return 0

    def cuTensorMapReplaceAddress(self, tensor_map, cell):
        ctypes.memmove(tensor_map, ctypes.addressof(cell), 8)
        return 0

    def cuLaunchKernel(self, function, *call):
        *numbers, stream, parameters, extra = call
        found = [ctypes.string_at(pointer, 8) for pointer in parameters]
        self.launched.append((function.value, [n.value for n in numbers], stream.value, found))
        return 0 if stream.value else 719


def eight_bytes(number):
    return number.to_bytes(8, "little")


def test_a_driver_launch_takes_new_addresses_and_keeps_its_other_parameters(monkeypatch):
    fake, place, base = Driver(), replay.Place(), replay.Place()
    monkeypatch.setattr(driver_launch, "driver", lambda: fake)
    node = driver_launch.KernelNodeParams(function=77, grid=(2, 3, 4), block=(128, 1, 1), shared_bytes=99)
    launches, places = driver_launch.DriverLaunches(0), {4096: place, 8192: base}
    tensor_map = eight_bytes(8192) + bytes(range(120))
    parameters = [eight_bytes(4096), eight_bytes(4097), tensor_map, (5).to_bytes(4, "little")]
    assert launches.add(node, parameters, places) and launches.add(node, [tensor_map], places)
    assert len(launches.maps) == 1  # both launches read one
    for address in (640, 1280):
        place.cell.value, base.cell.value = address, address + 64
        launches.run(5)
        (function, numbers, stream, found), (*_, of_map) = fake.launched[-2:]
        assert (function, numbers, stream) == (77, [2, 3, 4, 128, 1, 1, 99], 5)
        assert found[:3] == [eight_bytes(address), eight_bytes(4097), eight_bytes(address + 64)]
        assert found[3][:4] == (5).to_bytes(4, "little") and of_map == [eight_bytes(address + 64)]
    with pytest.raises(RuntimeError, match="CUresult 719"):
        launches.run(0)


class GraphDriver(Driver):
    """A graph is what was launched on a stream that captures; 3 is the capture stream of these tests."""

    def __init__(self):
        super().__init__()
        self.graphs, self.destroyed = [], []

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert stream.value == 3 and mode == driver_launch.RELAXED
        self.outside, self.launched = self.launched, []
        return 0

    def cuStreamEndCapture(self, stream, graph):
        self.graphs.append(self.launched)
        self.launched, graph._obj.value = self.outside, len(self.graphs)
        return 0

    def cuGraphInstantiateWithFlags(self, instance, graph, flags):
        instance._obj.value = graph.value
        return 0

    def cuGraphLaunch(self, instance, stream):
        self.launched.append((stream.value, self.graphs[instance.value - 1]))
        return 0

    def cuGraphDestroy(self, graph):
        return 0

    def cuGraphExecDestroy(self, instance):
        self.destroyed.append(instance.value)
        return 0


def test_launches_at_addresses_that_come_again_are_one_graph(monkeypatch):
    fake, place, capturing = GraphDriver(), replay.Place(), False
    for module in (driver_launch, launch_graphs):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(launch_graphs, "capture_stream", lambda device: SimpleNamespace(cuda_stream=3))
    monkeypatch.setattr(launch_graphs, "_graphs", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    launches = driver_launch.DriverLaunches(0)
    node = driver_launch.KernelNodeParams(function=77, grid=(2, 3, 4), block=(128, 1, 1), shared_bytes=99)
    for _ in range(launch_graphs.LAUNCHES_AT_LEAST):
        launches.add(node, [eight_bytes(4096)], {4096: place})
    graphs = launch_graphs.LaunchGraphs(launches)

    def call(address):
        """As Replay.run; the addresses that kernels then ran with, and how many launches it took."""
        fake.launched.clear()
        if not graphs.run(address, 5):
            place.cell.value = address
            launches.run(5)
            graphs.add(address)
        if len(fake.launched) == 1:
            ((stream, kernels),) = fake.launched
            assert stream == 5 and all(on == 3 for *_, on, _ in kernels)
        else:
            kernels = fake.launched
        assert len(kernels) == launch_graphs.LAUNCHES_AT_LEAST
        return {int.from_bytes(found, "little") for *_, (found,) in kernels}, len(fake.launched)

    several = launch_graphs.LAUNCHES_AT_LEAST
    for address, times in ((640, several), (1280, several), (640, several), (640, 1), (1280, several), (1280, 1)):
        assert call(address) == ({address}, times)
    capturing = True  # the graph of another: nothing but kernels goes into it
    assert call(640) == ({640}, several) and call(99) == ({99}, several) and 99 not in graphs.known
    capturing = False
    for address in range(2048, 2048 + launch_graphs.ADDRESSES_AT_MOST):
        call(address)
    assert len(graphs.known) == launch_graphs.ADDRESSES_AT_MOST and sorted(fake.destroyed) == [1, 2]


def test_graphs_that_nobody_used_make_room_for_others(monkeypatch):
    """Of other kinds, too; while all are in use there are no more."""
    fake, now = GraphDriver(), [0.0]
    for module in (driver_launch, launch_graphs):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(launch_graphs, "capture_stream", lambda device: SimpleNamespace(cuda_stream=3))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch_graphs, "_graphs", [])
    monkeypatch.setattr(launch_graphs, "GRAPHS_AT_MOST", 2)
    monkeypatch.setattr(launch_graphs, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def kind():
        launches = driver_launch.DriverLaunches(0)
        for _ in range(launch_graphs.LAUNCHES_AT_LEAST):
            launches.add(driver_launch.KernelNodeParams(function=77), [], {})
        return launch_graphs.LaunchGraphs(launches)

    def has_graph(graphs):
        for _ in range(2):
            graphs.add(640)
        return graphs.run(640, 5)

    first, second, third = kind(), kind(), kind()
    assert has_graph(first) and has_graph(second) and not has_graph(third)
    now[0] += 2 * launch_graphs.IDLE_SECONDS
    assert has_graph(first) and has_graph(third) and not second.run(640, 5) and fake.destroyed == [2]
    assert first.run(640, 5) and len(launch_graphs._graphs) == 2
    now[0] += 2 * launch_graphs.IDLE_SECONDS
    monkeypatch.setattr(fake, "cuGraphInstantiateWithFlags", lambda *_: 900, raising=False)
    assert not has_graph(second) and not second.usable


def test_a_tensor_map_of_unknown_memory_is_not_repeated():
    launches = driver_launch.DriverLaunches(0)
    assert not launches.add(driver_launch.KernelNodeParams(), [bytes(128)], {4096: replay.Place()})


OPTIONS = {
    "plain": {},
    "bias, softcap": {"linear_bias": True, "softcap": 8.0},
    "z_loss, token_weight": {"z_loss": 1e-3, "token_weight": True},
    "class weights": {"weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "none": {"reduction": "none"},
}


def made(tokens, hidden, classes, dtype, options):
    """Operands of a call, with a third of the tokens ignored and one whose loss asks for the rescue."""
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
    """Two operators, whose arguments are alike; a mean and a sum are one with and without a denominator."""
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
    """Kinds that differ in their reduction alone, one after the other."""
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
