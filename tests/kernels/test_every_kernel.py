"""Every kernel once, in Triton's interpreter, against float64: what `make triton-versions` runs under the oldest and
the newest Triton. The sizes are small, and the numbers are always the same.
"""

import importlib
import pkgutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from interpreter import let_tensor_maps_add
from marks import IN_INTERPRETER
from reference_policy import function_of_policy

pytest.importorskip("triton")

import flce_ops.triton
from flce_ops import workspace
from flce_ops.ops import OPERATORS
from flce_ops.ops.paths import KERNELS, function
from flce_ops.triton import launch_scale_in_place
from flce_ops.triton.gemm import tiles
from flce_ops.triton.gemm.tiles import INPUT_TILES, LIVE, WEIGHT_TILES
from flce_ops.triton.kernel import Kernel

pytestmark = IN_INTERPRETER

IN_TRITON, IN_ATEN = 0, 1  # places in the table of paths
N, D, V = 37, 35, 131  # tiles are 32x128x32, so the last of each is a partial one
EVERY = {"output_mask": [True, True, True]}
SPARSE = {"gradient_threshold": 0.004, "gradient_mode": "drop"}


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def head(tokens: int = N, hidden: int = D, vocab: int = V, *, scale: float = 1.0, **options):
    """The operands of an operator on hidden states."""
    target = torch.arange(tokens) * 7 % vocab
    target[::5] = -100
    given = {"input": scale * random(tokens, hidden, seed=0), "linear_weight": random(vocab, hidden, seed=1)}
    return given | {"target": target, "linear_bias": random(vocab, seed=2)} | options


def row_scale(tokens: int = N) -> torch.Tensor:
    return random(tokens, seed=3).abs()


def several_classes() -> dict:
    target = torch.stack([torch.arange(N) * 7 % V, torch.arange(N) * 5 % V, torch.full((N,), -100)], 1)
    return {"target": target, "target_weight": random(N, 3, seed=4).softmax(1)}


def of_logits(**options):
    """Given logits: there is no head."""
    given = {"input": 3 * random(N, V, seed=5), "linear_weight": None, "target": head()["target"]}
    return given | options


def models(**options):
    given = head()
    teacher = {"teacher_input": random(N, D, seed=6), "teacher_weight": random(V, D, seed=7), "teacher_bias": None}
    student = {name: given[name] for name in ("input", "linear_weight", "linear_bias")}
    return student | teacher | {"teacher_probs": None, "valid": given["target"] >= 0} | options


POLICY = function_of_policy(
    {"input": torch.empty(0), "advantages": random(N, seed=8), "old_log_probs": -5 + random(N, seed=9)}, clip_high=0.3
)
OF_POLICY = dict(zip(("function", "tensors"), POLICY))
# operator, its arguments, bytes of workspace: a few make several chunks
CALLS = {
    "loss": ("linear_cross_entropy_with_grad", head(row_scale=row_scale(), lse=True, entropy=True, **EVERY)),
    "loss in chunks": ("linear_cross_entropy_with_grad", head(200, row_scale=row_scale(200), argmax=True, **EVERY), 1),
    "large logits": ("linear_cross_entropy_with_grad", head(scale=50.0, row_scale=row_scale(), **EVERY)),
    "smoothed": ("linear_cross_entropy_with_grad", head(row_scale=row_scale(), label_smoothing=0.1, **EVERY)),
    "soft targets": ("linear_cross_entropy_with_grad", head(row_scale=row_scale(), **several_classes(), **EVERY)),
    "sparse": ("linear_cross_entropy_with_grad", head(row_scale=row_scale(), **SPARSE, **EVERY)),
    "policy": ("linear_cross_entropy_with_grad", head(row_scale=row_scale(), **OF_POLICY, **EVERY)),
    "divergence": ("linear_kl_div_with_grad", models(row_scale=row_scale(), kind="reverse", **EVERY)),
    "given logits": ("linear_cross_entropy_with_grad", of_logits(row_scale=row_scale(), **EVERY)),
}


def exact(path: int, value):
    floats = path == IN_ATEN and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floats else value


def run(path: int, name: str, arguments: dict, nbytes: int = 512 << 20) -> dict[str, torch.Tensor]:
    """The operator's results by name: of its Triton kernels, or of ATen in float64."""
    operator, given_logits = OPERATORS[name].arguments, arguments["linear_weight"] is None
    values: dict = {key: None for key in ("row_scale", "denominator", "linear_bias", "weight") if key in operator.index}
    for key, value in arguments.items():
        values[key] = [exact(path, element) for element in value] if key == "tensors" else exact(path, value)
    with workspace(nbytes):
        table = KERNELS[name.removeprefix("linear_") if given_logits else name]
        made = function(table[path].kernel)(operator.bind(**values))
    return dict(zip((result.name for result in operator.results), made if isinstance(made, tuple) else (made,)))


def assert_close(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], tolerance: float = 4e-6) -> None:
    for name, ours in found.items():
        if ours.numel() and name != "retained":  # in the kernels' format
            truth = exact[name].double()
            if name.endswith("lse_pair"):  # each path chooses the reference
                ours, truth = ours.double().sum(1), truth.sum(1)
            assert ours.shape == truth.shape, name
            error, largest = (ours.double() - truth).abs().max(), truth.abs().max()
            assert error <= tolerance * largest, f"{name}: {error / largest:.2e}"


def check_step(case: str) -> None:
    assert_close(run(IN_TRITON, *CALLS[case]), run(IN_ATEN, *CALLS[case]))


def forward_and_backward(path: int, name: str, given: dict, asked: dict, kept: dict[str, str], **cotangents):
    """Results of a forward operator, then the gradients. `kept` maps arguments of backward to results of forward."""
    found = run(path, f"{name}_forward", given | asked)
    backward = EVERY | given | {argument: found[result] for argument, result in kept.items()} | cotangents
    return found, run(path, f"{name}_backward", backward)


FACTORS = {"grad_target_logit": random(N, seed=10), "grad_lse": random(N, seed=11)}
STATISTICS = {"logit_sum": True, "expected_log_prob": True, "argmax": True, "log_sum_sq_probs": True}
OF_STATISTICS = {"grad_logit_sum": 0.01 * random(N, seed=12), "grad_expected_log_prob": random(N, seed=13)}
KEPT = {"lse_pair": "lse_pair"}
PAIRS = {
    "log-probabilities": ("linear_cross_entropy", head(), {}, KEPT, FACTORS | {"grad_logit_sum": None}),
    "statistics": (
        *("linear_cross_entropy", head(), STATISTICS, KEPT | {"expected_log_prob": "expected_log_prob"}),
        FACTORS | OF_STATISTICS,
    ),
    "saved logits": (
        *("linear_cross_entropy", head(), {"retain": N}, KEPT | {"retained": "retained"}),
        FACTORS | {"grad_logit_sum": None},
    ),
    "divergence": (
        *("linear_kl_div", models(kind="reverse"), {}),
        KEPT | {"teacher_lse_pair": "teacher_lse_pair", "student_kl": "student_kl"},
        {"grad": row_scale()},
    ),
    "given logits": ("linear_cross_entropy", of_logits(), {}, KEPT, FACTORS | {"grad_logit_sum": None}),
}


def check_forward_and_backward(case: str) -> None:
    *call, cotangents = PAIRS[case]
    found, exact = (forward_and_backward(path, *call, **cotangents) for path in (IN_TRITON, IN_ATEN))
    assert_close(found[0], exact[0])
    assert_close(found[1], exact[1], 2e-4 if case == "saved logits" else 4e-6)  # steps of 2^-10 in the logits


def check_overflow_by_tensor_maps(monkeypatch) -> None:
    """The float16 sum of the weight gradient has the first chunk's exponents; later chunks are larger."""
    let_tensor_maps_add(monkeypatch)
    monkeypatch.setattr(tiles, "INTERPRETER", replace(tiles.INTERPRETER, tma=True))
    for table in (INPUT_TILES, WEIGHT_TILES):
        monkeypatch.setitem(table, "interpreter", replace(table["interpreter"], tma=True))
    factor = row_scale(384)
    factor[:128] *= 1e-6
    given = head(384, 72, 264, scale=0.1, row_scale=factor, **EVERY)
    for name in ("input", "linear_weight", "linear_bias"):
        given[name] = given[name].half()
    call = "linear_cross_entropy_with_grad", given, 1
    assert_close(run(IN_TRITON, *call), run(IN_ATEN, *call), 1e-3)


def check_dense_classes_of_a_sparse_step(monkeypatch) -> None:
    monkeypatch.setattr("flce_ops.triton.sparse.sparse_or_dense.CLASSES_PER_ENTRY", 500)
    monkeypatch.setattr("flce_ops.triton.sparse.sparse_or_dense.LISTS_COST", 0)
    given = head(row_scale=row_scale(), **EVERY)
    name, sparse = "linear_cross_entropy_with_grad", {"gradient_threshold": 0.5, "gradient_seed": torch.tensor(1)}
    found, exact = run(IN_TRITON, name, given | sparse), run(IN_ATEN, name, given)
    dense = slice(0, LIVE.value)
    assert_close(*({"rows": made["grad_linear_weight"][dense]} for made in (found, exact)))


def check_grad_output() -> None:
    grads = [random(N, D, seed=14), random(V, seed=15)]
    expected = [3 * grad for grad in grads]
    launch_scale_in_place(grads, torch.tensor(3.0))
    assert all(map(torch.equal, grads, expected))


def kernels_of_the_package() -> set[str]:
    found: set[str] = set()
    for module in pkgutil.walk_packages(flce_ops.triton.__path__, "flce_ops.triton."):
        members = vars(importlib.import_module(module.name)).values()
        found |= {member.__name__ for member in members if isinstance(member, Kernel)}
    return found


def test_every_kernel_agrees_with_float64(monkeypatch):
    """One test, so that no selection of tests leaves a kernel out."""
    launched, launch = set(), Kernel.__getitem__

    def note(kernel, grid):
        launched.add(kernel.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(Kernel, "__getitem__", note)
    checks = [partial(check_step, case) for case in CALLS]
    checks += [partial(check_forward_and_backward, case) for case in PAIRS]
    for check in (*checks, check_grad_output):
        check()
    for check_with in (check_overflow_by_tensor_maps, check_dense_classes_of_a_sparse_step):
        with monkeypatch.context() as changed:
            check_with(changed)
    assert kernels_of_the_package() - launched == set()
