"""Compiles the logits GEMM ahead of time for architectures that need not be here; prints shared memory and its limit.

    python -m benchmarks.kernels.compile_targets [--every]

One epilogue per architecture, or each with --every. Exits with an error where a kernel does not fit.
"""

import argparse
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flce_ops.math.options import LogitOptions
from flce_ops.triton.epilogues import EPILOGUES, ExpSum, Gradient, MaxSum
from flce_ops.triton.logits_gemm import logits_gemm_kernel
from flce_ops.triton.tiles import Tiles, tiles_of_architecture

# the pointers of each epilogue, what may be absent being absent
OPERANDS = {
    "exp_sum": ExpSum("*fp32", "constexpr", "*fp32", *["constexpr"] * 4),
    "max_sum": MaxSum("*fp32", "*fp32"),
    "gradient": Gradient("*fp32", "*fp32", *["constexpr"] * 3),
}
# compute capability: (epilogue by default, shared memory a block may use, in bytes)
TARGETS = {
    80: ("gradient", 163 << 10),  # A100
    89: ("exp_sum", 99 << 10),  # L40S, RTX 4090
    90: ("exp_sum", 227 << 10),  # H100, H200
    100: ("gradient", 227 << 10),  # B200
    120: ("exp_sum", 99 << 10),  # RTX 5090
}


def source(tiles: Tiles, operands: ExpSum | MaxSum | Gradient) -> ASTSource:
    out_columns = tiles.block_v // 2 if tiles.store_halves else tiles.block_v
    blocks = {
        "input_ptr": (tiles.block_n, tiles.block_d),
        "weight_ptr": (tiles.block_v, tiles.block_d),
        "out_ptr": (tiles.block_n, out_columns),
    }
    constants = {
        "EPILOGUE": EPILOGUES[type(operands)],
        "USE_TMA": tiles.tma,
        "EVEN_V": False,
        "BLOCK_N": tiles.block_n,
        "BLOCK_V": tiles.block_v,
        "BLOCK_D": tiles.block_d,
        "GROUP": tiles.group,
        "PROGRAMS": 132,
        "FLATTEN": tiles.flatten,
        "WARP_SPECIALIZE": tiles.warp_specialize,
        "STORE_HALVES": tiles.store_halves,
        "PRECISION": "tf32",
    }
    absent = {"bias_ptr": None, "guard_ptr": None}
    if isinstance(operands, MaxSum):
        absent["out_ptr"] = None
    tuples = {"logit_options": LogitOptions("constexpr", "constexpr"), "operands": operands}
    signature = {}
    for name in logits_gemm_kernel.arg_names:
        if name in constants or name in absent:
            signature[name] = "constexpr"
        elif name in blocks:
            rows, columns = blocks[name]
            signature[name] = f"tensordesc<bf16[{rows}, {columns}]>" if tiles.tma else "*bf16"
        else:
            signature[name] = tuples.get(name, "i32")
    for name, types in tuples.items():
        place = logits_gemm_kernel.arg_names.index(name)
        absent |= {(place, i): None for i, kind in enumerate(types) if kind == "constexpr"}
    return ASTSource(fn=logits_gemm_kernel, signature=signature, constexprs=constants | absent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", action="store_true")
    every = parser.parse_args().every
    failed = 0
    for capability, (default, limit) in TARGETS.items():
        for epilogue in OPERANDS if every else (default,):
            tiles = tiles_of_architecture(capability, hidden=4096)
            options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
            kernel = triton.compile(
                source(tiles, OPERANDS[epilogue]), target=GPUTarget("cuda", capability, 32), options=options
            )
            fits = kernel.metadata.shared <= limit
            failed += not fits
            tma = "TMA" if tiles.tma else "pointers"
            verdict = "fits" if fits else "DOES NOT FIT"
            print(
                f"sm_{capability} {epilogue:8s} {tma:8s} {kernel.metadata.shared:6d} of {limit:6d} bytes: {verdict}",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
