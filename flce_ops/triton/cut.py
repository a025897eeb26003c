"""How a one-pass step takes its tokens: a lead chunk, chunks, or a recomputing step.

lead chunk          where it is larger than an ordinary one: up to D tokens                        lead.py
chunks              E of n tokens fills the workspace; grad_linear_weight is rounded once a chunk   with_grad.py
recomputing step    where n would be below RECOMPUTE_BELOW: a fourth GEMM pass, any workspace        recompute.py
"""

from dataclasses import dataclass

from torch import Tensor

from flce_ops.support.path import Path, last_path, record_path
from flce_ops.support.readable import copy_bytes
from flce_ops.triton.chunks import product_bytes, rows_and_sum, slices, triton_reason
from flce_ops.triton.lead import Lead, lead_chunk

# N tokens, n rows of a chunk, D hidden, V vocabulary

RECOMPUTE_BELOW = 384  # H200, D = 4096: 1.78 us a row for grad_linear_weight at 512 rows, 1.60 at 2048, 3 at 256


@dataclass(frozen=True)
class Cut:
    lead: Lead | None
    chunks: list[slice]  # of the other tokens
    recompute: bool
    accum_float32: bool  # grad_linear_weight is summed in float32
    product_bytes: int  # workspace for a block of the float32 product with linear_weight
    copies: int = 0  # bytes for slices of a linear_weight that BLAS cannot read where it lies

    def record(self, input: Tensor, linear_weight: Tensor) -> None:
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
        record_path(Path(op, "triton", ", ".join((triton_reason(input, linear_weight), *notes)), rows, count))


def cut_tokens(
    input: Tensor, linear_weight: Tensor, output_mask: list[bool], *, smoothed: bool = False, argmax: bool = False
) -> Cut:
    want_input, want_weight, _ = output_mask
    tokens, (num_classes, hidden), size = input.shape[0], linear_weight.shape, input.dtype.itemsize
    copies = copy_bytes(linear_weight) if want_input else 0
    fitting, accum_float32 = rows_and_sum(
        tokens, num_classes, hidden, size, want_weight=want_weight, argmax=argmax, copies=copies
    )
    chunks = slices(tokens, fitting)
    few = len(chunks) > 1 and chunks[0].stop < RECOMPUTE_BELOW
    lead = None
    # label smoothing writes its rank-1 term into grad_linear_weight before the first chunk
    if len(chunks) > 1 and want_weight and not accum_float32 and not smoothed and not copies:
        lead = lead_chunk(
            tokens, hidden, num_classes, size, ordinary_rows=fitting, argmax=argmax, want_input=want_input
        )
    if lead is not None:
        chunks = slices(tokens - lead.rows, fitting)
        few = len(chunks) > 1 and chunks[0].stop < RECOMPUTE_BELOW
    room = product_bytes(fitting, chunks[0].stop, num_classes, size) if chunks else 0
    start = lead.rows if lead else 0
    if few:
        return Cut(lead, [slice(start, tokens)], True, accum_float32, 0, copies)
    chunks = [slice(start + rows.start, start + rows.stop) for rows in chunks]
    return Cut(lead, chunks, False, accum_float32, room, copies)
