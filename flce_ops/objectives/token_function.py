"""A loss of one token that is a user's function, and its derivatives. It runs between the logits GEMM and the two
gradient GEMMs, on the numbers of a chunk's tokens.

    @flce_ops.token_loss
    def focal(log_prob, gamma):
        return -((1 - log_prob.exp()) ** gamma) * log_prob

    mapped by torch.func.vmap      loss_i = focal(log_prob_i, gamma)
    autograd                       d loss_i / d log_prob_i, and by lse_i or entropy_i if the function reads these

vmap refuses what a function of one token cannot do: read another token's numbers, draw random numbers, branch on a
value, or read one on the host. An operator takes the function's name, because schemas have no functions:

    registered     by @token_loss, for torch.compile, torch.export and direct calls of operators; kept
    of an eager call, any callable, even a lambda; kept while a call or its backward needs it

As a row objective, ATen calls FunctionObjective for a block of rows. In Triton a kernel finds the row numbers, the
function runs on these (triton/rows/row_numbers.py), and the kernel that finishes rows reads the results, GivenLosses.
"""

import functools
import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..support.compile_cache import add_function_to_key, digest_of_function
from ..support.refusals import refuse_hole
from ..support.torch_private import functorch_is_active, with_autograd, with_transforms, with_unwrapped
from .cross_entropy import RowFunction, RowObjective, Slope, of_tokens

# N tokens, n of a chunk, K classes of each

OP = "linear_token_loss"
# What a function may read beside log_prob, as keyword-only parameters of these names; and what it reads where no token
# counts. Its result there is dropped, but autograd would spread a nan: log_prob = 0 makes log(1 - p) infinite.
HARMLESS = {"log_prob": -1.0, "entropy": 1.0, "lse": 0.0}
ROW_NUMBERS = ("entropy", "lse")


class Slopes(NamedTuple):
    """The derivatives of the losses."""

    log_prob: Tensor  # (n,) or (n, K)
    lse: Tensor | None = None  # (n,), at a fixed log_prob; None if the function does not read lse


class TokenLoss:
    """A function of one token, with the name that operators take. Calling it calls the function."""

    def __init__(
        self,
        function: Callable,
        name: str,
        *,
        op: str = OP,  # named in errors
        compile: bool = False,
        by_vector: bool = False,  # the function takes the numbers of all tokens, and treats each one alone
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.name, self.op, self.by_vector = function, name, op, by_vector
        positional, keywords = parameters_of(function)
        self.names = positional[1:]  # of the tensors, in errors
        self.reads = tuple(parameter.name for parameter in keywords if parameter.name in ROW_NUMBERS)
        unknown = [p.name for p in keywords if p.default is p.empty and p.name not in ROW_NUMBERS]
        if unknown:
            raise TypeError(
                f"{op}: expected keyword-only parameters of {name} to be {' or '.join(ROW_NUMBERS)}, or to have a "
                f"default, got {', '.join(unknown)}; a tensor or a number is a positional parameter"
            )
        self.ran = False  # and so was checked
        self.compiled = torch.compile(self.by_vjp, dynamic=True) if compile else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def name_of_tensor(self, place: int) -> str:
        return self.names[place] if place < len(self.names) else f"tensors[{place}]"

    def losses_and_slopes(
        self,
        log_prob: Tensor,  # (n,) or (n, K)
        lse: Tensor | None,  # (n,); None if the function does not read it
        tensors: Sequence[Tensor],
        *,
        create_graph: bool = False,
    ) -> tuple[Tensor, Slopes]:  # (n,)
        """With create_graph the results are differentiable. Otherwise they are constants, in an operator's kernel."""
        numbers = [log_prob] if lse is None else [log_prob, lse]
        if create_graph:
            # Views, because log_prob may have been made of lse. Under compiled autograd, AOTAutograd takes what
            # torch.autograd.grad makes for constants, but not what vjp makes.
            return self.by_vjp([number.view_as(number) for number in numbers], list(tensors))
        with with_autograd():
            numbers = [own(number).detach() for number in numbers]
            if self.compiled is not None and self.ran and log_prob.shape[0]:
                with torch.no_grad():
                    return self.compiled(numbers, [own(tensor) for tensor in tensors])
            numbers = [number.requires_grad_() for number in numbers]
            losses = self.losses(numbers, tensors)
            ones = losses.new_ones(()).expand_as(losses)
            found = torch.autograd.grad(losses, numbers, ones, materialize_grads=True)
            self.ran = True
            return losses.detach(), Slopes(*found)

    def by_vjp(self, numbers: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor, Slopes]:
        """The losses and slopes, by functions that torch.compile traces."""
        losses, pull, *_ = torch.func.vjp(lambda *numbers: self.mapped(numbers, tensors), *numbers)
        return losses, Slopes(*pull(torch.ones_like(losses)))

    def losses(self, numbers: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:  # (n,)
        """Losses that are differentiable by `numbers`: log_prob and what the function `reads`."""
        if type(numbers[0]) is not Tensor:  # a tracer's tensor: the graph will contain the function's operations
            add_function_to_key(self.name, self.function)
        losses = self.mapped(numbers, [own(tensor) for tensor in tensors])
        self.refuse_others(losses, numbers)
        if not losses.requires_grad and any(number.requires_grad for number in numbers):
            raise ValueError(
                f"{self.op}: expected the loss of {self.name} to depend on log_prob, got one without a derivative; "
                "does the function detach log_prob?"
            )
        if not self.by_vector and can_be_read(numbers[0]):
            self.check_once(numbers, tensors, losses)
        return losses

    def mapped(self, numbers: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:  # (n,)
        log_prob, count = numbers[0], numbers[0].shape[0]
        if isinstance(count, int) and not count:
            return log_prob.flatten().sum() + log_prob.new_empty(0)
        if self.by_vector:
            return self.function(log_prob, *tensors)
        # expanded, because vmap would let the function branch on a number that all tokens share
        tensors = [tensor if tensor.dim() else tensor.expand(count) for tensor in tensors]
        try:
            with nullcontext() if type(log_prob) is Tensor else with_transforms():
                return torch.func.vmap(self.of_token, randomness="error")(list(numbers), tensors)
        except RuntimeError as error:
            raise RuntimeError(f"{self.op}: {self.name}, a function of one token: {error}") from error

    def of_token(self, numbers: list[Tensor], tensors: list[Tensor]) -> Tensor:  # ()
        loss = self.function(numbers[0], *tensors, **dict(zip(self.reads, numbers[1:])))
        if not isinstance(loss, Tensor) or loss.dim() or not loss.dtype.is_floating_point:
            got = f"shape {tuple(loss.shape)} in {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"{self.op}: expected {self.name} to return a floating 0-d tensor for a token, got {got}")
        return loss.to(numbers[0].dtype)

    def refuse_others(self, losses: Tensor, numbers: Sequence[Tensor]) -> None:
        """Refuses a loss that is differentiable by a tensor which the function closes over. A loss that makes its
        gradients in forward could not give that tensor one.
        """
        read = [tensor for number in numbers for tensor in with_unwrapped(number)]
        seen, leaves = {None, *(tensor.grad_fn for tensor in read)}, {id(tensor) for tensor in read}
        nodes: list[Any] = [tensor.grad_fn for tensor in with_unwrapped(losses)]
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)  # which also keeps torch's object, and so its identity
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in leaves:
                refuse_hole(self.op, "closure", name=self.name, shape=tuple(leaf.shape))
            nodes += [following for following, _ in node.next_functions]

    @torch.no_grad()
    def check_once(self, numbers: Sequence[Tensor], tensors: Sequence[Tensor], losses: Tensor) -> None:
        """Refuses a function that means something else for a vector of tokens, in its first call. x - x.mean() is 0 for
        one token. Functions of several numbers a token are not checked: they may well add these up.
        """
        key, of_numbers = identity_of(self.function), all(t.dim() <= 1 for t in (numbers[0], *tensors))
        if key in checked or losses.shape[0] < 2 or not of_numbers:
            return
        try:
            found = self.function(numbers[0], *tensors, **dict(zip(self.reads, numbers[1:])))
        except Exception:  # it is written for one token alone
            found = losses
        if found.shape != losses.shape or not torch.allclose(found.to(losses.dtype), losses, 1e-3, 1e-5, True):
            raise ValueError(
                f"{self.op}: expected {self.name} to give a vector of tokens what it gives each of them, got another "
                "result; it is called for one token, so a mean or sum over tokens is that token's number: pass what it "
                "needs of other tokens as a tensor"
            )
        checked.add(key)


checked: weakref.WeakSet[Any] = weakref.WeakSet()


def identity_of(function: Callable) -> Any:
    """The code of the function: a lambda may be made anew in each step. Other callables stand for themselves, and so do
    functions that close over one.
    """
    while isinstance(function, functools.partial):
        function = function.func
    cells = getattr(function, "__closure__", None) or ()
    return function if any(callable(cell.cell_contents) for cell in cells) else getattr(function, "__code__", function)


def parameters_of(function: Callable) -> tuple[list[str], list[inspect.Parameter]]:
    """The names of positional parameters, and the keyword-only parameters. Functions of C may not tell theirs."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return [], []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names, [p for p in parameters if p.kind is p.KEYWORD_ONLY]


def can_be_read(tensor: Tensor) -> bool:
    """Whether the host may wait for values: not in a trace or a transform, nor while a CUDA graph is captured."""
    if type(tensor) is not Tensor or tensor.is_meta or functorch_is_active() or torch.compiler.is_compiling():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def own(tensor: Tensor) -> Tensor:
    """A copy of a tensor that was made in inference mode, as roll-outs are: autograd does not save the tensor."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


registered: dict[str, TokenLoss] = {}
_of_calls: weakref.WeakValueDictionary[str, TokenLoss] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def token_loss(function: Callable | None = None, *, name: str | None = None, compile: bool = False) -> Any:
    """Registers a function of one token's log-probability, so that torch.compile and torch.export take
    ``linear_token_loss`` of it. A decorator.

    Args:
        function: as in ``linear_token_loss``.
        name: what operators call the function; None stands for its qualified name. A saved program or a compiled graph
            finds the function by it. A second, different function is refused under a name that is taken.
        compile: let Inductor fuse the mapped function with its derivative. The first call runs as without it; the
            second compiles for some seconds. Worth it if small steps wait for the host. Has an effect where forward
            makes the gradients.

    Returns:
        A callable that ``linear_token_loss`` takes. A call of it calls the function.
    """
    if function is None:
        return functools.partial(token_loss, name=name, compile=compile)
    if not callable(function):
        raise TypeError(f"token_loss: expected a function of one token, got {type(function).__name__}")
    if name is None:
        qualified = getattr(function, "__qualname__", "<lambda>")
        if qualified.endswith("<lambda>"):
            raise TypeError(
                "token_loss: expected name, because a lambda, a partial or an object has no name of its own"
            )
        name = f"{function.__module__}.{qualified}"
    if not re.fullmatch(r"[\w.<>]+", name):
        raise ValueError(f"token_loss: expected name to be a dotted name, got {name!r}")
    taken = registered.get(name)
    if taken is not None and digest_of_function(taken.function) != digest_of_function(function):
        raise ValueError(
            f"token_loss: expected another name than {name!r}, under which a different function is registered; pass "
            "name=, or a number that differs as an argument of the function"
        )
    registered[name] = TokenLoss(function, name, compile=compile)
    return registered[name]


def token_loss_of(function: Any) -> TokenLoss:
    """The token loss that a user passed: a registered one, or any callable in eager mode. Dynamo traces this."""
    if isinstance(function, TokenLoss):
        return function
    if not callable(function):
        raise TypeError(f"{OP}: expected function to be a function of one token, got {type(function).__name__}")
    if torch.compiler.is_compiling():
        raise TypeError(
            f"{OP}: expected function to be registered, because a graph holds its name; decorate it with "
            "@flce_ops.token_loss"
        )
    name = getattr(function, "__qualname__", type(function).__qualname__)
    loss = TokenLoss(function, f"{name}#{next(_numbers)}")
    _of_calls[loss.name] = loss
    return loss


def token_loss_named(name: str) -> TokenLoss:
    found = registered.get(name) or _of_calls.get(name)
    if found is None:
        raise RuntimeError(
            f"{OP}: expected function to be the name of a registered function, got {name!r}; import the module that "
            "registers it with @flce_ops.token_loss"
        )
    return found


def zero_where(ignored: Tensor, tensor: Tensor) -> Tensor:  # (N,), (N, ...)
    """The tensor of a token function, with 0 where no token counts. A 0-d tensor stays."""
    return tensor.masked_fill(ignored.view(-1, *[1] * (tensor.dim() - 1)), 0) if tensor.dim() else tensor


def harmless(name: str, numbers: Tensor, counts: Tensor) -> Tensor:
    """Numbers of rows as a function reads them."""
    return torch.where(counts, numbers, HARMLESS[name])


class FunctionObjective(RowObjective):
    """`options` is a TokenLoss, `tokens` a tuple of its tensors, (N, ...) or (). In ATen `weight` says which targets
    count, (N,) or (N, K) bool.
    """

    bounded = True

    def of(self, rows: slice) -> "FunctionObjective":
        tokens = tuple(tensor[rows] if tensor.dim() else tensor for tensor in self.tokens)
        return self._replace(tokens=tokens, weight=None if self.weight is None else self.weight[rows])

    def losses_and_slopes(
        self, surprisal: Tensor, lse: Tensor, logit_sum: Tensor | None
    ) -> tuple[Tensor, tuple[Slope, Slope]]:
        function, counts, again = self.options, self.weight, torch.is_grad_enabled() and surprisal.requires_grad
        assert counts is not None
        valid = counts.any(-1) if self.soft else counts
        read = harmless("lse", lse, valid) if "lse" in function.reads else None
        log_prob = harmless("log_prob", -surprisal, counts)
        losses, slopes = function.losses_and_slopes(log_prob, read, self.tokens, create_graph=again)
        d_target = torch.where(counts, slopes.log_prob, 0.0)  # a slope may be nan where no token counts
        d_lse = -(d_target.sum(-1) if self.soft else d_target)
        return losses, (d_target, d_lse if slopes.lse is None else d_lse + torch.where(valid, slopes.lse, 0.0))


class LossesOfRows(NamedTuple):
    losses: Tensor  # (n,)
    by_lse: Tensor | None  # (n,)


class GivenLosses(RowObjective):
    """`tokens` is a LossesOfRows, `weight` the derivatives by log_prob, (n,) or (n, K): by rows of the chunk."""

    bounded = True
    by_row = True

    @RowFunction
    def of_target(surprisal, weight, at, given):
        return 0.0 * weight, -weight

    @RowFunction
    def of_row(value, slope, lse, logit_sum, at, given):
        d_lse = slope
        if given.tokens.by_lse is not None:
            d_lse = slope + of_tokens(given.tokens.by_lse, at)
        return of_tokens(given.tokens.losses, at), d_lse
