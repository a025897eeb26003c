"""How a case is drawn: step by step, each a dict of what it adds to the case so far.

Cases have numbers, `draw(seed, index, device)`, so that processes share them out and a report names each.
"""

import math
from bisect import bisect_right
from dataclasses import replace
from random import Random

from tests.fuzz.cases import ARGMAX_METRICS, BUFFER_MODES, LOG_PROB_METRICS, MESHES, METRICS, RELATIONS, Case
from tests.fuzz.consistent import consistent

# D hidden, V vocabulary, E hidden of the teacher

# A Triton kernel takes seconds to compile, and is compiled again for every dtype, option and divisibility by 16 of D,
# V, strides and addresses. On CUDA, cases in half precision therefore come in families that share all of these, and a
# process takes whole families (report.py).
FAMILIES = 24


def draw(seed: int, index: int, device: str) -> Case:
    """Case `index` of `seed`."""
    fixed = free = Random(f"{seed}:{index}")
    case = Case(seed=free.getrandbits(48))
    if device == "cuda":
        family = index % FAMILIES
        case = replace(case, dtype="bfloat16" if family < 0.5 * FAMILIES else "float16")
        if family >= 0.7 * FAMILIES:
            case = replace(case, dtype=free.choice(["float32", "float64"]))
        else:
            fixed = Random(f"{seed}:family {family}")
    elif device == "interpreter":  # the interpreter's bfloat16 products are wrong
        case = replace(case, dtype=choose(free, {"float32": 3, "float16": 2}))
    else:
        case = replace(case, dtype=choose(free, {"float32": 4, "float64": 3, "bfloat16": 2, "float16": 2}))
    for step in (function, shapes, flags, layouts, relations, cuts):
        case = replace(case, **step(fixed, case))
    case = replace(case, **newer(fixed, case))
    if device != "cpu" and case.sparse:  # with so few classes, an unbiased sparse gradient is the exact gradient there
        case = replace(case, sparse="drop")
    for step in (tokens, numbers, data, derivatives):
        case = replace(case, **step(free, case))
    if case.dtype in ("float32", "float64") and free.random() < 0.06:
        half = "float16" if device == "interpreter" else free.choice(["bfloat16", "float16"])
        case = replace(case, autocast=half, half_input=case.dtype == "float32" and free.random() < 0.4)
    if device == "cpu":
        case = replace(case, mesh=choose(free, dict(zip(MESHES, (10, 1, 1)))))
    return consistent(case)


def choose(random: Random, weights: dict):
    return random.choices(list(weights), list(weights.values()))[0]


def maybe(random: Random, share: float, value, other):
    return value if random.random() < share else other


PRIMES = [n for n in range(2, 300) if all(n % k for k in range(2, int(n**0.5) + 1))]


def size(random: Random, largest: int) -> int:
    """A prime, a multiple of 8 or any number; small ones are more likely."""
    largest = max(8, int(largest * random.random()))
    pool = choose(random, {"prime": 4, "multiple": 2, "any": 4})
    if pool == "prime":
        return random.choice(PRIMES[: bisect_right(PRIMES, largest)])
    return 8 * random.randint(1, largest // 8) if pool == "multiple" else random.randint(1, largest)


def function(random: Random, case: Case) -> dict:
    shares = {
        "cross_entropy": 55,
        "metrics": 8,
        "head": 4,
        "loss_module": 4,
        "log_probs": 15,
        "kl_div": 14,
        "given_logits": 10,
        "policy": 10,
        "token_loss": 12,
    }
    return {"function": choose(random, shares)}


def shapes(random: Random, case: Case) -> dict:
    vocab = choose(random, {"usual": 10, "tiny": 1, "large": 0.5})
    sizes = {"usual": size(random, 300), "tiny": random.randint(1, 3), "large": random.randint(500, 1500)}
    return {"D": size(random, 50), "V": sizes[vocab], "E": size(random, 30)}


def tokens(random: Random, case: Case) -> dict:
    kind = choose(random, {"flat": 6, "batch": 3, "three": 1, "single": 0.4, "empty": 0.3, "many": 1})
    shapes = {
        "flat": (size(random, 70),),
        "batch": (random.randint(1, 5), size(random, 14)),
        "three": (random.randint(1, 3), random.randint(1, 4), random.randint(1, 6)),
        "single": (),
        "empty": random.choice([(0,), (3, 0), (0, 2)]),
        "many": (random.randint(65, 200),),
    }
    return {"tokens": shapes[kind]}


def flags(random: Random, case: Case) -> dict:
    """Which options are given."""
    new: dict = {
        "bias": choose(random, {"": 6, "normal": 4, "large": 0.3, "-inf": 0.3}),
        "softcap": maybe(random, 0.2, 5.0, None),
        "logit_scale": maybe(random, 0.25, 0.7, 1.0),
        "int32": random.random() < 0.15,
    }
    if case.function in ("log_probs", "metrics"):
        new |= {"argmax": case.function == "metrics" or random.random() < 0.4}
    if case.function == "log_probs":
        return new | {"entropy": random.random() < 0.4}
    if case.function in ("policy", "token_loss"):
        return new
    if case.function == "kl_div":
        new |= {
            "kind": random.choice(["forward", "reverse", "jsd", "tv", "nla"]),
            "beta": choose(random, {0.5: 4, 0.1: 1, 0.9: 1, 0.0: 0.2, 1.0: 0.2}),
            "teacher": choose(random, {"hidden": 4, "probs": 3, "near": 2, "sparse probs": 1, "student": 1}),
            "teacher_scale": maybe(random, 0.2, random.choice([1.0, 0.5]), None),
            "teacher_softcap": maybe(random, 0.15, 10.0 ** random.uniform(-3.0, 6.0), None),
        }
        return new
    return new | {
        "class_weight": choose(random, {"": 8, "uniform": 2, "some zero": 0.7, "large": 0.4, "all zero": 0.1}),
        "label_smoothing": maybe(random, 0.2, random.choice([0.1, 0.3, 1.0]), 0.0),
        "z_loss": maybe(random, 0.2, 1e-2, 0.0),
    }


def newer(random: Random, case: Case) -> dict:
    """Arguments that few functions have."""
    new: dict = {"shift": random.random() < 0.15}
    topk = maybe(random, 0.25, random.randint(1, 12), 0)
    if case.function == "token_loss":
        reads = tuple(name for name in ("entropy", "lse") if random.random() < 0.15)
        new |= {"topk": topk, "reads": reads, "formula": formula(random, ("lp", "a", *reads))}
    if case.function in ("cross_entropy", "metrics", "log_probs"):
        new |= {"topk": topk, "tail": case.function == "log_probs" and random.random() < 0.5}
    names = METRICS if topk else METRICS + ARGMAX_METRICS
    if case.function == "log_probs":
        names = LOG_PROB_METRICS
    if case.function == "metrics" or random.random() < 0.3:
        new["metrics"] = tuple(name for name in names if random.random() < 0.4)
    if case.function == "policy":
        new |= {
            "objective": random.choice(["ppo", "ppo", "cispo"]),
            "clip_low": random.choice([0.2, 0.1, math.inf]),
            "clip_high": random.choice([0.2, 0.28, math.inf]),
            "dual_clip": maybe(random, 0.3, 3.0, None),
            "kl_factor": maybe(random, 0.5, random.choice([0.04, 1.0]), 0.0),
            "kl_estimator": random.choice(["k1", "k2", "k3"]),
            "on_policy": random.random() < 0.2,
        }
    if case.function == "cross_entropy":
        special = choose(random, {"": 7, "drop": 1, "unbiased": 1.5, "own": 1, "sums": 1.5})
        new |= {"sparse": special} if special in ("drop", "unbiased") else {"main_grad": special}
        new["class_order"] = random.random() < (0.5 if new.get("sparse") else 0.05)
        new["threshold"] = 2.0 ** -random.randint(3, 9)
    return new


def formula(random: Random, names: tuple[str, ...]) -> str:
    """A loss of one token that depends on each of these names. Its last term is one that no other cancels."""
    terms = {
        "lp": (
            "lp",
            "lp.exp()",
            "(1.0 - lp.exp())",
            "(lp + a).clamp(-3.0, 0.5)",
            "torch.expm1(0.5 * lp)",
            "lp.detach()",
        ),
        "a": ("a", "a.sigmoid()", "a * g"),
        "lse": ("0.1 * lse", "lse.sigmoid()"),
        "entropy": ("0.1 * entropy", "(-entropy).exp()"),
    }

    def made(depth: int) -> str:
        if not depth:
            return random.choice(terms[random.choice(names)])
        x, y = made(depth - 1), made(depth - 1)
        return random.choice((f"({x} * {y})", f"({x} + {y})", f"torch.where(a > 0.0, {x}, {y})", f"({x} - g * {y})"))

    return f"{made(random.randint(0, 2))} - {' - '.join(random.choice(terms[name]) for name in names)} - 1.618 * lp"


def numbers(random: Random, case: Case) -> dict:
    """Options that are tensors in the kernels."""
    scaled = case.logit_scale != 1.0
    return {
        "reduction": choose(random, {"mean": 5, "sum": 3, "none": 3}),
        "softcap": None if case.softcap is None else softcap(random),
        "logit_scale": random.choice([0.1, 0.7, -1.3, 2.0, 0.0]) if scaled else 1.0,
        "temperature": maybe(random, 0.5, random.choice([0.3, 0.7, 2.0]), 1.0) if scaled else 1.0,
        "ignore_index": choose(random, {-100: 8, 0: 1, case.V // 2: 1, -1: 0.5}),
        "ignored": choose(random, {0.0: 3, 0.2: 5, 0.8: 1, 1.0: 0.4}),
        "factor": choose(random, {1.0: 5, 3.0: 1, -0.25: 1, 1024.0: 0.5, 0.0: 0.2}),
        "cotangent": choose(random, {"ones": 3, "normal": 3, "nan where ignored": 0.3}),
        "learnt": choose(random, {"": 90, "logit_scale": 4, "temperature": 4, "softcap": 1, "z_loss": 1}),
        "z_loss": random.choice([1e-4, 1e-2, 1.0]) if case.z_loss else 0.0,
        "token_weight": choose(random, {"": 7, "uniform": 2, "signed": 1, "some zero": 0.5}),
        "normalizer": choose(random, {"": 7, "number": 1, "tensor": 1, "count": 0.5, "zero": 0.1}),
    }


def softcap(random: Random) -> float:
    usual = random.choice([0.5, 3.0, 5.0, 30.0])
    return maybe(random, 0.5, usual, 10.0 ** random.uniform(-3.0, 6.0))


def data(random: Random, case: Case) -> dict:
    kinds = {"zipf": 4, "randn": 3, "large": 1, "huge": 0.5, "tiny": 0.7, "shifted": 0.6}
    return {
        "data": choose(random, kinds),
        "targets": choose(random, {"likely": 3, "uniform": 3, "one class": 0.5, "largest": 0.7}),
        "poison": maybe(random, 0.4 if case.learnt else 0.1, random.choice(["nan", "inf"]), "") if case.ignored else "",
    }


def relations(random: Random, case: Case) -> dict:
    count = choose(random, {0: 6, 1: 3, 2: 1})
    return {"relations": tuple(sorted(random.sample(RELATIONS, count)))}


def layouts(random: Random, case: Case) -> dict:
    kinds = {"rows": 5, "columns": 2, "both strides": 1, "wide rows": 1, "offset": 1, "expanded": 0.3, "repeated": 0.3}
    names = ("input", "weight", "bias", "token_weight")
    subset = choose(
        random,
        {("input", "weight"): 2, ("input",): 1, ("weight",): 1, names: 4, ("bias",): 0.4, ("token_weight",): 0.3},
    )
    return {
        "input_layout": choose(random, kinds),
        "weight_layout": choose(random, {**kinds, "repeated": 0.0}),  # equal classes have equal rounding errors
        "vector_layout": choose(random, {"rows": 6, "both strides": 2, "offset": 1, "expanded": 0.5}),
        "transposed_tokens": random.random() < 0.3,
        "wants": tuple(sorted({*subset, *maybe(random, 0.3, ("normalizer",), ())})),
        "views": tuple(name for name in names if random.random() < 0.3),
    }


def derivatives(random: Random, case: Case) -> dict:
    weights = {
        "backward": 20, "grad": 20, "retain_graph": 8, "create_graph": 16, "create_graph_once": 4, "func": 6,
        "func_twice": 4, "hvp": 1, "batched": 1.5, "vmap": 3, "checkpoint": 4, "reentrant_checkpoint": 2,
        "saved_tensor_hooks": 2, "no_grad": 3, "inference_mode": 2, "compile_eager": 0.5, "compile_aot": 0.5,
        "two_forwards": 1, "two_backwards": 1, "forward_mode": 0.3, "third": 0.3,
    }  # fmt: skip
    if case.main_grad:
        weights = {mode: 1 if mode.startswith("compile") else 6 for mode in BUFFER_MODES}
    return {"mode": choose(random, weights)}


def cuts(random: Random, case: Case) -> dict:
    return {
        "workspace": choose(random, {0: 5, 1: 3, 4096: 1, 65536: 1, 262144: 1}),
        "short_chunks": random.random() < 0.5,
        "handed_over": case.function == "given_logits" and random.random() < 0.7,
        "uninitialized": random.random() < 0.5,
    }
