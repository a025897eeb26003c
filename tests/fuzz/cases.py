"""What a case is, and how one is drawn. A case has no tensors: its seed makes them (problem.py)."""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random

# N tokens, K slots of a target, D hidden, V vocabulary, E hidden of the teacher, r rank of a pair

FUNCTIONS = (
    *("cross_entropy", "metrics", "head", "loss_module", "log_probs", "kl_div", "given_logits", "policy", "low_rank"),
)
LAYOUTS = ("rows", "columns", "both strides", "wide rows", "offset", "expanded", "repeated")

# How derivatives are asked for. The others are for ours only: plain torch takes "grad" in their place.
SECOND_ORDER = ("create_graph", "func_twice", "hvp")
REFUSED = ("forward_mode", "third")
SPARSE_MODES = ("backward", "grad", "retain_graph", "checkpoint", "reentrant_checkpoint", "saved_tensor_hooks")
BUFFER_MODES = ("backward", "checkpoint", "reentrant_checkpoint", "saved_tensor_hooks")  # of main_grad
MODES = (
    *("backward", "grad", "retain_graph", "create_graph_once", *SECOND_ORDER, "func", "batched", "vmap"),
    *("checkpoint", "reentrant_checkpoint", "saved_tensor_hooks", "no_grad", "inference_mode"),
    *("compile_eager", "compile_aot", *REFUSED),
)

# What the arguments have to do with each other; any that do not contradict may be together.
RELATIONS = (
    "tied",  # input = tanh(weight[ids])
    "same",  # input is weight
    "trunk",  # input passes through a layer made of weight
    "inner weight",  # weight is no leaf
    "bias of weight",
    "token_weight of weight",
    "token_weight of input",
    "token_weight of losses",  # which a first call of the function made
    "normalizer of token_weight",
    "normalizer of input",
    "class_weight of weight",  # detached
    "penalty",  # the objective uses input and weight once more
    "two calls",
)


@dataclass(frozen=True)
class Case:
    """The defaults are the plainest case; a failure is reduced towards them."""

    seed: int = 0
    function: str = "cross_entropy"
    mode: str = "grad"
    tokens: tuple[int, ...] = (7,)
    D: int = 5
    V: int = 11
    dtype: str = "float32"
    autocast: str = ""
    half_input: bool = False  # under autocast: input in the autocast dtype, the parameters in float32
    relations: tuple[str, ...] = ()
    wants: tuple[str, ...] = ("input", "weight")
    views: tuple[str, ...] = ()  # whose leaf is the larger tensor they are a part of
    input_layout: str = "rows"
    weight_layout: str = "rows"
    vector_layout: str = "rows"  # of what has an entry per class or token
    transposed_tokens: bool = False
    data: str = "zipf"
    targets: str = "likely"
    ignored: float = 0.0
    ignore_index: int = -100
    int32: bool = False
    poison: str = ""  # what the hidden states of ignored tokens hold
    cotangent: str = "ones"
    factor: float = 1.0
    reduction: str = "mean"
    bias: str = ""
    class_weight: str = ""
    token_weight: str = ""
    normalizer: str = ""
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    z_loss: float = 0.0
    learnt: str = ""  # an option given as a tensor that wants a gradient
    entropy: bool = False
    argmax: bool = False
    kind: str = "forward"
    beta: float = 0.5
    teacher: str = "hidden"
    teacher_scale: float | None = None
    teacher_softcap: float | None = None
    E: int = 4
    slots: int = 0  # classes of a token, with target_weight; 0 for one class
    tail: bool = False
    metrics: tuple[str, ...] = ()  # names of return_metrics; of the function "metrics" none is True
    shift: bool = False
    objective: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_factor: float = 0.0
    kl_estimator: str = "k3"
    on_policy: bool = False  # no old log-probabilities
    rank: int = 1
    frozen: bool = False  # the head beside a low-rank pair
    sparse: str = ""  # gradient_mode, with a gradient_threshold
    threshold: float = 2.0**-6
    main_grad: str = ""  # dtype of the buffer: "own" is the weight's, "sums" float32 or float64
    workspace: int = 0  # bytes; 0 for the default
    short_chunks: bool = False  # the fewest rows of a chunk lowered, so that few tokens make several
    recompute: bool = True  # whether a small workspace of the Triton path may recompute
    handed_over: bool = False  # logits that may be overwritten
    uninitialized: bool = False  # torch.empty is filled with nan

    @property
    def count(self) -> int:
        count = 1
        for size in self.tokens:
            count *= size
        return count

    def __str__(self) -> str:
        """What differs from the plainest case."""
        changed = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(changed)


# A Triton kernel compiles for seconds, anew for every dtype, option and divisibility by 16 of a size, stride, address.
# On CUDA half operands therefore come in families that share all that; a process takes whole families (report.py).
FAMILIES = 24


def draw(seed: int, index: int, device: str) -> Case:
    """Case `index` of `seed`."""
    free = fixed = Random(f"{seed}:{index}")
    case = Case(seed=free.getrandbits(48))
    if device == "cuda":
        family = index % FAMILIES
        case = replace(case, dtype="bfloat16" if family < 0.5 * FAMILIES else "float16")
        if family >= 0.7 * FAMILIES:
            case = replace(case, dtype=free.choice(["float32", "float64"]))
        else:
            fixed = Random(f"{seed}:family {family}")
    elif device == "interpreter":  # its bfloat16 products are wrong
        case = replace(case, dtype=choose(free, {"float32": 3, "float16": 2}))
    else:
        case = replace(case, dtype=choose(free, {"float32": 4, "float64": 3, "bfloat16": 2, "float16": 2}))
    for step in (function, shapes, flags, layouts, relations, cuts):
        case = replace(case, **step(fixed, case))
    case = replace(case, **newer(fixed, case))
    if device != "cpu" and case.sparse:  # of so few classes an unbiased one is the exact gradient there
        case = replace(case, sparse="drop")
    for step in (tokens, numbers, data, derivatives):
        case = replace(case, **step(free, case))
    if fixed is not free and (case.count % 16 == 0 or case.count == 1):
        case = replace(case, tokens=(*case.tokens[:-1], 7) if case.count else (17,))
    if case.dtype in ("float32", "float64") and free.random() < 0.06:
        half = "float16" if device == "interpreter" else free.choice(["bfloat16", "float16"])
        case = replace(case, autocast=half, half_input=case.dtype == "float32" and free.random() < 0.4)
    return consistent(case)


def choose(random: Random, weights: dict):
    return random.choices(list(weights), list(weights.values()))[0]


def maybe(random: Random, share: float, value, other):
    return value if random.random() < share else other


PRIMES = [n for n in range(2, 300) if all(n % k for k in range(2, int(n**0.5) + 1))]


def size(random: Random, largest: int) -> int:
    """Primes, multiples of 8 and anything; small ones more often."""
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
        "low_rank": 6,
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
    """Which options there are."""
    new: dict = {
        "bias": choose(random, {"": 6, "normal": 4, "large": 0.3, "-inf": 0.3}),
        "softcap": maybe(random, 0.2, random.choice([0.5, 3.0, 5.0, 30.0]), None),
        "logit_scale": maybe(random, 0.25, 0.7, 1.0),
        "int32": random.random() < 0.15,
    }
    if case.function in ("log_probs", "metrics"):
        new |= {"argmax": case.function == "metrics" or random.random() < 0.4}
    if case.function == "log_probs":
        return new | {"entropy": random.random() < 0.4}
    if case.function == "policy":
        return new
    if case.function == "kl_div":
        new |= {
            "kind": random.choice(["forward", "reverse", "jsd"]),
            "beta": choose(random, {0.5: 4, 0.1: 1, 0.9: 1, 0.0: 0.2, 1.0: 0.2}),
            "teacher": choose(random, {"hidden": 4, "probs": 3, "near": 1, "sparse probs": 1, "student": 1}),
            "teacher_scale": maybe(random, 0.2, random.choice([1.0, 0.5]), None),
            "teacher_softcap": maybe(random, 0.15, 4.0, None),
        }
        return new
    return new | {
        "class_weight": choose(random, {"": 8, "uniform": 2, "some zero": 0.7, "large": 0.4, "all zero": 0.1}),
        "label_smoothing": maybe(random, 0.2, random.choice([0.1, 0.3, 1.0]), 0.0),
        "z_loss": maybe(random, 0.2, 1e-2, 0.0),
    }


LOG_PROB_METRICS = ("log_sum_sq_probs", "mean_logit")
METRICS = ("lse", "entropy", *LOG_PROB_METRICS, "z_loss")
ARGMAX_METRICS = ("argmax", "is_top1", "token_accuracy")


def newer(random: Random, case: Case) -> dict:
    """Which of the arguments that few functions have."""
    new: dict = {"shift": random.random() < 0.15, "rank": random.randint(1, 9), "frozen": random.random() < 0.6}
    slots = maybe(random, 0.25, random.randint(1, 12), 0)
    if case.function in ("cross_entropy", "metrics", "log_probs"):
        new |= {"slots": slots, "tail": case.function == "log_probs" and random.random() < 0.5}
    names = METRICS if slots else METRICS + ARGMAX_METRICS
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
        new["threshold"] = 2.0 ** -random.randint(3, 9)
    return new


def numbers(random: Random, case: Case) -> dict:
    """What is a tensor to the kernels."""
    scaled = case.logit_scale != 1.0
    return {
        "reduction": choose(random, {"mean": 5, "sum": 3, "none": 3}),
        "logit_scale": random.choice([0.1, 0.7, -1.3, 2.0, 0.0]) if scaled else 1.0,
        "temperature": maybe(random, 0.5, random.choice([0.3, 0.7, 2.0]), 1.0) if scaled else 1.0,
        "ignore_index": choose(random, {-100: 8, 0: 1, case.V // 2: 1, -1: 0.5}),
        "ignored": choose(random, {0.0: 3, 0.2: 5, 0.8: 1, 1.0: 0.4}),
        "factor": choose(random, {1.0: 5, 3.0: 1, -0.25: 1, 1024.0: 0.5, 0.0: 0.2}),
        "cotangent": choose(random, {"ones": 3, "normal": 3, "nan where ignored": 0.3}),
        "learnt": maybe(random, 0.03, random.choice(["logit_scale", "temperature", "softcap", "z_loss"]), ""),
        "z_loss": random.choice([1e-4, 1e-2, 1.0]) if case.z_loss else 0.0,
        "token_weight": choose(random, {"": 7, "uniform": 2, "signed": 1, "some zero": 0.5}),
        "normalizer": choose(random, {"": 7, "number": 1, "tensor": 1, "count": 0.5, "zero": 0.1}),
    }


def data(random: Random, case: Case) -> dict:
    kinds = {"zipf": 4, "randn": 3, "large": 1, "huge": 0.5, "tiny": 0.7, "shifted": 0.6}
    return {
        "data": choose(random, kinds),
        "targets": choose(random, {"likely": 3, "uniform": 3, "one class": 0.5, "largest": 0.7}),
        "poison": maybe(random, 0.03, random.choice(["nan", "inf"]), "") if case.ignored else "",
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
    if case.function == "low_rank":
        subset += ("pair_input", "pair_weight")
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
        "forward_mode": 0.3, "third": 0.3,
    }  # fmt: skip
    return {"mode": choose(random, weights)}


def cuts(random: Random, case: Case) -> dict:
    return {
        "workspace": choose(random, {0: 5, 1: 3, 4096: 1, 65536: 1, 262144: 1}),
        "short_chunks": random.random() < 0.5,
        "recompute": random.random() < 0.5,
        "handed_over": case.function == "given_logits" and random.random() < 0.7,
        "uninitialized": random.random() < 0.5,
    }


def consistent(case: Case) -> Case:
    """The nearest case that means something."""
    case = with_its_options(case)
    relations = possible_relations(case)
    new: dict = {"relations": tuple(sorted(relations))}
    for name in ("token_weight", "normalizer", "bias", "class_weight"):
        made = any(relation.startswith(f"{name} of") for relation in relations)
        if made or getattr(case, name) == "made":
            new[name] = "made" if made else ""
    if "normalizer of token_weight" in relations and not new.get("token_weight", case.token_weight):
        new["token_weight"] = "uniform"
    if "same" in relations:
        new["tokens"] = (case.V,)
    spread = case.mode == "vmap" or case.function == "given_logits"  # plain torch's head multiplies it by 0
    if relations or case.input_layout == "repeated" or case.teacher == "student" or spread:
        new["poison"] = ""  # it would not stay in its row
    return replace(case, **new)


def with_its_options(case: Case) -> Case:
    """Without those that the function or the mode does not have."""
    new: dict = {}
    if case.mode == "vmap":
        new |= {"reduction": "none", "tokens": case.tokens or (3,)}
    if case.function == "log_probs":
        new |= {"reduction": "none", "token_weight": ""}
    if case.function in ("log_probs", "kl_div", "policy"):
        new |= {"z_loss": 0.0, "class_weight": "", "label_smoothing": 0.0}
    new |= newer_options(case)
    if new.get("reduction", case.reduction) == "none":
        new["normalizer"] = ""
    if case.function == "policy" and case.normalizer == "zero":
        new["normalizer"] = ""  # times the slope 0 of a clipped token
    if case.bias == "-inf" and (case.logit_scale <= 0.0 or case.function == "kl_div"):
        new["bias"] = "normal"  # inf logits; 0 log 0 of either distribution
    if case.function in ("head", "loss_module"):
        new["temperature"] = 1.0
    if case.function == "kl_div" and case.dtype == "float64" and case.data == "huge":
        new["data"] = "large"  # log-ratios of 2000 nats: the truth has no digits left of saturated rows
    if not can_be_learnt(case):
        new["learnt"] = ""
    elif case.learnt == "softcap":
        new["softcap"] = case.softcap or 5.0
    elif case.learnt == "z_loss":
        new["z_loss"] = case.z_loss or 0.01
    elif case.learnt == "logit_scale" and case.function == "kl_div" and case.teacher_scale is None:
        new["teacher_scale"] = 1.0  # the teacher's may not be learnt
    return replace(case, **new)


def newer_options(case: Case) -> dict:
    """Which of them the function and the mode have, and what they do not go with."""
    new: dict = {}
    if case.function not in ("cross_entropy", "metrics", "log_probs"):
        new["slots"] = 0
    if case.function not in ("metrics", "log_probs"):
        new["metrics"] = ()
    if case.function != "log_probs":
        new["tail"] = False
    shifting = ("cross_entropy", "metrics", "log_probs", "kl_div", "given_logits")
    slots = new.get("slots", case.slots)
    if case.function not in shifting or slots or not case.tokens or case.mode == "vmap":
        new["shift"] = False
    if slots and case.function == "metrics":
        new["metrics"] = tuple(name for name in case.metrics if name in METRICS) or ("lse",)
    if slots:
        new["V"] = max(case.V, 2)  # of one class the gradient is a rounding of 0
    if slots or case.function == "low_rank":
        new["poison"] = ""  # the pair's features would have to hold it too; of slots the oracle multiplies by 0
    special = case.function == "cross_entropy" and not slots
    if not special or case.mode not in SPARSE_MODES or case.dtype not in ("float32", "float64") or case.autocast:
        new["sparse"] = ""
    elif case.sparse:
        new |= {"main_grad": "", "learnt": ""}
    if not special or case.mode not in BUFFER_MODES:
        new["main_grad"] = ""
    elif case.main_grad and not case.sparse:
        new["wants"] = tuple(sorted({*case.wants, "weight"}))
        new["views"] = tuple(name for name in case.views if name != "weight")
    return new


def can_be_learnt(case: Case) -> bool:
    if case.sparse or case.function in ("policy", "low_rank"):
        return False
    if case.mode.startswith("compile") and (case.learnt in ("softcap", "z_loss") or case.softcap is not None):
        return False  # Dynamo wraps the refusal
    if case.learnt == "z_loss":
        return case.function in ("cross_entropy", "metrics")
    if case.learnt == "temperature":
        return case.function in ("cross_entropy", "metrics", "log_probs")
    return case.function not in ("head", "loss_module", "given_logits")


def possible_relations(case: Case) -> set[str]:
    kept = set(case.relations)
    if case.function == "policy":  # the old log-probabilities are those of the leaves
        kept &= {"penalty", "two calls", "token_weight of input", "token_weight of weight", "normalizer of input"}
        kept |= {"normalizer of token_weight"} & set(case.relations)
    if case.function == "low_rank":
        kept -= {"token_weight of losses"}
    if case.main_grad:  # autograd gets no gradient of the weight
        kept &= {"two calls", "token_weight of input", "normalizer of input", "normalizer of token_weight"}
    if case.shift and len(case.tokens) == 1:
        kept -= {"two calls"}
    if case.mode == "vmap":
        kept &= {"inner weight", "bias of weight", "trunk"}
    if case.function in ("log_probs", "kl_div"):
        kept -= {"class_weight of weight", "token_weight of losses"}
    if case.function == "log_probs":
        kept -= {"token_weight of weight", "token_weight of input"}
    if case.reduction == "none":
        kept -= {"normalizer of token_weight", "normalizer of input", "two calls"}
    if "tied" in kept:
        kept -= {"same"}
    if "same" in kept:
        kept -= {"trunk", "two calls"}
    if not case.tokens:
        kept -= {"two calls"}
        if case.mode.startswith("compile"):  # Dynamo reads the index of weight[class]
            kept -= {"token_weight of weight"}
    for name in ("token_weight", "normalizer"):  # of one thing only
        kept -= set([relation for relation in sorted(kept) if relation.startswith(f"{name} of")][1:])
    return kept


def simpler(case: Case) -> Iterator[Case]:
    """Cases one step nearer to the plainest."""
    for candidate in changes(case):
        candidate = consistent(candidate)
        if candidate != case:
            yield candidate


def changes(case: Case) -> Iterator[Case]:
    for field in fields(Case):
        if field.name not in ("seed", "tokens", "D", "V", "wants") and getattr(case, field.name) != field.default:
            yield replace(case, **{field.name: field.default})
    if len(case.tokens) != 1:
        yield replace(case, tokens=(case.count,))
    for name in case.relations:
        yield replace(case, relations=tuple(other for other in case.relations if other != name))
    for name in case.wants:
        if len(case.wants) > 1:
            yield replace(case, wants=tuple(other for other in case.wants if other != name))
    if case.count > 1:
        yield replace(case, tokens=(case.count // 2,))
    for name in ("D", "V"):
        if getattr(case, name) > 2:
            yield replace(case, **{name: getattr(case, name) // 2})
