"""The object that replaces the logits in an output. It says why they are not there.

None cannot replace the logits. Code that finds an output's entries by their number, such as Trainer and
return_dict=False, would take the next entry for the logits. And an error about None would not name the cause.
"""

from collections.abc import Iterator

from ...support import torch_private

MESSAGE = (
    "this output has no logits: flce_ops has patched the model, and its loss was computed without them. Call the model "
    "without labels, patch it with patch(model, eval_logits=True) to have logits beside the loss in eval mode, or "
    "unpatch it"
)


class LogitsNotComputed:
    """Refuses every use as a tensor. Libraries that carry outputs can pass it on: pickle, copies, accelerate, DDP,
    FSDP.
    """

    def __init__(self, *parts: object) -> None:
        """Takes any arguments, because DataParallel makes one object from those of its replicas."""

    def __repr__(self) -> str:
        return "<logits not computed: flce_ops has patched the model>"

    def __reduce__(self) -> str:
        return "LOGITS_NOT_COMPUTED"

    def __getattr__(self, name: str):
        raise AttributeError(MESSAGE)  # accelerate calls hasattr for a dtype

    def __iter__(self) -> Iterator:
        raise RuntimeError(MESSAGE)
        # makes this a generator, which raises at its first item: DataParallel makes an iterator and reads no item
        yield

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(MESSAGE)  # with a TypeError, `tensor == logits` would be False


def refuse(self, *args):
    raise RuntimeError(MESSAGE)


OPERATORS = "array bool len getitem setitem contains float int neg abs lt le gt ge".split()
BINARY = "add sub mul matmul truediv floordiv mod pow".split()
for operator in (*OPERATORS, *BINARY, *(f"r{name}" for name in BINARY)):
    setattr(LogitsNotComputed, f"__{operator}__", refuse)

LOGITS_NOT_COMPUTED = LogitsNotComputed()
torch_private.register_without_leaves(LOGITS_NOT_COMPUTED)
