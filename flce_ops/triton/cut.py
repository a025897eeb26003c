"""How a one-pass step takes its tokens: a lead chunk, chunks, or a recomputing step.

lead chunk          where it is larger than an ordinary one: up to D tokens                        lead.py
chunks              E of n tokens fills the workspace                                               with_grad.py
recomputing step    where n would be below RECOMPUTE_BELOW: a fourth GEMM pass, any workspace        recompute.py
"""

from dataclasses import dataclass

from torch import Tensor

from flce_ops.support.path import Path, last_path, record_path
from flce_ops.triton.chunks import product_bytes, rows_of_chunks, slices, triton_reason
from flce_ops.triton.lead import Lead, lead_chunk

# N tokens, n rows of a chunk, D hidden, V vocabulary

RECOMPUTE_BELOW = 384  # H200, D = 4096: 1.78 us a row for grad_linear_weight at 512 rows, 1.60 at 2048, 3 at 256


@dataclass(frozen=True)
class Cut:
    lead: Lead | None
    chunks: list[slice]  # of the other tokens
    recompute: bool
    product_bytes: int  # workspace for float32 products with linear_weight

    def record(self, linear_weight: Tensor) -> None:
        """For flce_ops.last_path(); after the step."""
        op = "linear_cross_entropy_with_grad"
        lead = [] if self.lead is None else [slice(0, self.lead.rows)]
        notes = ["the first chunk's exponentials wait in grad_linear_weight"] if lead else []
        rows, count = self.lead.rows if lead else 0, len(lead) + len(self.chunks)
        if self.recompute:
            backward = last_path()
            notes.append("recomputing the logits: the workspace is small")
            rows, count = max(rows, backward.rows_per_chunk), len(lead) + backward.chunks
        elif self.chunks:
            rows = max(rows, self.chunks[0].stop - self.chunks[0].start)
        record_path(Path(op, "triton", ", ".join((triton_reason(linear_weight), *notes)), rows, count))


def cut_tokens(
    input: Tensor, linear_weight: Tensor, output_mask: list[bool], *, smoothed: bool = False, argmax: bool = False
) -> Cut:
    want_input, want_weight, _ = output_mask
    tokens, (num_classes, hidden), size = input.shape[0], linear_weight.shape, input.dtype.itemsize
    fitting = rows_of_chunks(
        tokens, num_classes, hidden, size, want_input=want_input, want_weight=want_weight, argmax=argmax
    )
    chunks = slices(tokens, fitting)
    lead = None
    if len(chunks) > 1 and want_weight:
        lead = lead_chunk(
            tokens, hidden, num_classes, size, ordinary_rows=fitting, argmax=argmax, want_input=want_input
        )
    start = lead.rows if lead else 0
    if lead is not None:
        chunks = slices(tokens - start, fitting)
    if len(chunks) > 1 and chunks[0].stop < RECOMPUTE_BELOW:
        if smoothed:  # a lead chunk would add label smoothing's part of all tokens
            lead, start = None, 0
        return Cut(lead, [slice(start, tokens)], True, 0)
    room = product_bytes(fitting, chunks[0].stop, num_classes, size) if chunks else 0
    return Cut(lead, [slice(start + rows.start, start + rows.stop) for rows in chunks], False, room)
