"""Every option with every source, objective, sink and layout gives the dense formula's result, or is refused by name.

source       a head; given logits
objective    one class, K classes, class probabilities, log-probabilities, policies, divergences
sink         gradients made in forward, or in backward (reduction="none"); main_grad; over the logits; sparse
layout       one process; tokens sharded; vocabulary sharded

The test takes options, and values to try, from the signatures, and the shapes of tensors from the comments beside them.
So a new option is tested without a line here: it must change the result or be refused. Until dense() knows the option,
the gradients are compared with differences of the loss. The cases run in float64 in ATen.
tests/kernels/test_triton_*.py test the kernels, other files the other dtypes.
"""

# N tokens, K classes, D and E hidden, V vocabulary

import inspect
import itertools
import re
import types
from typing import Literal, get_args, get_origin

import pytest
import torch
import torch.distributed as dist
from process_pool import run_in_world
from reference_divergence import KINDS, from_definition
from reference_loss import dense_logits, error
from reference_policy import token_losses
from sharded_inputs import full
from test_refusals import FEATURES
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flce_ops
from flce_ops.entry.bodies import NAMES
from flce_ops.math.sparse_gradient import MODES, SparseGradient
from flce_ops.meta import arguments as schemas


def of_class(log_prob):
    return -((1 - log_prob.exp()) ** 2) * log_prob


def of_classes(log_prob):
    return -(log_prob.exp() * log_prob).sum(-1)


FUNCTIONS = {name: getattr(flce_ops, name) for name in flce_ops.__all__ if re.match("linear_|cross_", name)}
SIZES = {"...": (2, 5), "K": (3,), "D": (5,), "E": (6,), "V": (11,), "": ()}
SOURCES = inspect.getsource(schemas) + "".join(map(inspect.getsource, FUNCTIONS.values()))
SHAPES = dict(re.findall(r"^    (\w+): [^#\n]*Tensor[^#\n]*# \(([^)]*?),?\)", SOURCES, re.MULTILINE))
SHAPES |= {"topk": "..., K", "probabilities": "..., V"}  # shapes of other targets

# For each function and objective: the names of a call's tensors, and its other arguments.
HEAD, TEACHER = ("input", "linear_weight"), ("teacher_input", "teacher_weight")
TARGETS = {"one class": ("target",), "K classes": ("topk", "target_weight"), "probabilities": ("probabilities",)}
CELLS = {
    "linear_cross_entropy": {name: ((*HEAD, *target), {}) for name, target in TARGETS.items()},
    "cross_entropy": {name: (("logits", *target), {}) for name, target in TARGETS.items()},
    "linear_log_probs": {name: ((*HEAD, name), {}) for name in ("target", "topk")},
    "linear_token_loss": {
        "one class": ((*HEAD, "target"), {"function": flce_ops.token_loss(of_class)}),
        "K classes": ((*HEAD, "topk"), {"function": flce_ops.token_loss(of_classes)}),
    },
    "linear_policy_loss": {
        name: ((*HEAD, "target", "advantages", "old_log_probs"), {"objective": name}) for name in ("ppo", "cispo")
    },
    "linear_kl_div": {
        f"{kind} divergence, {teacher[0]}": ((*HEAD, *teacher, "target"), {"kind": kind})
        for kind in KINDS
        for teacher in (TEACHER, ("teacher_probs",))
    },
}
# no entry is below the threshold, so the gradient is exact
SPARSE = {"gradient_threshold": 1e-30, "gradient_seed": torch.tensor(7)}
SINKS = {
    "made in forward": {},
    "made in backward": {"reduction": "none"},
    "main_grad": {"main_grad": ...},
    "over the logits": {"inplace_backward": True},
    **{f"sparse, {mode}": SPARSE | {"gradient_mode": mode} for mode in MODES},
}
IN_AUTOGRAD, SAMPLED = ("made in forward", "made in backward"), tuple(f"sparse, {mode}" for mode in MODES)
REFUSED = {
    "linear_cross_entropy": {("probabilities", sink) for sink in ("main_grad", *SAMPLED)},
    "cross_entropy": {(name, s) for name in ("K classes", "probabilities") for s in (*IN_AUTOGRAD, "over the logits")},
}
ONCE = {  # cells, and options of other cells, whose second derivatives are refused
    "linear_cross_entropy": {
        *(("probabilities", sink) for sink in IN_AUTOGRAD),
        *itertools.product(("one class", "K classes"), ("main_grad", *SAMPLED)),
        *("main_grad", "gradient_threshold"),
    },
    "cross_entropy": {("one class", sink) for sink in ("made in forward", "over the logits")},
    "linear_log_probs": {*itertools.product(("target", "topk"), SAMPLED), "gradient_threshold"},
    "linear_policy_loss": {*itertools.product(("ppo", "cispo"), SAMPLED), "gradient_threshold"},
    "linear_kl_div": set(itertools.product(CELLS["linear_kl_div"], IN_AUTOGRAD)),
}
LEAVES = {"input", "linear_weight", "logits"}

# An option that only changes another option's term is tried together with that option.
LARGE = {"gradient_threshold": 0.1, "gradient_seed": torch.tensor(5)}
BESIDE = {
    **dict.fromkeys(("gradient_mode", "gradient_seed", "gradient_sparse", "gradient_class_order"), LARGE),
    "gradient_threshold": {"gradient_seed": torch.tensor(5)},
    "ref_log_probs": {"beta": 0.3},
    "kl_estimator": {"beta": 0.3, "ref_log_probs": ...},
    "beta": {"ref_log_probs": ...},
}
# These options are no term of the formula: they change what is returned, or where gradients go.
NO_TERM = {"return_metrics", "entropy", "argmax", "tail", "main_grad", "inplace_backward", "options"}
NO_TERM |= {"gradient_class_order", *SparseGradient._fields}
# Combinations that have no effect, as documented: (option, a word of the cell or of the sink).
INERT = {
    ("options", ""),  # chunk sizes for torch's own function
    ("inplace_backward", "made in backward"),
    ("inplace_backward", "sharded"),
    ("beta", "forward divergence"),  # only "jsd" has a mixture
    ("beta", "reverse divergence"),
    ("beta", "tv divergence"),
    ("beta", "nla divergence"),
    ("gradient_class_order", "drop"),
}


def made(call: dict) -> dict:
    return {name: tensor_of(name) if value is ... else value for name, value in call.items()}


def tensor_of(name: str) -> Tensor:
    """float64. Targets, permutations and distributions are valid; class and token weights are positive."""
    shape = sum((SIZES[size.strip()] for size in SHAPES.get(name, "").split(",")), ())
    if name in ("target", "topk"):
        target = torch.randint(SIZES["V"][0], shape)
        target[:, 1], target[:, 2], target[1, 3] = -100, 1, 7
        return target
    if name == "gradient_class_order":
        return torch.randperm(*shape)
    if name == "gradient_seed":
        return torch.tensor(11)
    made = torch.randn(shape, dtype=torch.float64)
    if name in ("probabilities", "teacher_probs"):
        return made.softmax(-1)
    if name == "linear_weight":
        return made / 2
    if name == "old_log_probs":  # ratios beyond each bound, for advantages of either sign
        return torch.tensor([-9.0, -9.0, -9.0, 0.0, 0.0]) + 0.1 * made
    if name == "advantages":
        return torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0]) * (made.abs() + 0.2)
    if name == "ref_log_probs":
        return 0.5 * made - 2.0
    return made if name in LEAVES else made.abs() + 0.2


def parameters(function) -> dict[str, tuple[object, object]]:
    """{name: (default, annotation)}"""
    found = inspect.signature(function).parameters.items()
    return {name: (p.default, p.annotation) for name, p in found if p.kind is not p.VAR_POSITIONAL}


def values(name: str, default: object, annotation: object) -> list:
    """Values other than the default, for each type that the option may have."""
    if name == "options":
        return [torch.nn.LinearCrossEntropyOptions()] if hasattr(torch.nn, "LinearCrossEntropyOptions") else []
    found: list = []
    for part in get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,):
        if get_origin(part) is Literal:
            found += [value for value in get_args(part) if value != default]
        elif part is bool:
            found.append(not default)
        elif part in (float, int):
            found.append(7 if part is int else 3.0 if default is None else default + 0.3)
        elif part is Tensor:
            found += [tensor_of(name), tensor_of(name)]
            if name == "temperature":  # one number, which may be learnt; one of each token is refused
                found.insert(0, torch.tensor(1.3).double().requires_grad_())
            if found[-1].is_floating_point():
                found[-1].requires_grad_()
        elif part is not types.NoneType:  # return_metrics' names
            found += [[metric] for metric in NAMES]
    return found


def dense(call: dict) -> tuple[dict[str, Tensor], set[str]]:
    """Returns results computed from all (..., V) logits, and the arguments that were not read."""
    left = dict(call)
    take = left.pop
    reduction, ignore_index = take("reduction", "mean"), take("ignore_index", -100)
    logit_options = {name: take(name, usual) for name, usual in (("softcap", None), ("temperature", 1.0))}
    scale, vocab = take("logit_scale", 1.0), take("vocab_size", None)
    weight = take("linear_weight", None)
    if weight is None:
        z = dense_logits(take("logits"), torch.eye(*2 * SIZES["V"]).double(), logit_scale=scale, **logit_options)
    else:
        input, bias = take("input"), take("linear_bias", None)
        z = dense_logits(input, weight, bias, logit_scale=scale, **logit_options)[..., :vocab]
    lse, log_q, (V,) = z.logsumexp(-1), z.log_softmax(-1), z.shape[-1:]
    target = take("target", None)
    target = torch.zeros(z.shape[:-1], dtype=torch.int64) if target is None else target
    if take("shift", False):
        target = torch.nn.functional.pad(target[..., 1:], (0, 1), value=ignore_index)
    q, of_class, token_weight = target, take("weight", torch.ones(V).double()), take("token_weight", None)
    several = target.dim() == z.dim()
    valid, count = torch.ones(z.shape[:-1], dtype=torch.bool), torch.tensor(lse.numel())
    if not target.is_floating_point():
        topk = target if several else target[..., None]
        counted = topk != ignore_index
        index, valid = topk.where(counted, 0).clamp(max=V - 1), counted.any(-1)  # a divergence does not read the class
        of_target = counted * take("target_weight", torch.ones(1).double())
        q, count = torch.zeros_like(z).scatter_add(-1, index, of_target), valid.sum()
        log_probs = log_q.gather(-1, index).where(counted, 0.0)
        named = torch.zeros_like(z).scatter_add(-1, index, counted.double()) > 0
        tail = log_q.masked_fill(named, -torch.inf).logsumexp(-1)
    penalty = take("z_loss", 0.0) * lse.square()
    if "advantages" in left:
        policy = {name: take(name) for name in list(inspect.signature(token_losses).parameters)[1:] if name in left}
        numbers = [policy.pop(name, None) for name in ("advantages", "old_log_probs", "ref_log_probs")]
        rows = token_losses(log_probs.squeeze(-1), *numbers, **policy)
    elif "function" in left:
        of_token = log_probs.where(counted, -1.0)
        rows = take("function")(of_token if several else of_token.squeeze(-1))
    elif "kind" in left:
        own, cap = take("teacher_logit_scale", scale), take("teacher_softcap", None)
        if "teacher_probs" in left:
            log_p = take("teacher_probs")[..., :vocab].log()
        else:
            teacher = (take("teacher_input"), take("teacher_weight"), take("teacher_bias", None))
            teacher_options = {"temperature": logit_options["temperature"], "softcap": cap, "logit_scale": own}
            log_p = dense_logits(*teacher, **teacher_options)[..., :vocab].log_softmax(-1)
        rows = from_definition(take("kind"), take("beta", 0.5), log_q, log_p)
    else:
        eps = take("label_smoothing", 0.0)
        rows = penalty - (((1 - eps) * q + eps / V) * of_class * log_q).sum(-1)
        if not several:
            count = (of_class[index.squeeze(-1)] * valid).sum()
    rows = torch.where(valid, rows if token_weight is None else rows * token_weight, 0.0)
    normalizer = take("normalizer", None)
    denominator = normalizer if normalizer is not None else count if reduction == "mean" else 1
    found = {"loss": rows if reduction == "none" else rows.sum() / denominator}
    if not target.is_floating_point():
        found |= {"log_probs": log_probs if several else log_probs[..., 0], "tail_log_prob": tail * valid}
        top = z.argmax(-1)
        right = valid & (top == index[..., 0])
        found |= {"argmax": top.where(valid, -1), "is_top1": right, "token_accuracy": right.sum() / valid.sum()}
    p = log_q.exp()
    of_rows = {"lse": lse, "entropy": -(p * log_q).sum(-1), "log_sum_sq_probs": p.square().sum(-1).log()}
    of_rows |= {"mean_logit": z.mean(-1), "z_loss": penalty}
    return found | {name: row.where(valid, 0.0) for name, row in of_rows.items()}, set(left)


def results_of(found: object) -> dict[str, Tensor]:
    if isinstance(found, dict):
        return found
    if hasattr(found, "_asdict"):
        return {name: result for name, result in found._asdict().items() if result is not None}
    return {"loss": found} if isinstance(found, Tensor) else results_of(found[0]) | results_of(found[1])


def scalar_of(results: dict[str, Tensor], names: list[str]) -> Tensor:
    """Weights each entry with a different factor."""
    total = torch.zeros(())
    for place, name in enumerate(names, 1):
        part = full(results[name]).double()
        total = total + (part * torch.linspace(0.5, 1.5, part.numel()).view(part.shape)).sum() * place
    return total


def run(function, call: dict, place) -> tuple[dict[str, Tensor | None], list[str]]:
    """Returns results, gradients, the final main_grad and logits; and the names of the results that have a gradient."""
    before = {name: value.detach().clone() for name, value in call.items() if isinstance(value, Tensor)}
    placed = {name: place(name, before[name].clone()) if name in before else value for name, value in call.items()}
    leaves = {name: placed[name].requires_grad_() for name in before if call[name].requires_grad}
    logits = {"logits": placed["logits"] * 1.0} if "logits" in call else {}  # the logits are not a leaf
    results = results_of(function(**placed | logits))
    learnt = [name for name, result in results.items() if result.requires_grad]
    scalar_of(results, learnt).backward()
    found = {name: full(result).detach() for name, result in results.items()}
    found |= {f"d {name}": None if leaf.grad is None else full(leaf.grad) for name, leaf in leaves.items()}
    if call.get("main_grad") is not None:
        found["d linear_weight"] = full(placed["main_grad"]) - before["main_grad"]
        found["main_grad"] = torch.ones(())
    if logits and not torch.equal(full(logits["logits"]), before["logits"]):
        found["over the logits"] = torch.ones(())
    return found, learnt


def one_process(name: str, tensor: Tensor) -> Tensor:
    return tensor


def twice(function, call: dict, learnt: list[str]) -> list[Tensor | None]:
    """Second derivatives: the gradients of the squared norm of the gradients."""
    call = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in call.items()}
    leaves = [call[name].requires_grad_() for name in call.pop("leaves")]
    if function is not dense and "logits" in call:
        call["logits"] = call["logits"] * 1.0
    results = dense(call)[0] if function is dense else results_of(function(**call))
    first = torch.autograd.grad(scalar_of(results, learnt), leaves, create_graph=True, allow_unused=True)
    norm = sum(grad.square().sum() for grad in first if grad is not None)
    return torch.autograd.grad(norm, leaves, allow_unused=True)


def has_second_derivatives(function, call: dict, learnt: list[str]) -> bool:
    """Compares second derivatives with those of dense(); False if they are refused by name."""
    call = call | {
        "leaves": [name for name, value in call.items() if isinstance(value, Tensor) and value.requires_grad]
    }
    try:
        found = twice(function, call, learnt)
    except NotImplementedError as refused:
        assert re.search("second derivatives|main_grad|create_graph", str(refused)), refused
        return False
    for ours, truth in zip(found, twice(dense, call, learnt), strict=True):
        assert (ours is None) == (truth is None)
        assert ours is None or error(ours, truth) < 1e-9
    return True


def check(function, call: dict, place) -> dict[str, Tensor | None] | None:
    """Returns the results, after comparing what dense() knows; None if the call is refused by name."""
    try:
        found, learnt = run(function, call, place)
    except (NotImplementedError, ValueError, TypeError) as refused:
        op, _, text = str(refused).partition(": ")
        assert op in FUNCTIONS and any(re.search(rf"\b{name}\b", text) for name in (*call, *FEATURES)), refused
        return None
    copies = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in call.items()}
    leaves = {name: copies[name].requires_grad_() for name in call if f"d {name}" in found}
    expected, unknown = dense(copies)
    if unknown - NO_TERM:
        check_differences(function, call, place, found, learnt)
        return found
    grads = torch.autograd.grad(scalar_of(expected, learnt), leaves.values(), allow_unused=True)
    expected |= {f"d {name}": grad for name, grad in zip(leaves, grads)}
    sampled = call.get("gradient_sparse", "both").replace("both", "input linear_weight").split()
    assert found.keys() - expected.keys() <= {"main_grad", "over the logits"}
    for name in found.keys() & expected.keys():
        if call.get("gradient_threshold", 0.0) > 1e-9 and name.removeprefix("d ") in sampled:
            continue
        ours, truth = (torch.zeros(()) if result is None else result for result in (found[name], expected[name]))
        assert error(ours.expand_as(truth), truth.expand_as(ours)) < 1e-9, name
    if place is one_process and learnt:
        found["twice"] = torch.ones(()) if has_second_derivatives(function, call, learnt) else None
    return found


def check_differences(function, call: dict, place, found, learnt: list[str], step: float = 1e-6) -> None:
    """Compares the gradients, along one direction, with the difference of the loss at two points."""
    grads = {name: found[f"d {name}"] for name in call if found.get(f"d {name}") is not None}
    direction = {name: torch.randn_like(grad) for name, grad in grads.items()}

    def at(sign: float) -> Tensor:
        moved = {name: (call[name] + sign * step * d).detach().requires_grad_() for name, d in direction.items()}
        return scalar_of(run(function, call | moved, place)[0], learnt)

    slope = sum((grad * direction[name]).sum() for name, grad in grads.items())
    assert error((at(1.0) - at(-1.0)) / (2 * step), slope) < 1e-5


def changed(found: dict, without: dict) -> bool:
    def same(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b if a is None or b is None else a.shape == b.shape and torch.equal(a, b)

    return found.keys() != without.keys() or not all(same(found[name], without[name]) for name in found)


def walk(name: str, place, sinks, layout: str) -> tuple[set, set, set]:
    """Returns the pairs (objective, sink) that are refused, the pairs and options whose second derivatives are, and the
    options that some cell accepts.
    """
    function, options = FUNCTIONS[name], parameters(FUNCTIONS[name])
    refused, once, accepted, silent = set(), set(), set(), []
    for (objective, (tensors, others)), sink in itertools.product(CELLS[name].items(), sinks):
        if not SINKS[sink].keys() <= options.keys():
            continue
        names = {"target" if tensor in ("topk", "probabilities") else tensor: tensor for tensor in tensors}
        base = {name: tensor_of(tensor) for name, tensor in names.items()} | others | made(SINKS[sink])
        for leaf in LEAVES & base.keys():
            base[leaf].requires_grad_()
        usual = check(function, base, place)
        if usual is None:
            refused.add((objective, sink))
            continue
        if usual.get("twice") is None:
            once.add((objective, sink))
        for option, (default, annotation) in options.items():
            if option in (*others, *names, *SINKS[sink]):
                continue
            beside = {name: value for name, value in BESIDE.get(option, {}).items() if name in options}
            start = base | made(beside)
            if option == "ignore_index" and "target" in start:  # then the target has no -100
                start["target"] = start["target"].clamp(min=0)
            without = check(function, start, place) if beside or option == "ignore_index" else usual
            for value in values(option, default, annotation):
                found = check(function, start | {option: value}, place)
                accepted |= {option} if found is not None else set()
                if None not in (found, without) and found.get("twice") is None and without.get("twice") is not None:
                    once.add(option)
                inert = any(option == known and word in f"{objective}, {sink}, {layout}" for known, word in INERT)
                if None not in (found, without) and not inert and not changed(found, without):
                    silent.append((objective, sink, option, value))
    assert not silent, silent
    return refused, once, accepted


def test_every_function_has_its_cells():
    assert CELLS.keys() == FUNCTIONS.keys()


@pytest.mark.parametrize("name", CELLS)
def test_every_option_of_every_cell_has_the_results_of_its_formula_or_is_refused(name):
    refused, once, accepted = walk(name, one_process, SINKS, "one process")
    assert refused == REFUSED.get(name, set())
    assert once == ONCE.get(name, set())
    own = {tensor for tensors, others in CELLS[name].values() for tensor in (*tensors, *others)}
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):  # before torch 2.13 `options` has no value but None
        own.add("options")
    own.add("batch_invariant")  # refused on a CPU
    assert parameters(FUNCTIONS[name]).keys() - own == accepted


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("sharded", ["tokens", "vocabulary"])
def test_every_option_of_sharded_tensors_has_the_results_of_its_formula_or_is_refused(name, sharded):
    run_in_world(("cpu", 2), walk_sharded, name, sharded)


def walk_sharded(device, name: str, sharded: str) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def place(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        sizes = SHAPES[name].split(", ")
        split = {"tokens": sizes[0] == "..." and 0, "vocabulary": "V" in sizes and sizes.index("V") - len(sizes)}
        placement = Replicate() if split[sharded] is False else Shard(split[sharded])
        return distribute_tensor(tensor, mesh, [placement])

    *_, accepted = walk(name, place, ("made in forward", "made in backward"), f"sharded {sharded}")
    assert accepted
