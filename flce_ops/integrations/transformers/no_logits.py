"""What stands in an output where the logits would: an object that says why they are not there.

None would do in no place: whoever counts the entries of an output, as Trainer and return_dict=False do, would take the
next one for the logits, and an error about None names nothing.
"""

from collections.abc import Iterator

from ...support import torch_private

MESSAGE = (
    "this output has no logits: flce_ops has patched the model, and its loss was computed without them. Call the model "
    "without labels, patch it with patch(model, eval_logits=True) to have logits beside the loss in eval mode, or "
    "unpatch it"
)


class LogitsNotComputed:
    """Refuses every use as a tensor. Passes through what carries outputs: pickle, copies, accelerate, DDP, FSDP."""

    def __init__(self, *parts: object) -> None:
        """DataParallel makes one from those of its replicas."""

    def __repr__(self) -> str:
        return "<logits not computed: flce_ops has patched the model>"

    def __reduce__(self) -> str:
        return "LOGITS_NOT_COMPUTED"

    def __getattr__(self, name: str):
        raise AttributeError(MESSAGE)  # accelerate asks whether there is a dtype

    def __iter__(self) -> Iterator:
        raise RuntimeError(MESSAGE)
        yield  # a generator raises at its first item: DataParallel makes an iterator and reads none

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(MESSAGE)  # a TypeError would make `tensor == logits` False


def refuse(self, *args):
    raise RuntimeError(MESSAGE)


OPERATORS = "array bool len getitem setitem contains float int neg abs lt le gt ge".split()
BINARY = "add sub mul matmul truediv floordiv mod pow".split()
for operator in (*OPERATORS, *BINARY, *(f"r{name}" for name in BINARY)):
    setattr(LogitsNotComputed, f"__{operator}__", refuse)

LOGITS_NOT_COMPUTED = LogitsNotComputed()
torch_private.register_without_leaves(LOGITS_NOT_COMPUTED)
