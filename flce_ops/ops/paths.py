"""Which path runs, and why: the first row of a table whose conditions all hold.

    LOSS              how a scalar loss makes its gradients          entry/plain.py, distributed/one_pass.py
    RETAIN            whether backward is given logits of forward    ops/autograd.py
    KERNELS           what computes an inner operator                ops/registration.py
    situation -> conditions, by name -> path -> "module:function" of its kernel, imported when it first runs
                                                  -> Choice: what flce_ops.last_path() says, made into words there

A condition looks at a Situation, never at data on a device. flce_ops.explain prints the tables for given arguments,
docs/paths.md has them, and the planner asks them. How Triton then takes the tokens is a table of triton/cut.py.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce_ops.math import kl_div_arguments as kl_div
from flce_ops.math.options import LogitOperands, LogitOptions, LossOptions, LowRankOperands
from flce_ops.math.shards import shard_rows
from flce_ops.meta import retained_columns
from flce_ops.meta.arguments import Arguments, Backward, BackwardInPlace, Forward
from flce_ops.support.table import Condition, Path, choose
from flce_ops.support.torch_private import (
    comes_from_outside_a_traced_graph,
    functorch_is_active,
    root_of,
    saved_tensor_hooks_are_active,
    tracing_a_checkpointed_region,
)
from flce_ops.support.vendor import device_name, made_by_nvidia
from flce_ops.support.workspace import get_retained

ROW_MULTIPLE = 128  # rows of the largest tile of a kernel, which are retained together


class Situation(NamedTuple):
    """What a choice may depend on. The first six are the operator's arguments, the others how it is called."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    empty: bool = False  # no token, or no feature
    one_class: bool = False
    label_smoothing: bool = False
    softcap: bool = False
    wants_gradient: bool = False  # of input, linear_weight or linear_bias
    main_grad: bool = False  # a buffer that the gradient of linear_weight is added to
    functorch: bool = False
    saved_tensor_hooks: bool = False
    checkpoint: bool = False  # a region that AOTAutograd traces and that backward runs again
    handed_over: bool = False  # logits that may be overwritten
    leaf: bool = False  # logits that no operation made, or that keep their gradient
    part: bool = False  # logits that share memory with more than themselves
    vocabulary_dimensions: int = 0  # of the mesh, that shard the vocabulary
    rank_without_classes: bool = False
    trains_weight: bool = False  # of a head with a low-rank pair
    slots: bool = False  # several classes a token
    teacher: torch.dtype | None = None  # of a teacher's hidden states
    sparse: bool = False  # a sparse gradient is asked for


class Choice(NamedTuple):
    """A path of an operator, for last_path()."""

    op: str
    path: Path
    situation: Situation

    @property
    def implementation(self) -> str:
        return self.path.name

    def reason(self) -> str:
        """The tensors, and what rules out the paths that come before."""
        situation, paths = self.situation, KERNELS[self.op]
        ruled_out = "; ".join(
            f"{path.name} expects {', '.join(path.ruled_out_by(situation))}" for path in paths[: paths.index(self.path)]
        )
        return f"{device_name(situation.device)} tensors in {situation.dtype}" + (ruled_out and f" ({ruled_out})")


NVIDIA = Condition("an NVIDIA GPU", lambda s: s.device == "cuda" and made_by_nvidia())
HALF_DTYPES = (torch.bfloat16, torch.float16)
HALF = Condition("half operands", lambda s: s.dtype in HALF_DTYPES)
NOT_FLOAT16 = Condition("another dtype than float16", lambda s: s.dtype != torch.float16)
NOT_EMPTY = Condition("tokens", lambda s: not s.empty)
RANK_ONE = Condition("no label smoothing under a softcap", lambda s: not (s.label_smoothing and s.softcap))
RANK_ONE_IN_TRITON = Condition(  # whatever the sizes, which ranks may not share
    f"{RANK_ONE.name} (in Triton)", lambda s: RANK_ONE.holds(s) or not (NVIDIA.holds(s) and HALF.holds(s))
)
CLASSES = Condition("more than one class", lambda s: not s.one_class)
# One class has probability 1 and loss 0: exactly so only where both come from one product, as in ATen.
TRITON = (NVIDIA, HALF, NOT_EMPTY, CLASSES)

WANTS_GRADIENT = Condition("a gradient of input, linear_weight or linear_bias", lambda s: s.wants_gradient)
SPARSE = Condition("gradient_threshold", lambda s: s.sparse)
# A forward without a backward must leave it alone, and the factor of what is added is known in backward.
NO_MAIN_GRAD = Condition("no main_grad", lambda s: not s.main_grad)
NO_FUNCTORCH = Condition("no torch.func transform", lambda s: not s.functorch)
NO_HOOKS = Condition("no saved-tensor hooks (a checkpoint's)", lambda s: not s.saved_tensor_hooks)
NO_CHECKPOINT = Condition("no checkpointed region", lambda s: not s.checkpoint)
ALL_CLASSES = Condition("the whole vocabulary on each rank", lambda s: s.vocabulary_dimensions == 0)
ONE_DIMENSION = Condition("one mesh dimension that shards the vocabulary", lambda s: s.vocabulary_dimensions == 1)

EVERY_RANK = Condition("classes on every rank", lambda s: not s.rank_without_classes)
ONE_CLASS_A_TOKEN = Condition("one class a token", lambda s: not s.slots)
HALF_TEACHER = Condition("a half teacher", lambda s: s.teacher in (None, *HALF_DTYPES))
KL_DIV = (NVIDIA, HALF, HALF_TEACHER, NOT_EMPTY, EVERY_RANK)  # nothing that differs between ranks

FROZEN = Condition("a linear_weight without a gradient", lambda s: not s.trains_weight)

WANTS_LOGITS = Condition("a gradient of logits", lambda s: s.wants_gradient)
HANDED_OVER = Condition("inplace_backward=True", lambda s: s.handed_over)
NOT_LEAF = Condition(
    "logits that an operation made (in the graph that is compiled), without retain_grad()", lambda s: not s.leaf
)
WHOLE = Condition("logits that are all of their memory", lambda s: not s.part)
HALF_OR_FLOAT32 = Condition("logits in a half dtype or float32", lambda s: s.dtype != torch.float64)
TRITON_OF_LOGITS = (NVIDIA, HALF_OR_FLOAT32, NOT_EMPTY, CLASSES)

# A float16 gradient made in forward would have to fit 40 binades before the loss scale that backward brings is known.
# By the planner's model 4 passes in Triton take 1.02 of the time of 3 in ATen at 8192x4096x128256 on an H200, 0.78 at
# D = 2304, 0.63 at D = 896. A checkpointed region runs its forward twice and would make the gradients twice;
# torch.func's backward always asks for a graph, which gradients made in advance do not have. Label smoothing under a
# softcap goes into the epilogue that makes G, not into one that makes exponentials: 4 passes in Triton take 0.43 of the
# time of 3 in ATen at 4096x2048x128256, 0.62 at 4096x4096x151936.
IN_FORWARD = (NOT_FLOAT16, NO_FUNCTORCH, NO_HOOKS, NO_CHECKPOINT)
MADE_IN_FORWARD = (IN_FORWARD[0], WANTS_GRADIENT, *IN_FORWARD[1:])
OF_OPERANDS = (*MADE_IN_FORWARD, RANK_ONE_IN_TRITON)
OF_LOGITS = (WANTS_LOGITS, *IN_FORWARD)
LOSS = {
    "a scalar loss": (
        Path("one pass", (*OF_OPERANDS, NO_MAIN_GRAD), why="..._with_grad: 3 GEMM passes, gradients in forward"),
        Path(
            "sparse",
            (IN_FORWARD[0], WANTS_GRADIENT, NO_FUNCTORCH, SPARSE),
            why="as one pass, a checkpoint's forward twice: its gradients are not made of logits",
        ),
        Path("recompute", (), why="..._forward: 1 pass; backward makes the logits again, 3 more"),
    ),
    "a scalar loss over a sharded vocabulary": (
        Path(
            "one pass",
            (ONE_DIMENSION, EVERY_RANK, ONE_CLASS_A_TOKEN, *OF_OPERANDS),
            why="..._vocab_parallel_with_grad: 3 passes, one exchange a chunk",
        ),
        Path("recompute", (), why="..._forward of each shard, one exchange of row statistics"),
    ),
    "a scalar loss of a policy": (
        Path(
            "one pass",
            (ALL_CLASSES, WANTS_GRADIENT, *IN_FORWARD),
            why="linear_policy_loss_with_grad: 3 GEMM passes, gradients in forward",
        ),
        Path("recompute", (), why="log-probabilities by ..._forward, and what backward does for those"),
    ),
    "a scalar loss of a head with a low-rank pair": (
        Path("one pass", (FROZEN, *OF_OPERANDS), why="..._low_rank_with_grad: 2 GEMM passes, gradients in forward"),
        Path("concatenated", (), why="the pair as features of input and of a copy of linear_weight"),
    ),
    "a scalar loss of given logits": (
        Path("in place", (*OF_LOGITS, HANDED_OVER, NOT_LEAF, WHOLE), why="..._with_grad_: over the logits, in forward"),
        Path("one pass", OF_LOGITS, why="..._with_grad: the gradient in forward, beside the logits"),
        Path("recompute", (), why="..._forward reads the logits, backward a second time"),
    ),
}

# Of what the Triton kernels retain, z behind the cap, dz/du would be lost where the cap saturates.
UNCAPPED = Condition("no softcap (in Triton)", lambda s: not (s.softcap and in_triton(s)))
# Rounded logits would not be those that lse was made of: of half operands other GPUs hand over float32, and one class
# has loss 0 only where both come from one product.
PRODUCT_KEPT = Condition(
    "an NVIDIA GPU and more than one class, a CPU, or operands that are not half",
    lambda s: in_triton(s) or s.device == "cpu" or not HALF.holds(s),
)
RETAIN = {
    "logits between a forward operator and its backward one": (
        Path(
            "retain",
            (WANTS_GRADIENT, NO_FUNCTORCH, NO_HOOKS, NO_CHECKPOINT, UNCAPPED, PRODUCT_KEPT),
            why="of as many tokens as the bytes of `retained` hold: 3 GEMM passes for these",
        ),
        Path("recompute", (), why="backward makes the logits again: 4"),
    ),
}
KERNELS = {
    "linear_cross_entropy_forward": (
        Path("triton", TRITON, "flce_ops.triton:launch_forward"),
        Path("aten", (), "flce_ops.aten:forward"),
    ),
    "linear_cross_entropy_backward": (
        Path("triton", TRITON, "flce_ops.triton:launch_backward"),
        Path("aten", (), "flce_ops.aten:backward"),
    ),
    "linear_cross_entropy_backward_": (
        Path("triton", TRITON, "flce_ops.triton:launch_backward_in_place"),
        Path("aten", (), "flce_ops.aten:backward_in_place"),
    ),
    # Exponentials that are normalised later need bfloat16's range; label smoothing under a softcap is not of rank 1.
    "linear_cross_entropy_with_grad": (
        Path("triton", (*TRITON, NOT_FLOAT16, RANK_ONE), "flce_ops.triton:launch_with_grad"),
        Path("aten", (), "flce_ops.aten:with_grad"),
    ),
    "linear_cross_entropy_vocab_parallel_with_grad": (
        Path(
            "triton",
            (NVIDIA, HALF, NOT_EMPTY, NOT_FLOAT16, RANK_ONE),  # nothing that differs between ranks
            "flce_ops.triton.vocab_parallel_with_grad:launch_vocab_parallel_with_grad",
        ),
        Path("aten", (), "flce_ops.aten.vocab_parallel_with_grad:vocab_parallel_with_grad"),
    ),
    "linear_cross_entropy_low_rank_with_grad": (Path("aten", (), "flce_ops.aten.low_rank:low_rank_with_grad"),),
    "linear_cross_entropy_double_backward": (Path("aten", (), "flce_ops.aten:double_backward"),),
    "cross_entropy_forward": (
        Path("triton", TRITON_OF_LOGITS, "flce_ops.triton.cross_entropy:launch_forward"),
        Path("aten", (), "flce_ops.aten.cross_entropy:forward"),
    ),
    "cross_entropy_backward": (
        Path("triton", TRITON_OF_LOGITS, "flce_ops.triton.cross_entropy:launch_backward"),
        Path("aten", (), "flce_ops.aten.cross_entropy:backward"),
    ),
    "cross_entropy_with_grad": (
        Path("triton", TRITON_OF_LOGITS, "flce_ops.triton.cross_entropy:launch_with_grad"),
        Path("aten", (), "flce_ops.aten.cross_entropy:with_grad"),
    ),
    "cross_entropy_with_grad_": (
        Path("triton", TRITON_OF_LOGITS, "flce_ops.triton.cross_entropy:launch_with_grad_in_place"),
        Path("aten", (), "flce_ops.aten.cross_entropy:with_grad_in_place"),
    ),
    "linear_policy_loss_with_grad": (
        Path("triton", (*TRITON, NOT_FLOAT16), "flce_ops.triton.policy_with_grad:launch_policy_with_grad"),
        Path("aten", (), "flce_ops.aten.policy_with_grad:policy_with_grad"),
    ),
    "linear_kl_div_forward": (
        Path("triton", KL_DIV, "flce_ops.triton.kl_div:launch_kl_div_forward"),
        Path("aten", (), "flce_ops.aten.kl_div:forward"),
    ),
    "linear_kl_div_backward": (
        Path("triton", KL_DIV, "flce_ops.triton.kl_div:launch_kl_div_backward"),
        Path("aten", (), "flce_ops.aten.kl_div:backward"),
    ),
    "linear_kl_div_with_grad": (
        Path("triton", KL_DIV, "flce_ops.triton.kl_div:launch_kl_div_with_grad"),
        Path("aten", (), "flce_ops.aten.kl_div:with_grad"),
    ),
}


def in_triton(situation: Situation) -> bool:
    return choose(KERNELS["linear_cross_entropy_backward"], situation).name == "triton"


def retained_rows(call: Forward) -> int:
    """Rows whose logits a call of the forward operator, whose gradient may be asked for, keeps for backward."""
    input, linear_weight, _, linear_bias, _ = call.operands
    situation = loss_situation(input, linear_weight, linear_bias)._replace(
        one_class=linear_weight.shape[0] == 1,
        softcap=call.logits.softcap is not None,
        slots=call.operands.target.dim() == 2,
    )
    return rows_to_retain(situation, input.shape[0], linear_weight.shape[0])


def retained_notes(choice: "Choice", call: Arguments) -> tuple[str, ...]:
    """For last_path(): how many rows, and what of the call alone rules it out."""
    if isinstance(call, Forward) and call.retain:
        rows = call.retain
    elif isinstance(call, Backward):
        rows = 0 if call.retained is None else call.retained.shape[0]
    else:
        return ()
    note = f"logits of {rows} of {call.operands.input.shape[0]} tokens retained"
    if isinstance(call, BackwardInPlace):
        note = f"grad_linear_weight added to main_grad in {call.main_grad.dtype}, {note}"
    expected = [] if rows else [c.name for c in (UNCAPPED, PRODUCT_KEPT) if not c.holds(choice.situation)]
    return (f"{note} (expects {', '.join(expected)})" if expected else note,)


def rows_to_retain(situation: Situation, tokens: int, num_classes: int) -> int:
    """An expression of N and of a constant, the bytes in force now, where N is a symbol."""
    (paths,) = RETAIN.values()
    if choose(paths, situation).name == "recompute":
        return 0
    fitting = get_retained() // (2 * retained_columns(num_classes, situation.dtype))
    return torch.sym_min(tokens, fitting // ROW_MULTIPLE * ROW_MULTIPLE)


def choice_of(op: str, call: Arguments) -> Choice:
    """The path that a call of an inner operator takes."""
    situation = situation_of(call)
    return Choice(op, choose(KERNELS[op], situation), situation)


@functools.cache
def function(kernel: str) -> Callable:
    module, name = kernel.split(":")
    return getattr(importlib.import_module(module), name)


def situation_of(call: Any) -> Situation:
    """Of an inner operator's call: Arguments with operands, perhaps with options of the loss and of the logits."""
    if isinstance(call.operands, kl_div.Operands):
        return kl_div_situation(call.operands, call.options)
    operands, groups = call.operands, vars(call)
    if isinstance(operands, LogitOperands):
        input, num_classes = operands.logits, operands.logits.shape[1]
    else:
        input, num_classes = operands.input, operands.linear_weight.shape[0]
    situation = Situation(input.device.type, input.dtype, input.numel() == 0, num_classes == 1)
    options = options_in_situation(groups.get("loss", LossOptions()), groups.get("logits", LogitOptions()))
    return situation._replace(**options, slots=operands.target.dim() == 2)


def kl_div_situation(operands: kl_div.Operands, options: kl_div.Options) -> Situation:
    input, teacher = operands.input, operands.teacher_input
    situation = Situation(
        input.device.type,
        input.dtype,
        input.numel() == 0 or (teacher is not None and teacher.numel() == 0),
        teacher=None if teacher is None else teacher.dtype,
    )
    if options.vocab_size is None:
        return situation
    return situation._replace(**sharding_of([True], [options.ranks], options.vocab_size))


def loss_situation(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, **known) -> Situation:
    """Of a scalar loss, before its operator is known, and what else is known of it."""
    return Situation(
        device=input.device.type,
        dtype=input.dtype,
        wants_gradient=needs_gradient(input) or needs_gradient(linear_weight) or needs_gradient(linear_bias),
        functorch=functorch_is_active(),
        saved_tensor_hooks=saved_tensor_hooks_are_active(),
        checkpoint=tracing_a_checkpointed_region(),
        **known,
    )


def given_logits_situation(logits: Tensor, handed_over: bool) -> Situation:
    """Of a scalar loss of these logits, which may be a view of all of another tensor."""
    root = root_of(logits)
    whole = logits.is_contiguous() and root.is_contiguous() and root.numel() == logits.numel() > 0
    as_stored = root.dtype == logits.dtype and root.is_neg() == logits.is_neg()
    return Situation(
        device=logits.device.type,
        dtype=logits.dtype,
        wants_gradient=needs_gradient(logits),
        functorch=functorch_is_active(),
        saved_tensor_hooks=saved_tensor_hooks_are_active(),
        checkpoint=tracing_a_checkpointed_region(),
        handed_over=handed_over,
        # a gradient that is retained would move to what is written over it
        leaf=root.is_leaf or root.retains_grad or comes_from_outside_a_traced_graph(root),
        part=not (whole and as_stored),
    )


def sharding_of(vocabulary: Sequence[bool], ranks: Sequence[int], num_classes: int) -> dict[str, Any]:
    """Of a mesh: whether each dimension shards the vocabulary, and its size. All ranks must come to one answer."""
    sizes = [size for size, shards_it in zip(ranks, vocabulary) if shards_it]
    without = len(sizes) == 1 and shard_rows(num_classes, sizes[0]) * (sizes[0] - 1) >= num_classes
    return {"vocabulary_dimensions": len(sizes), "rank_without_classes": without}


def gradients_in_the_same_pass(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, **known) -> bool:
    """Whether a scalar loss makes its gradients during forward: 3 GEMM passes instead of 4."""
    situation = loss_situation(input, linear_weight, linear_bias, **known)
    return choose(LOSS["a scalar loss"], situation).name != "recompute"


def options_in_situation(loss: LossOptions, logits: LogitOptions) -> dict[str, Any]:
    return {"label_smoothing": loss.label_smoothing != 0.0, "softcap": logits.softcap is not None}


def policy_in_one_pass(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> bool:
    """The same of a policy's, of plain tensors or of tokens that ranks share."""
    return (
        choose(LOSS["a scalar loss of a policy"], loss_situation(input, linear_weight, linear_bias)).name == "one pass"
    )


def pair_in_one_pass(operands: LowRankOperands, **known) -> bool:
    """Whether a scalar loss of a head with a low-rank pair has an operator of its own."""
    input, linear_weight, pair_input, pair_weight, _, linear_bias, _ = operands
    situation = loss_situation(input, linear_weight, linear_bias, **known)._replace(
        wants_gradient=any(map(needs_gradient, (input, pair_input, pair_weight, linear_bias))),
        trains_weight=needs_gradient(linear_weight),
    )
    return choose(LOSS["a scalar loss of a head with a low-rank pair"], situation).name == "one pass"


def path_of_given_logits(logits: Tensor, handed_over: bool) -> str:
    """How a scalar loss of them makes their gradient."""
    return choose(LOSS["a scalar loss of given logits"], given_logits_situation(logits, handed_over)).name


def needs_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
