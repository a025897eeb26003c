"""Whether this package's numbers are as close to the truth as plain torch's.

    1.  error(ours) <= SLACK error(plain) + ROUNDINGS unit ||truth||                              most cases end here
    2.  error(ours) <= SLACK max over neighbours of error(plain) + ROUNDINGS unit ||truth||
        + ROUNDINGS_OF_TERMS (unit of the accumulation dtype) natural size
    3.  the median of error(ours) over the neighbours passes 2

One draw of plain torch's rounding is a poor yardstick: it may be exact by luck, or because a gradient cancels. So a
case that fails the first line is judged by two other measures. One is its neighbours: the same case with leaves moved
by 2^-11, or by a unit in the last place of half. (A smaller step would round 1 - p of a sure token the same way in all
neighbours.) The other is the natural size of a result, in units of the accumulation dtype: the size in other draws of
the case whose targets are not learnt.

float64 has no yardstick: it tests formulas, and float32 tests rounding.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

import flce_ops
import flce_ops.aten.chunks
import flce_ops.support.workspace as budgets
from tests.fuzz.cases import Case
from tests.fuzz.consistent import consistent
from tests.fuzz.exact import Failure, check_constants, pattern
from tests.fuzz.oracle import product
from tests.fuzz.problem import Problem, Tensors
from tests.fuzz.run import run_oracle, run_ours

# This package's result is one more draw of nearly the same distribution, with sums in another order and a rounding or
# two more or fewer.
SLACK = 3.0
# A result is rounded once, and its terms once or twice before they are added up.
ROUNDINGS = 4.0
ROUNDINGS_FLOAT64 = 2.0**22  # 5e-10: logits of 2000 and sums of hundreds of products that nearly cancel, in any order
# A term that cancels is the result of about ten operations in the accumulation dtype.
ROUNDINGS_OF_TERMS = 16.0
NEIGHBOURS = 8
NATURAL_DRAWS = 2
ROWS_OF_SHORT_CHUNKS = 4
ROWS_OF_SHORT_TRITON_CHUNKS = 16  # the smallest number of rows that tl.dot takes


@dataclass(frozen=True)
class Verdict:
    failures: list[Failure] = field(default_factory=list)
    refused: bool = False  # by name, as documented
    second_line: bool = False  # whether the neighbours were computed


def examine(case: Case, device: str) -> Verdict:
    problem = Problem(case, device)
    try:
        with surroundings(case, device):
            found = run_ours(problem)
    except torch.AcceleratorError:  # nothing runs on this device any more
        raise
    except Exception as error:
        if refusal_is_documented(case, error):
            return Verdict(refused=True)
        message = str(error).strip().splitlines() or [""]
        return Verdict([Failure("raises", f"{type(error).__name__}: {message[0][:160]}")])
    if case.mode == "forward_mode":
        # factors of the losses, applied by ordinary ATen
        factors = set(problem.wanted) <= {"token_weight", "normalizer"}
        return Verdict([] if factors else [Failure("forward mode", "not refused")])
    plain, truth = run_oracle(problem), run_oracle(problem, torch.float64)
    found, plain, truth = on_the_host(found, plain, truth)
    failures = list(check_constants(problem, found, plain, truth))
    suspects = []
    for name in truth:
        if name == "logits":
            continue
        if name not in found:
            failures.append(Failure(name, "missing"))
        elif found[name].shape != truth[name].shape:
            failures.append(Failure(name, f"shape {tuple(found[name].shape)} for {tuple(truth[name].shape)}"))
        else:
            odd = pattern(problem, name, found[name], plain[name], truth[name])
            if odd:
                failures.append(Failure(name, odd))
            elif not near(found[name], plain[name], truth[name], problem.dtype):
                suspects.append(name)
    if suspects:
        failures += second_line(problem, suspects, found, plain, truth)
    return Verdict(failures, second_line=bool(suspects))


@contextmanager
def surroundings(case: Case, device: str) -> Iterator[None]:
    with ExitStack() as stack:
        if case.workspace:
            stack.enter_context(flce_ops.workspace(case.workspace))
        for target, name, value in constants_of_chunking(case, device):
            stack.enter_context(patch.object(target, name, value))
        if case.uninitialized:
            torch.use_deterministic_algorithms(True, warn_only=True)
            stack.callback(torch.use_deterministic_algorithms, False)
        yield


def constants_of_chunking(case: Case, device: str) -> list[tuple[object, str, int]]:
    """Changes constants so that a few tokens take the paths of many."""
    found: list[tuple[object, str, int]] = []
    if case.short_chunks and device != "cuda":  # on CUDA, cuBLAS sums products of few rows in half
        found.append((flce_ops.aten.chunks, "CPU_ROWS_AT_LEAST", ROWS_OF_SHORT_CHUNKS))
    if device == "cpu":
        return found
    from flce_ops.triton.steps import chunks, forward, gradients

    chunks.best_chunking.cache_clear()  # of what was cached with other constants
    if case.short_chunks:
        found += [(module, "MULTIPLE", ROWS_OF_SHORT_TRITON_CHUNKS) for module in (chunks, forward, gradients)]
        found.append((budgets, "LEAST_ROWS", ROWS_OF_SHORT_TRITON_CHUNKS))
    return found


def refusal_is_documented(case: Case, error: Exception) -> bool:
    text = str(error)
    if case.learnt and isinstance(error, NotImplementedError | TypeError) and case.learnt in text:
        return True
    if not isinstance(error, NotImplementedError):
        return False
    if case.mesh and "DTensor" in text:
        return True
    higher = case.mode in ("create_graph", "create_graph_once", "func_twice", "hvp", "third")
    return (
        (case.mode == "forward_mode" and "forward-mode" in text)
        or (case.mode == "vmap" and "vmap over an empty batch" in text)
        or (higher and case.function == "kl_div" and "second derivatives are not implemented" in text)
        or (higher and case.function == "given_logits" and "second derivatives of a scalar loss" in text)
    )


def on_the_host(*results: Tensors) -> list[Tensors]:
    """Copies all of them at once; the host waits for the device only here."""
    tensors = [tensor for result in results for tensor in result.values()]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(results)
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu()
    pieces = iter(flat.split([tensor.numel() for tensor in tensors]))
    return [{name: next(pieces).view(t.shape).to(t.dtype) for name, t in result.items()} for result in results]


# --- what is rounded ---


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def smallest(tensor: Tensor, dtype: torch.dtype) -> float:
    """The norm of what is lost to underflow in the results."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * math.sqrt(max(tensor.numel(), 1))


def norm(tensor: Tensor) -> float:
    return float(tensor.double().nan_to_num(0.0, 0.0, 0.0).norm())


def error_of(found: Tensor, truth: Tensor) -> float:
    """The error over entries that are finite in both; `pattern` checks the others."""
    return norm(found.double() - truth)


def roundings(dtype: torch.dtype) -> float:
    return ROUNDINGS_FLOAT64 if dtype == torch.float64 else ROUNDINGS


def near(found: Tensor, plain: Tensor, truth: Tensor, dtype: torch.dtype) -> bool:
    """The first line of the criterion above."""
    allowed = SLACK * error_of(plain, truth) + roundings(dtype) * unit(found.dtype) * norm(truth)
    return error_of(found, truth) <= allowed + smallest(found, found.dtype)


def second_line(
    problem: Problem, names: list[str], found: Tensors, plain: Tensors, truth: Tensors
) -> Iterator[Failure]:
    neighbours = [moved(problem, k) for k in range(NEIGHBOURS)]
    exact = on_the_host(*(run_oracle(neighbour, torch.float64) for neighbour in neighbours))
    theirs = on_the_host(*(run_oracle(neighbour) for neighbour in neighbours))
    natural = natural_sizes(problem)

    def allowed(name: str) -> float:
        yardstick = max(error_of(a[name], b[name]) for a, b in zip([plain, *theirs], [truth, *exact]))
        own, fine = found[name].dtype, torch.promote_types(problem.dtype, torch.float32)
        size = natural.get(name, 0.0) * math.sqrt(truth[name].numel())
        rounding = roundings(problem.dtype) * unit(own) * norm(truth[name])
        rounding += max(roundings(problem.dtype), ROUNDINGS_OF_TERMS) * unit(fine) * size * rounding_of_logits(problem)
        if any((b[name].isfinite() & ~a[name].isfinite()).any() for a, b in zip([plain, *theirs], [truth, *exact])):
            # plain torch's sum overflows its dtype, so it is no yardstick
            rounding += ROUNDINGS * unit(problem.arithmetic_dtype()) * (norm(truth[name]) + size)
        if name in ("entropy", "metric entropy"):  # documented: a difference of two numbers near lse
            lse = truth["lse"] if "lse" in truth else truth["logits"].logsumexp(-1)
            rounding += ROUNDINGS * unit(fine) * norm(lse)
        if name == "main_grad" and problem.case.D <= 16:  # BLAS adds products of tiny matrices to the buffer one by one
            rounding += problem.case.count * unit(fine) * norm(truth[name])
        if name == "tail":  # documented: it ends at the dtype's eps
            rounding += 2.0 * unit(fine) * math.sqrt(truth[name].numel())
        case = problem.case
        # plain torch's logits are the biases, or 0, exactly
        exact_logits = case.data == "tiny" and case.bias or case.logit_scale == 0.0
        if exact_logits and on_triton(problem):
            if case.function == "kl_div":  # documented: stored ones are within 2^-12 of their distance
                rounding += 2.0**-10 * norm(truth[name])
            if "learnt" in name:  # documented: a sum of entries of G, each rounded by up to 2^-9 of itself
                rounding += 2.0**-8 * size
        if case.function == "kl_div" and case.softcap and on_triton(problem):
            # documented: stored logits are within 2^-12 of their distance from the largest, here before the cap
            rounding += 2.0**-11 * spread_in_caps(problem) * norm(truth[name])
        if problem.case.softcap and on_triton(problem):  # 1 - tanh^2 is 2^-124 there where it is less
            rounding += 2.0**-112 * math.sqrt(truth[name].numel())
        return SLACK * yardstick + rounding + smallest(found[name], problem.arithmetic_dtype())

    bounds = {name: allowed(name) for name in names}
    suspects = [name for name in names if error_of(found[name], truth[name]) > bounds[name]]
    if not suspects:
        return
    with surroundings(problem.case, problem.device):
        again = on_the_host(*(run_ours(neighbour) for neighbour in neighbours))
    for name in suspects:
        error = median(error_of(a[name], b[name]) for a, b in zip([found, *again], [truth, *exact]))
        if error > bounds[name]:
            yield Failure(
                name, f"error {error / max(norm(truth[name]), 1e-300):.1e}", error / max(bounds[name], 1e-300)
            )


def on_triton(problem: Problem) -> bool:
    """In the interpreter float32 stands in for bfloat16. Given logits take the kernels in float32, too."""
    of_kernels = [torch.bfloat16, torch.float16] + [torch.float32] * (problem.case.function == "given_logits")
    return problem.device == "interpreter" or (problem.device == "cuda" and problem.arithmetic_dtype() in of_kernels)


def spread_in_caps(problem: Problem) -> float:
    """The largest difference of two logits of a token before the softcap, in softcaps."""
    logits = product(problem.arguments(problem.leaves(torch.float64))).detach()
    scaled = problem.case.logit_scale * torch.where(logits.isfinite(), logits, 0.0)
    return float((scaled.amax(-1) - scaled.amin(-1)).max()) / problem.case.softcap


def rounding_of_logits(problem: Problem) -> float:
    """The difference, in units, of the Triton kernels' logits: the target's logit comes from its own dot product.

    In nats it is one float32 unit of the logits' size. Plain torch's logits of half operands are off by thousands of
    such units. Documented: backward's logits differ from forward's, too, if a hook returned another layout.
    """
    sizes = {"large": 100.0, "huge": 2000.0, "shifted": 1000.0}
    differ = on_triton(problem) or problem.case.mode == "saved_tensor_hooks"
    return sizes.get(problem.case.data, 30.0) if differ else 1.0


def natural_sizes(problem: Problem) -> dict[str, float]:
    """The root mean square of every result in ordinary draws, whose targets are not learnt and whose rows differ.

    If all draws of the data are saturated, second derivatives vanish in all of them, and float64 is no better than this
    package. For these, one draw has logits of the usual size.
    """
    sizes: dict[str, float] = {}
    unsaturated = problem.dtype == torch.float64 or on_triton(problem)
    for case in ordinary_draws(problem.case):
        usual = case.data != problem.case.data
        (exact,) = on_the_host(run_oracle(Problem(case, problem.device), torch.float64))
        for name, tensor in exact.items():
            finite = tensor[tensor.isfinite()]
            if finite.numel() and (not usual or unsaturated or name.startswith("second")):
                sizes[name] = max(sizes.get(name, 0.0), float(finite.norm()) / math.sqrt(finite.numel()))
    return sizes


def ordinary_draws(case: Case) -> Iterator[Case]:
    usual = "randn" if case.data == "zipf" else "zipf"
    for k, data in enumerate((*(case.data,) * NATURAL_DRAWS, usual)):
        ordinary = replace(
            case,
            seed=case.seed + 1 + k,
            V=max(case.V, 5),
            data=data,
            bias="normal" if case.bias == "large" and data == usual else case.bias,
            targets="uniform",
            ignored=0.0,
            cotangent="normal",
            token_weight="uniform" if case.token_weight == "some zero" else case.token_weight,
            logit_scale=case.logit_scale or 1.0,
            input_layout="rows",
            weight_layout="rows",
            vector_layout="rows",
            views=(),
            teacher="hidden" if case.teacher in ("near", "student") else case.teacher,
            # a sure student has no gradient of "tv" and "nla", but their terms q (K - 1/2) at p = q are rounded
            kind="forward" if case.teacher == "student" and case.kind in ("tv", "nla") else case.kind,
            # token weights made from losses are near 0 for uniform targets, whose losses are large
            relations=tuple(name for name in case.relations if name != "token_weight of losses"),
        )
        yield consistent(ordinary)


def moved(problem: Problem, k: int) -> Problem:
    """The problem with its numbers changed slightly: each k gives another draw of the roundings."""
    generator = torch.Generator().manual_seed(k)
    bases = {}
    for name, base in problem.bases.items():
        if base.is_floating_point() and " of " not in name:
            signs = torch.randint(-1, 2, base.shape, generator=generator).to(base.device)
            eps = max(torch.finfo(problem.arithmetic_dtype()).eps, 2.0**-11)
            base = torch.empty_like(base).copy_(base.double() * (1.0 + eps * signs))
        bases[name] = base
    return problem.with_bases(bases)
