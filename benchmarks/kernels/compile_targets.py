"""Compiles the three GEMMs ahead of time for GPU architectures, without such a GPU. Prints shared memory and its limit.

    python -m benchmarks.kernels.compile_targets [--every]

For each architecture this compiles one epilogue of the logits GEMM, a low-rank pair by pointers, and the gradient GEMMs
that differ in memory. With --every it compiles all epilogues, first and later chunks, and the variants by pointers
where tensor maps exist. Exits with an error if a kernel does not fit.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flce_ops.triton.gemm.class_blocks import LIVE, ClassBlocks
from flce_ops.triton.gemm.epilogues import EPILOGUES, ExpSum, Gradient, MaxSum
from flce_ops.triton.gemm.input_gradient import Finish, input_gradient_kernel
from flce_ops.triton.gemm.logits_gemm import logits_gemm_kernel
from flce_ops.triton.gemm.overflow_rows import LOOK, overflow_rows_kernel
from flce_ops.triton.gemm.tiles import AMPERE, HOPPER, INPUT_TILES, WEIGHT_TILES, Tiles, data_centre_chip
from flce_ops.triton.gemm.tma import Matrix
from flce_ops.triton.gemm.transposed_tiles import transposed_tiles_kernel
from flce_ops.triton.gemm.weight_gradient import weight_gradient_kernel
from flce_ops.triton.rows.logit_numbers import LogitNumbers
from flce_ops.triton.rows.valid_tokens import ValidTokens
from flce_ops.triton.steps.quantized_logits import QuantizedLogits

# the pointers of each epilogue; optional ones are absent
EXP_SUM = ExpSum("*fp32", "constexpr", "*fp32", *["constexpr"] * 8, "i32")
OPERANDS = {
    "exp_sum": EXP_SUM,
    "statistics": EXP_SUM._replace(expected="*fp32", row_max="*fp32", argmax="*i32", squares="*fp32", total="*fp32"),
    "quantized": EXP_SUM._replace(quantized=QuantizedLogits("*i16", "*fp32", "i32", "i32")),
    "max_sum": MaxSum("*fp32", "*fp32", "*bf16"),
    "gradient": Gradient("*fp32", "*fp32", *["constexpr"] * 3),
    "low_rank": EXP_SUM,
}
VALID_TOKENS = ValidTokens("*i32", "*i32", "i32", "*i32")
EVERY_BLOCK, SOME_BLOCKS = ClassBlocks("constexpr", "constexpr"), ClassBlocks("*i32", "*i32")
FINISH = Finish("*fp32", "*i64", "*fp32", "constexpr", "constexpr")
# compute capability: (default epilogue, shared memory available to a block, in bytes)
TARGETS = {
    80: ("gradient", 163 << 10),  # A100
    89: ("exp_sum", 99 << 10),  # L40S, RTX 4090
    90: ("exp_sum", 227 << 10),  # H100, H200
    100: ("gradient", 227 << 10),  # B200
    120: ("exp_sum", 99 << 10),  # RTX 5090
}
# What the launcher finds for matrices of usual shapes, whose rows are contiguous. Without it no load is asynchronous.
ALIGNED = [["tt.divisibility", 16]]


class Variant(NamedTuple):
    name: str
    source: ASTSource
    tiles: Tiles
    num_stages: int


def by_rows(pointer: str) -> Matrix:
    return Matrix(pointer, "i32", "constexpr")


def source(
    kernel: Any,
    tiles: Tiles,
    constants: Mapping[str, Any],
    blocks: Mapping[str, tuple[str, list[int]]],  # dtype and tile of each matrix that a tensor map may load
    types: Mapping[str, Any],  # of the other arguments except integers; "constexpr" if absent
) -> ASTSource:
    usual = {"USE_TMA": tiles.tma, "PROGRAMS": 132, **tiles.options}
    values = {**constants, **{name: value for name, value in usual.items() if name in kernel.arg_names}}
    signature: dict[str, Any] = {}
    for place, name in enumerate(kernel.arg_names):
        if name in values:
            signature[name] = "constexpr"
        elif name in blocks:
            dtype, block = blocks[name]
            signature[name] = f"tensordesc<{dtype}{block}>" if tiles.tma else by_rows(f"*{dtype}")
        else:
            signature[name] = types.get(name, "i32")
        if signature[name] == "constexpr" and name not in values:
            values[name] = None
        elif isinstance(signature[name], tuple):
            values |= {(place, i): None for i, part in enumerate(signature[name]) if part == "constexpr"}
    attributes = {}
    for place, kind in enumerate(signature.values()):
        if kind == "i32" or str(kind).startswith("*"):
            attributes[(place,)] = ALIGNED
        elif isinstance(kind, Matrix):
            attributes |= {(place, i): ALIGNED for i in range(2)}
    return ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)


def logits_variants(tiles: Tiles, epilogues: list[str]) -> Iterator[Variant]:
    constants = {
        "EVEN_V": False,
        "SLOPED": False,
        "BEFORE_SOFTCAP": False,
        "GROUP": tiles.group,
        "STORED": True,
        "STORE_HALVES": tiles.store_halves,
    }
    out_columns = tiles.block_n // 2 if tiles.store_halves else tiles.block_n
    blocks = {
        "input": ("bf16", [tiles.block_m, tiles.block_k]),
        "linear_weight": ("bf16", [tiles.block_n, tiles.block_k]),
        "out": ("bf16", [tiles.block_m, out_columns]),
    }
    for name in epilogues:
        operands = OPERANDS[name]
        types = {
            "bias_ptr": "constexpr",
            "guard_ptr": "constexpr",
            "logit_numbers": LogitNumbers("constexpr", "constexpr", "constexpr"),
            "operands": operands,
            "valid_tokens": VALID_TOKENS,
        }
        matrices = dict(blocks)
        if name == "quantized":
            matrices["out"] = ("i16", matrices["out"][1])
        rank = 0 if name != "low_rank" else 64 if tiles.tma else 128  # by pointers the pair has a loop of its own
        epilogue = {"EPILOGUE": EPILOGUES[type(operands)], "RANK": rank}
        if name == "low_rank":
            matrices |= {"pair_input": matrices["input"], "pair_weight": matrices["linear_weight"]}
        else:
            types |= dict.fromkeys(("pair_input", "pair_weight"), "constexpr")
        of_kernel = source(logits_gemm_kernel, tiles, {**constants, **epilogue}, matrices, types)
        yield Variant(f"logits, {name}", of_kernel, tiles, tiles.num_stages)


# FIRST and LAST, for one of several chunks of tokens. "main_grad" adds to a float32 buffer, "dense" computes some
# blocks of classes.
WEIGHT_CHUNKS = {
    "only": (True, True),
    "first": (True, False),
    "later": (False, False),
    "last": (False, True),
    "main_grad": (True, True),
    "dense": (False, False),
}


def weight_variant(tiles: Tiles, chunk: str) -> Variant:
    first, last = WEIGHT_CHUNKS[chunk]
    adds = chunk == "main_grad"
    of_rows = [tiles.block_k, tiles.block_n]
    blocks = {
        "exponentials": ("bf16", [tiles.block_k, tiles.block_m]),
        "rows": ("bf16", of_rows),
        "map_ptr": ("bf16" if last else "fp16", [tiles.block_m, tiles.block_n // 2]),
    }
    types = {"outer": ("constexpr", "constexpr"), "valid_tokens": VALID_TOKENS}
    types |= {"blocks": SOME_BLOCKS if chunk == "dense" else EVERY_BLOCK}
    types |= {"sum_ptr": "*fp32", "result_ptr": "*fp32"} if adds else {"sum_ptr": "*fp16", "result_ptr": "*bf16"}
    if last and not first and tiles.tma:
        blocks["stored_ptr"] = ("fp16", [tiles.block_m, tiles.block_n // 2])
    else:
        types["stored_ptr"] = "constexpr"
    if adds or not tiles.tma:
        types["map_ptr"] = "constexpr"
        del blocks["map_ptr"]
    if first and last:
        types |= {"exponent_ptr": "constexpr", "guard_ptr": "constexpr"}
    else:
        types |= {"exponent_ptr": "*u8", "guard_ptr": "*i32"}
    constants = {
        "FIRST": first,
        "LAST": last,
        "ADDS": adds,
        "GROUP": tiles.group,
    }
    name = f"weight, {chunk}, {tiles.block_m}x{tiles.block_n}"
    return Variant(name, source(weight_gradient_kernel, tiles, constants, blocks, types), tiles, tiles.num_stages)


def overflow_variant(tiles: Tiles, *, some_classes: bool) -> Variant:
    blocks = {
        "exponentials_map": ("bf16", [tiles.block_k, tiles.block_m]),
        "rows_map": ("bf16", [tiles.block_k, tiles.block_n]),
    }
    types = {"sum_ptr": "*fp16", "exponent_ptr": "*u8", "guard_ptr": "*i32", "valid_tokens": VALID_TOKENS}
    types["blocks"] = SOME_BLOCKS if some_classes else EVERY_BLOCK
    of_kernel = source(overflow_rows_kernel, tiles, {"LOOK": LOOK}, blocks, types)
    name = f"weight, overflow, {tiles.block_m}x{tiles.block_n}"
    return Variant(name, of_kernel, tiles, tiles.num_stages)


def transposed_variant(tiles: Tiles) -> Variant:
    narrow, wide = [tiles.block_k, tiles.block_m], [tiles.block_k, tiles.block_n]
    blocks = {
        "exponentials_map": ("bf16", narrow),
        "rows_map": ("bf16", wide),
        "rows_transposed_map": ("bf16", narrow),
        "exponentials_transposed_map": ("bf16", wide),
        "sum_map": ("fp16", [tiles.block_m, tiles.block_m]),
    }
    types = {"exponent_ptr": "*u8", "guard_ptr": "*i32", "valid_tokens": VALID_TOKENS}
    constants = {
        "WHOLE": 3,
        "GROUP": tiles.group,
    }
    of_kernel = source(transposed_tiles_kernel, tiles, constants, blocks, types)
    return Variant("weight, later, transposed", of_kernel, tiles, tiles.num_stages)


def input_variant(tiles: Tiles, *, whole: bool, some_classes: bool = False) -> Variant:
    """The input gradient over all of V, which its epilogue finishes, or over one of several slices."""
    blocks = {
        "exponentials": ("bf16", [tiles.block_m, tiles.block_k]),
        "classes": ("bf16", [tiles.block_k, tiles.block_n]),
    }
    types = {
        "linear_weight": by_rows("*bf16"),
        "product_ptr": "*fp32",
        "out": by_rows("*bf16"),
        "finish": FINISH,
        "valid_tokens": VALID_TOKENS,
    }
    types["blocks"] = SOME_BLOCKS if some_classes else EVERY_BLOCK
    constants = {"WHOLE": whole, "FIRST": whole}
    name = f"input, {'dense' if some_classes else 'whole' if whole else 'piece'}, {tiles.block_m}x{tiles.block_n}"
    return Variant(name, source(input_gradient_kernel, tiles, constants, blocks, types), tiles, tiles.num_stages)


def gradient_variants(capability: int, tma: bool, every: bool) -> Iterator[Variant]:
    for name, tiles in WEIGHT_TILES.items():
        if name != "interpreter" and tiles.tma == tma:
            for chunk in WEIGHT_CHUNKS:
                if every or chunk in ("later", "main_grad"):
                    yield weight_variant(tiles, chunk)
            if tma:
                for some_classes in (False, True) if every else (False,):
                    yield overflow_variant(tiles, some_classes=some_classes)
    if capability == 90:
        yield transposed_variant(WEIGHT_TILES["hopper"])
    for name, tiles in INPUT_TILES.items():
        if name != "interpreter" and tiles.tma == tma:
            for whole in (True, False) if every else (True,):
                yield input_variant(tiles, whole=whole)
            if every and tiles.block_m <= LIVE.value:
                yield input_variant(tiles, whole=True, some_classes=True)


def variants(capability: int, epilogue: str, every: bool) -> Iterator[Variant]:
    tma = data_centre_chip(capability)
    yield from logits_variants(HOPPER if tma else AMPERE, list(OPERANDS) if every else [epilogue])
    if tma:
        yield from logits_variants(replace(HOPPER, tma=False), ["low_rank"])
    yield from gradient_variants(capability, tma, every)
    if tma and every:  # operands that tensor maps cannot address
        yield from gradient_variants(capability, False, every)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", action="store_true")
    every = parser.parse_args().every
    failed = 0
    for capability, (default, limit) in TARGETS.items():
        for name, of_kernel, tiles, stages in variants(capability, default, every):
            options = {"num_warps": tiles.num_warps, "num_stages": stages}
            kernel = triton.compile(of_kernel, target=GPUTarget("cuda", capability, 32), options=options)
            fits = kernel.metadata.shared <= limit
            failed += not fits
            tma = "TMA" if tiles.tma else "pointers"
            verdict = "fits" if fits else "DOES NOT FIT"
            print(
                f"sm_{capability} {name:24s} {tma:8s} {kernel.metadata.shared:6d} of {limit:6d} bytes: {verdict}",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
