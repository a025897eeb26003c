"""Which path runs, and why: the first row of a table whose conditions all hold.

    LOSS              how a scalar loss makes its gradients          entry/, distributed/vocab_parallel.py
    KERNELS           what computes an inner operator                ops/__init__.py
    SAVE_LOGITS       whether backward is given logits of forward    saved_logits.py
    facts -> conditions, by name -> path -> ".module:function" of its kernel, imported when it first runs
                                                  -> Choice: what flce_ops.last_path() says, made into words there

A condition reads CallFacts, never data on a device. docs/kernels.md shows the tables. How Triton divides the tokens is
in triton/steps/chunks.py. float16's rule is a condition, NOT_FLOAT16: its gradients are made in backward, which knows
the loss scale.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..math.options import KlDivOperands, KlDivOptions, TokenLosses
from ..math.statistics import shard_rows
from ..support import made_by_nvidia, torch_private
from ..support.path import Choice, Condition, PathRow, choose
from ..support.workspace import gradients_are_left_to_backward


class CallFacts(NamedTuple):
    """What a choice of path may depend on: the operator's arguments, and the surrounding gradients, transforms and
    ranks.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    empty: bool = False  # no tokens, or no features
    one_class: bool = False
    label_smoothing: bool = False
    softcap: bool = False
    wants_gradient: bool = False  # some gradient of input, linear_weight or linear_bias is wanted
    main_grad: bool = False  # there is a buffer to which the gradient of linear_weight is added
    left_to_backward: bool = False  # gradients_in_backward()
    functorch: bool = False
    saved_tensor_hooks: bool = False
    checkpoint: bool = False  # AOTAutograd traces a checkpointed region, which backward runs again
    handed_over: bool = False  # the caller allows the operator to overwrite the logits
    leaf: bool = False  # the logits are a leaf of autograd, or retain_grad() was called on them
    part: bool = False  # the logits share memory with a larger tensor
    vocabulary_dimensions: int = 0  # mesh dimensions that shard the vocabulary
    rank_without_classes: bool = False
    topk: bool = False  # several classes per token
    teacher: torch.dtype | None = None  # dtype of a teacher's hidden states
    sparse: bool = False  # a sparse gradient is asked for
    entropy: bool = False  # a token function reads the entropy
    given_logits: bool = False  # there is no head
    beyond: bool = False  # more of given logits than losses of one class a token, and the argmax


# What is not asked of given logits: fields of Forward, Backward and WithGrad that are None or False elsewhere.
BEYOND = ("expected_log_prob", "log_sum_sq_probs", "mean_logit", "grad_expected_log_prob", "vocab_size", "function")


def facts_of(call: Any) -> CallFacts:
    """The facts of an inner operator's call, whose Arguments have operands and perhaps options of the loss and the
    logits.
    """
    operands, groups = call.operands, vars(call)
    if isinstance(operands, KlDivOperands):
        return kl_div_facts(operands, call.options)
    first, sparse, softcap = operands[0], groups.get("sparse"), call.logits.softcap is not None
    one_class = operands.num_classes == 1 and groups.get("group") is None  # all ranks must choose the same path
    known: dict[str, Any] = {"softcap": softcap, "topk": operands.target.dim() == 2}
    if operands.linear_weight is None:
        asked = any(groups.get(name) is not None and groups[name] is not False for name in BEYOND)
        known["given_logits"], known["beyond"] = True, asked or known["topk"] or any(groups.get("statistics", ())[1:])
    if "loss" in groups:
        known["label_smoothing"] = call.loss.label_smoothing != 0.0
    elif "cotangents" in groups:
        known["label_smoothing"] = call.cotangents.grad_logit_sum is not None
    if "output_mask" in groups and sparse is not None and sparse.gradient_threshold:
        known["sparse"] = any(sparse.products(call.output_mask))
    return CallFacts(first.device.type, first.dtype, first.numel() == 0, one_class, **known)


def kl_div_facts(operands: KlDivOperands, options: KlDivOptions) -> CallFacts:
    input, teacher, num_classes = operands.input, operands.teacher_input, options.vocab_size
    sharding: dict[str, Any] = {} if num_classes is None else sharding_of([True], [options.ranks], num_classes)
    return CallFacts(
        input.device.type,
        input.dtype,
        input.numel() == 0 or (teacher is not None and teacher.numel() == 0),
        (operands.linear_weight.shape[0] if num_classes is None else num_classes) == 1,
        teacher=None if teacher is None else teacher.dtype,
        **sharding,
    )


def loss_facts(input: Tensor, *leaves: Tensor | None, **known) -> CallFacts:
    """The facts of a scalar loss, before its operator is known: the surroundings, and how gradients of `input` and
    `leaves`, if wanted, will be requested. `known` holds further facts.
    """
    wanted = input.requires_grad
    for leaf in leaves:
        wanted |= leaf is not None and leaf.requires_grad
    return CallFacts(
        input.device.type,
        input.dtype,
        wants_gradient=wanted and torch.is_grad_enabled(),
        left_to_backward=gradients_are_left_to_backward(),
        functorch=torch_private.functorch_is_active(),
        saved_tensor_hooks=torch_private.saved_tensor_hooks() is not None,
        checkpoint=torch_private.metadata_of_trace().get("recompute") is not None,
        **known,
    )


def given_logits_facts(logits: Tensor, handed_over: bool) -> CallFacts:
    """The facts of a scalar loss of these logits. `logits` may be a view that covers another tensor completely."""
    root = torch_private.root_of(logits)
    try:
        whole = logits.is_contiguous() and root.is_contiguous() and root.numel() == logits.numel()
    except RuntimeError:  # depends on a number of tokens that only the run knows
        whole = False
    as_stored = root.dtype == logits.dtype and root.is_neg() == logits.is_neg()
    # if the gradient is retained, it would be retained on the tensor that overwrites the logits
    leaf = root.is_leaf or root.retains_grad or torch_private.comes_from_outside_a_traced_graph(root)
    return loss_facts(logits, handed_over=handed_over, leaf=leaf, part=not (whole and as_stored))


def sharding_of(vocabulary: Sequence[bool], ranks: Sequence[int], num_classes: int) -> dict[str, Any]:
    """The facts of a mesh. `vocabulary` says for each mesh dimension whether it shards the vocabulary, `ranks` is its
    size. All ranks must get the same answer.
    """
    sizes = [size for size, shards_it in zip(ranks, vocabulary) if shards_it]
    without = len(sizes) == 1 and shard_rows(num_classes, sizes[0]) * (sizes[0] - 1) >= num_classes
    return {"vocabulary_dimensions": len(sizes), "rank_without_classes": without}


def gradients_wanted(operands: Any) -> list[bool]:
    """Which gradients are wanted, as an output_mask: of input, linear_weight, linear_bias."""
    if not torch.is_grad_enabled():
        return [False, False, False]
    input, weight, bias = operands.input, operands.linear_weight, operands.linear_bias
    of_weight, of_bias = weight is not None and weight.requires_grad, bias is not None and bias.requires_grad
    return [input.requires_grad, of_weight, of_bias]


def needs_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


PACKAGE = __package__.rpartition(".")[0]  # the package of the modules in the tables; its name may differ

NVIDIA = Condition("an NVIDIA GPU", lambda s: s.device == "cuda" and made_by_nvidia())
HALF_DTYPES = (torch.bfloat16, torch.float16)
HALF = Condition("half operands", lambda s: s.dtype in HALF_DTYPES)
NOT_FLOAT16 = Condition("another dtype than float16", lambda s: s.dtype != torch.float16)
NOT_EMPTY = Condition("tokens", lambda s: not s.empty)
# without a softcap, label smoothing adds a product of a column and a row to G
RANK_ONE = Condition("no label smoothing under a softcap", lambda s: not (s.label_smoothing and s.softcap))
RANK_ONE_IN_TRITON = Condition(  # all ranks must choose the same path, so this ignores their sizes
    f"{RANK_ONE.name} (in Triton)", lambda s: RANK_ONE.holds(s) or not (NVIDIA.holds(s) and HALF.holds(s))
)
CLASSES = Condition("more than one class", lambda s: not s.one_class)
# One class has probability 1 and loss 0. The loss is exactly 0 only if the target's logit and lse come from one
# product, as in ATen.
TRITON = (NVIDIA, HALF, NOT_EMPTY, CLASSES)

# The lists of a sparse gradient contain l p and the target's entry, but no label smoothing.
UNSMOOTHED = Condition("no label smoothing with gradient_threshold", lambda s: not (s.sparse and s.label_smoothing))
ONE_CLASS_IF_SPARSE = Condition("one class a token with gradient_threshold", lambda s: not (s.sparse and s.topk))

WANTS_GRADIENT = Condition("a gradient of input, linear_weight or linear_bias", lambda s: s.wants_gradient)
SPARSE = Condition("gradient_threshold", lambda s: s.sparse)
NOT_SPARSE = Condition("no gradient_threshold", lambda s: not s.sparse)
# The gradient of an entropy is a matrix that row factors on the operands cannot make from exponentials.
NO_ENTROPY = Condition("a function that does not read entropy", lambda s: not s.entropy)
# Forward must not add to main_grad: there may be no backward, and grad_output, which multiplies the gradient, is known
# only in backward.
NO_MAIN_GRAD = Condition("no main_grad", lambda s: not s.main_grad)
# Forward cannot notice that a pipeline will ask for the gradients one by one: torch's schedules call the loss as anyone
# does. Backward notices, but then both are made. So the caller says it, once for all losses inside a block: an argument
# would have to pass through every trainer that calls the loss.
NOT_LEFT_TO_BACKWARD = Condition("no gradients_in_backward()", lambda s: not s.left_to_backward)
NO_FUNCTORCH = Condition("no torch.func transform", lambda s: not s.functorch)
NO_HOOKS = Condition("no saved-tensor hooks (a checkpoint's)", lambda s: not s.saved_tensor_hooks)
NO_CHECKPOINT = Condition("no checkpointed region", lambda s: not s.checkpoint)
ALL_CLASSES = Condition("the whole vocabulary on each rank", lambda s: s.vocabulary_dimensions == 0)
ONE_DIMENSION = Condition("one mesh dimension that shards the vocabulary", lambda s: s.vocabulary_dimensions == 1)

EVERY_RANK = Condition("classes on every rank", lambda s: not s.rank_without_classes)
ONE_CLASS_A_TOKEN = Condition("one class a token", lambda s: not s.topk)
HALF_TEACHER = Condition("a half teacher", lambda s: s.teacher in (None, *HALF_DTYPES))
KL_DIV = (NVIDIA, HALF, HALF_TEACHER, NOT_EMPTY, CLASSES, EVERY_RANK)  # only conditions that are the same on all ranks


WANTS_LOGITS = Condition("a gradient of logits", lambda s: s.wants_gradient)
HANDED_OVER = Condition("inplace_backward=True", lambda s: s.handed_over)
NOT_LEAF = Condition(
    "logits that an operation made (in the graph that is compiled), without retain_grad()", lambda s: not s.leaf
)
WHOLE = Condition("logits that are all of their memory", lambda s: not s.part)
HALF_OR_FLOAT32 = Condition("logits in a half dtype or float32", lambda s: s.dtype != torch.float64)
NOT_BEYOND = Condition("losses of one class a token, and the argmax alone", lambda s: not s.beyond)
TRITON_OF_LOGITS = (NVIDIA, HALF_OR_FLOAT32, NOT_EMPTY, CLASSES, NOT_BEYOND)

# A float16 gradient made in forward would need a range of 40 binades, because the loss scale is known only in backward.
# So float16 takes 4 passes in Triton. According to a model of the GEMMs, at 8192x4096x128256 on an H200, they take 1.02
# times as long as 3 passes in ATen; 0.78 at D = 2304, 0.63 at D = 896. A checkpointed region runs its forward twice and
# would make the gradients twice. torch.func's backward always asks for a graph, which gradients made in forward do not
# have. Label smoothing under a softcap fits the epilogue that makes G, but not the one that makes exponentials: 4
# passes in Triton take 0.43 of the time of 3 in ATen at 4096x2048x128256, 0.62 at 4096x4096x151936.
IN_FORWARD = (NOT_FLOAT16, NO_FUNCTORCH, NO_HOOKS, NO_CHECKPOINT)
MADE_IN_FORWARD = (WANTS_GRADIENT, NOT_LEFT_TO_BACKWARD, *IN_FORWARD)
OF_OPERANDS = (*MADE_IN_FORWARD, RANK_ONE_IN_TRITON)
SPARSE_IN_FORWARD = (NOT_FLOAT16, WANTS_GRADIENT, NOT_LEFT_TO_BACKWARD, NO_FUNCTORCH, SPARSE)
OF_LOGITS = (WANTS_LOGITS, *IN_FORWARD)
LOSS = {
    "a scalar loss": (
        PathRow("one pass", (*OF_OPERANDS, NO_MAIN_GRAD)),
        PathRow("sparse", SPARSE_IN_FORWARD),
        PathRow("recompute", ()),
    ),
    "a scalar loss over a sharded vocabulary": (
        PathRow("one pass", (ONE_DIMENSION, EVERY_RANK, ONE_CLASS_A_TOKEN, *OF_OPERANDS)),
        PathRow("recompute", ()),
    ),
    "a scalar loss of token functions": (
        PathRow("one pass", (ALL_CLASSES, NOT_SPARSE, NO_ENTROPY, *MADE_IN_FORWARD)),
        PathRow("recompute", ()),
    ),
    "a scalar loss of given logits": (
        PathRow("in place", (*OF_LOGITS, HANDED_OVER, NOT_LEAF, WHOLE)),
        PathRow("one pass", OF_LOGITS),
        PathRow("recompute", ()),
    ),
}


def kernels(conditions: tuple[Condition, ...], in_triton: str, in_aten: str) -> tuple[PathRow, ...]:
    """Two paths: the Triton kernel if the conditions hold, otherwise the ATen kernel. Each kernel is named as
    ".module:function" in its folder.
    """
    return PathRow("triton", conditions, f".triton{in_triton}"), PathRow("aten", (), f".aten{in_aten}")


KERNELS = {
    "linear_cross_entropy_forward": kernels(TRITON, ":launch_forward", ".cross_entropy:forward"),
    "linear_cross_entropy_backward": kernels(
        (*TRITON, UNSMOOTHED, ONE_CLASS_IF_SPARSE), ":launch_backward", ".cross_entropy:backward"
    ),
    "linear_cross_entropy_backward_": kernels(TRITON, ":launch_backward_in_place", ".cross_entropy:backward_in_place"),
    # Exponentials are normalised after they are stored, which needs bfloat16's range. Under a softcap, label smoothing
    # adds a matrix that is not of rank 1.
    "linear_cross_entropy_with_grad": kernels(
        (*TRITON, NOT_FLOAT16, RANK_ONE, UNSMOOTHED), ":launch_with_grad", ".cross_entropy:with_grad"
    ),
    "cross_entropy_forward": kernels(
        TRITON_OF_LOGITS, ".logits.cross_entropy:launch_forward", ".cross_entropy:forward"
    ),
    "cross_entropy_backward": kernels(
        TRITON_OF_LOGITS, ".logits.cross_entropy:launch_backward", ".cross_entropy:backward"
    ),
    "cross_entropy_with_grad": kernels(
        TRITON_OF_LOGITS, ".logits.cross_entropy:launch_with_grad", ".cross_entropy:with_grad"
    ),
    "cross_entropy_with_grad_": kernels(
        TRITON_OF_LOGITS,
        ".logits.cross_entropy:launch_with_grad_in_place",
        ".cross_entropy:with_grad_in_place",
    ),
    "linear_kl_div_forward": kernels(KL_DIV, ".logits.kl_div:launch_kl_div_forward", ".kl_div:forward"),
    "linear_kl_div_backward": kernels(KL_DIV, ".logits.kl_div:launch_kl_div_backward", ".kl_div:backward"),
    "linear_kl_div_with_grad": kernels(KL_DIV, ".logits.kl_div:launch_kl_div_with_grad", ".kl_div:with_grad"),
}


def in_triton(facts: CallFacts) -> bool:
    return choose(KERNELS["linear_cross_entropy_backward"], facts).name == "triton"


@functools.cache
def choice_of(op: str, facts: CallFacts) -> Choice:
    """The path that a call of an inner operator takes."""
    op = op.removeprefix("linear_") if facts.given_logits else op  # its rows are apart
    paths = KERNELS[op]
    return Choice(op, paths, choose(paths, facts), facts)


@functools.cache
def function(kernel: str) -> Callable:
    module, name = kernel.split(":")
    found = getattr(importlib.import_module(module, PACKAGE), name)
    run = getattr(found, "of_call", found)
    if not module.startswith(".triton"):
        return run
    return importlib.import_module(".triton.first_call", PACKAGE).compiled_first(run)


@functools.cache
def path_of_loss(title: str, facts: CallFacts) -> str:
    return choose(LOSS[title], facts).name


def gradients_in_the_same_pass(problem: TokenLosses, title: str = "a scalar loss", **known) -> bool:
    """Whether a scalar loss makes its gradients during forward: 3 GEMM passes instead of 4."""
    input, linear_weight, _, linear_bias, *_ = problem.operands
    known["label_smoothing"], known["softcap"] = problem.loss.label_smoothing != 0.0, problem.logits.softcap is not None
    return path_of_loss(title, loss_facts(input, linear_weight, linear_bias, **known)) != "recompute"
