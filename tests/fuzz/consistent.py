"""Which arguments go together: the nearest meaningful case, and the cases one step closer to the simplest."""

from collections.abc import Iterator
from dataclasses import fields, replace

from tests.fuzz.cases import BUFFER_MODES, MESH_MODES, METRICS, SPARSE_MODES, Case

# D hidden, V vocabulary


MODULES = ("head", "loss_module")  # which take no DTensors by themselves


def consistent(case: Case) -> Case:
    """Returns the nearest case that makes sense."""
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
    # here plain torch multiplies the ignored rows by 0, which leaves their nan
    spread = case.mode == "vmap" or case.function == "given_logits"
    if relations or case.input_layout == "repeated" or case.teacher == "student" or spread:
        new["poison"] = ""  # the poison would not stay in its row
    return replace(case, **new)


def with_its_options(case: Case) -> Case:
    """Drops options that the function or the mode does not have."""
    new: dict = {}
    if case.mode == "vmap":
        new |= {"reduction": "none", "tokens": case.tokens or (3,)}
    if case.function == "log_probs":
        new |= {"reduction": "none", "token_weight": ""}
    if case.function in ("log_probs", "kl_div", "policy", "token_loss"):
        new |= {"z_loss": 0.0, "class_weight": "", "label_smoothing": 0.0}
    new |= newer_options(case)
    if new.get("reduction", case.reduction) == "none":
        new["normalizer"] = ""
    if case.function in ("policy", "token_loss") and case.normalizer == "zero":
        new["normalizer"] = ""  # the normalizer would be multiplied by the slope 0 of a clipped token
    if case.function == "token_loss" and case.bias == "-inf":
        new["bias"] = "normal"  # documented: a log-probability of -inf times 0
    infinite = case.function == "kl_div" or (case.learnt and case.label_smoothing)
    if case.bias == "-inf" and (case.logit_scale <= 0.0 or infinite):
        # infinite logits lead to 0 log 0 in either distribution, and to infinite losses times a scale
        new["bias"] = "normal"
    computed = case.mode in ("vmap", "func", "func_twice") or case.function == "metrics"
    infinite_loss = case.bias == "-inf" or (case.function == "kl_div" and case.teacher == "sparse probs")
    if infinite_loss and computed and case.token_weight == "some zero":
        new["token_weight"] = "uniform"  # documented: a token weight of 0 times an infinite loss
    capped = case.softcap is not None or case.learnt == "softcap"
    if capped and case.data == "shifted" and new.get("label_smoothing", case.label_smoothing) == 1.0:
        new["label_smoothing"] = 0.5  # logits that are all at the cap would have no gradient but roundings
    if case.function in ("head", "loss_module"):
        new["temperature"] = 1.0
    if case.function == "kl_div" and case.dtype == "float64" and case.data == "huge":
        new["data"] = "large"  # log-ratios of 2000 nats: the truth has no digits left of saturated rows
    # DTensor refuses to flatten the logits where the case makes them, and to reduce one class to a bias's gradient
    one_class = case.mesh == "classes" and case.V == 1
    refused = case.function == "given_logits" and (len(case.tokens) != 1 or one_class)
    special = case.sparse or case.main_grad or not case.count or refused
    if case.mode not in MESH_MODES or case.function in MODULES or special:
        new["mesh"] = ""
    if not can_be_learnt(case):
        new["learnt"] = ""
    elif case.learnt == "softcap":
        new["softcap"] = case.softcap or 5.0
    elif case.learnt == "z_loss":
        new["z_loss"] = case.z_loss or 0.01
    elif case.learnt == "logit_scale" and case.function == "kl_div" and case.teacher_scale is None:
        new["teacher_scale"] = 1.0  # the teacher's scale cannot have a gradient
    if case.teacher == "near":
        if case.input_layout == "repeated":
            new["input_layout"] = "rows"  # equal tokens have equal rounding errors, which are most of this gradient
        softcap = new.get("softcap", case.softcap)
        # under a smaller one the divergence is below the rounding of two logarithms of V
        new["softcap"] = new["teacher_softcap"] = None if softcap is None else max(softcap, 0.1)
    if case.teacher in ("probs", "sparse probs"):
        new |= {"teacher_scale": None, "teacher_softcap": None}  # refused by name: they apply to the teacher's logits
    if case.teacher == "sparse probs" and case.kind == "nla":
        # documented: the loss is inf and its gradient nan if the acceptance rate is 0, or below 2^-126 on a GPU
        new["data"] = "zipf" if case.data in ("large", "huge") else case.data
        new["weight_layout"] = "rows" if case.weight_layout == "expanded" else case.weight_layout
    return replace(case, **new)


def newer_options(case: Case) -> dict:
    """The options that the function and the mode have, and the combinations that are not allowed."""
    new: dict = {}
    if case.function not in ("cross_entropy", "metrics", "log_probs", "token_loss"):
        new["topk"] = 0
    if case.function not in ("metrics", "log_probs"):
        new["metrics"] = ()
    if case.function != "log_probs":
        new["tail"] = False
    shifting = ("cross_entropy", "metrics", "log_probs", "kl_div", "given_logits")
    topk = new.get("topk", case.topk)
    if case.function not in shifting or topk or not case.tokens or case.mode == "vmap":
        new["shift"] = False
    if topk and case.function == "metrics":
        new["metrics"] = tuple(name for name in case.metrics if name in METRICS) or ("lse",)
    if topk or case.label_smoothing or case.z_loss:
        new["V"] = max(case.V, 2)  # with one class the gradient is 0 up to rounding, or z_loss's beside it
    special = case.function == "cross_entropy" and not topk
    if not special or case.mode not in SPARSE_MODES or case.dtype not in ("float32", "float64") or case.autocast:
        new["sparse"] = ""
    elif case.sparse:
        new |= {"main_grad": "", "learnt": ""}
    new["class_order"] = case.class_order and bool(new.get("sparse", case.sparse))  # without a threshold it is refused
    if not special or case.mode not in BUFFER_MODES:
        new["main_grad"] = ""
    elif case.main_grad and not case.sparse:
        new["wants"] = tuple(sorted({*case.wants, "weight"}))
        new["views"] = tuple(name for name in case.views if name != "weight")
    if not new.get("main_grad", case.main_grad) and case.mode.endswith("zeroed"):
        new["mode"] = "backward"
    return new


def can_be_learnt(case: Case) -> bool:
    if case.sparse:
        return False
    if case.mode.startswith("compile") and (case.learnt in ("softcap", "z_loss") or case.softcap is not None):
        return False  # Dynamo wraps the error
    if case.learnt == "z_loss":
        return case.function in ("cross_entropy", "metrics")
    if case.learnt == "temperature":
        return case.function in ("cross_entropy", "metrics", "log_probs", "policy", "token_loss")
    return case.function not in ("head", "loss_module", "given_logits")


def possible_relations(case: Case) -> set[str]:
    kept = set(case.relations)
    if case.function in ("policy", "token_loss"):  # the old log-probabilities are computed from the leaves
        kept &= {"penalty", "two calls", "token_weight of input", "token_weight of weight", "normalizer of input"}
        kept |= {"normalizer of token_weight"} & set(case.relations)
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
    for name in ("token_weight", "normalizer"):  # each depends on one tensor only
        kept -= set([relation for relation in sorted(kept) if relation.startswith(f"{name} of")][1:])
    return kept


def simpler(case: Case) -> Iterator[Case]:
    """Yields cases that are one step closer to the simplest."""
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
