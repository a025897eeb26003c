"""How a one-pass step divides its tokens: E of n tokens fills the workspace; one chunk after another."""

import functools
from dataclasses import dataclass

from torch import Tensor

from ...support.workspace import get_workspace, least_rows
from ..gemm.device import input_tiles_for, multiprocessors, weight_tiles_for
from ..gemm.tiles import WEIGHT_TILES
from .chunks import Problem, product_bytes, slices

# N tokens, n rows of a chunk, D hidden, V vocabulary


@dataclass(frozen=True)
class Chunking:
    chunks: list[slice]
    product_bytes: int  # workspace for float32 products with linear_weight


def problem_of(
    tokens: int, linear_weight: Tensor, output_mask: list[bool], *, sum_pairs: int = 0, batch_invariant: bool = False
) -> Problem:
    want_input, want_weight, _ = output_mask
    vocab, hidden = linear_weight.shape
    of_call = tokens, vocab, hidden, linear_weight.dtype.itemsize, want_input, want_weight, sum_pairs
    of_device = multiprocessors(linear_weight), input_tiles_for(linear_weight), weight_tiles_for(linear_weight)
    return Problem(*of_call, get_workspace(), least_rows(), *of_device, batch_invariant)


def chunk_shard(input: Tensor, shard: int, output_mask: list[bool], *, sum_pairs: int) -> Chunking:
    """Chunks that are the same on all ranks, because they depend on the size of the largest shard only."""
    problem = problem_of(input.shape[0], input, output_mask, sum_pairs=sum_pairs)
    problem = problem._replace(vocab=shard, weight_tiles=WEIGHT_TILES["hopper"])  # the same tiles on every device
    fitting = problem.fitting()  # once: another thread may change the workspace
    chunks = slices(problem.tokens, fitting)
    products = product_bytes(fitting, chunks[0].stop, shard, problem.hidden, problem.itemsize)
    return Chunking(chunks, products)


@functools.lru_cache(maxsize=256)
def best_chunking(problem: Problem) -> Chunking:
    chunks = problem.chunks()
    return Chunking(chunks, problem.product_bytes(chunks[0].stop) if chunks else 0)
