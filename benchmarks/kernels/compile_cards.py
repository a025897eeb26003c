"""Compiles every Triton kernel of the package for cards that need not be here; prints what does not fit.

    python -m benchmarks.kernels.compile_cards [--cards 80 86 gfx942 ...] [--calls loss ...]

The kernels are those that flce_ops.warmup finds for the calls below: for any number of tokens, forward and backward.
A kernel fails where it does not compile, takes more shared memory than a block may have on the card, or, a GEMM, has
more stack than was seen so far: registers that are kept in memory (spills). On sm_100 and sm_103 the GEMMs' products
are tcgen05's. AMD's cards (gfx942, gfx950) are compiled as far as Triton and LLVM go: nobody has run them there.
"""

import argparse
import collections
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_STORE_BINARY_ONLY"] = "0"  # the PTX tells whether a product is tcgen05's

import torch
import triton
from triton.backends.compiler import GPUTarget

import flce_ops

ahead: Any = importlib.import_module("flce_ops.warmup")  # its name in the package is the function's

KiB = 1 << 10
# card: bytes of shared memory that a block may have, multiprocessors
CARDS = {
    "80": (163 * KiB, 108),  # A100
    "86": (99 * KiB, 84),  # A40, RTX 3090
    "89": (99 * KiB, 142),  # L40S, RTX 4090
    "90": (227 * KiB, 132),  # H100, H200
    "100": (227 * KiB, 148),  # B200
    "103": (227 * KiB, 148),  # B300
    "120": (99 * KiB, 170),  # RTX 5090
    "121": (99 * KiB, 48),  # GB10
    "gfx942": (64 * KiB, 304),  # MI300X
    "gfx950": (160 * KiB, 256),  # MI355X
}
GEMMS = {"logits_gemm_kernel", "weight_gradient_kernel", "input_gradient_kernel"}
TCGEN05 = ("100", "103")
# Bytes of stack a thread, at most, as seen so far. Hopper's tiles, the fastest there, have some. The most are with 516
# features, which no tensor map takes: 4232 on sm_80, and 2104 on sm_100.
STACK, STACK_OF_HOPPERS_TILES = 4352, 2176

bf16, fp16 = torch.bfloat16, torch.float16
loss, log_probs = flce_ops.linear_cross_entropy, flce_ops.linear_log_probs
policy, divergence, given = flce_ops.linear_policy_loss, flce_ops.linear_kl_div, flce_ops.cross_entropy
# function, D, V, dtype, options; the first two have most kernels
CALLS: dict[str, tuple[Any, int, int, torch.dtype, dict[str, Any]]] = {
    "loss": (loss, 4096, 128256, bf16, {"bias": True}),
    "losses": (loss, 4096, 128256, bf16, {"reduction": "none", "softcap": 30.0}),
    "small head": (loss, 512, 50257, fp16, {"label_smoothing": 0.1, "z_loss": 1e-4}),
    "features no map takes": (loss, 516, 32003, bf16, {"return_metrics": ["entropy", "argmax"]}),
    "few features": (loss, 64, 8000, bf16, {"reduction": "sum", "logit_scale": 0.5}),
    "sparse": (loss, 512, 50257, bf16, {"gradient_threshold": 0.02}),
    "filtered": (loss, 512, 50257, bf16, {"gradient_threshold": 0.02, "gradient_mode": "drop"}),
    "log-probabilities": (log_probs, 4096, 128256, bf16, {"entropy": True}),
    "policy": (policy, 2048, 151936, bf16, {"clip_high": 0.3, "dual_clip": 3.0}),
    "forward divergence": (divergence, 1024, 32000, bf16, {}),
    "reverse divergence": (divergence, 1024, 32000, bf16, {"kind": "reverse"}),
    "Jensen-Shannon": (divergence, 1024, 32000, fp16, {"kind": "jsd"}),
    "given logits": (given, 1, 32003, bf16, {"label_smoothing": 0.1}),
    "given float32 logits": (given, 1, 32003, torch.float32, {}),
}
# Their kernels have assembly, or a limit of registers, that only NVIDIA's cards know.
OF_NVIDIA = {"Jensen-Shannon", "given logits", "given float32 logits"}


class Compiled(NamedTuple):
    name: str
    shared: int
    stack: int  # bytes per thread, of registers that are kept in memory
    tcgen05: bool


found: dict[str, Compiled] = {}  # by Triton's hash
compile_kernel = triton.compiler.compile


def compile_and_look(source: Any, *args: Any, **options: Any) -> Any:
    kernel = compile_kernel(source, *args, **options)
    asm = kernel.asm
    stack = stack_of(asm["cubin"]) if "cubin" in asm and source.name in GEMMS else 0
    found[kernel.hash] = Compiled(source.name, kernel.metadata.shared, stack, "tcgen05.mma" in asm.get("ptx", ""))
    return kernel


def stack_of(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(number) for number in re.findall(r"STACK:(\d+)", said))


@contextmanager
def amd(card: str):
    """warmup's driver, of an AMD card: tiles are Ampere's, which ask for no tensor maps."""

    @contextmanager
    def driver_of(chip, present):
        from triton.runtime import driver

        class Absent:
            def get_current_target(self):
                return GPUTarget("hip", card, 64)

            def get_current_device(self):
                return -int(card.removeprefix("gfx"))

            def get_current_stream(self, device):
                return 0

        before = driver._active
        driver.set_active(Absent())
        try:
            yield
        finally:
            driver._active = before

    before, ahead.driver_of = ahead.driver_of, driver_of
    try:
        yield
    finally:
        ahead.driver_of = before


def compile_call(card: str, name: str) -> None:
    function, hidden, vocab, dtype, options = CALLS[name]
    of_chip = {"arch": 80 if card.startswith("gfx") else int(card), "multiprocessors": CARDS[card][1]}
    ahead.warmup(hidden, vocab, function=function, dtype=dtype, **of_chip, **options)


def faults(card: str, kernel: Compiled) -> list[str]:
    limit = CARDS[card][0]
    said = []
    if kernel.shared > limit:
        said.append(f"{kernel.shared} bytes of shared memory, the card has {limit}")
    stack = STACK_OF_HOPPERS_TILES if card in ("90", *TCGEN05) else STACK
    if kernel.stack > stack:
        said.append(f"{kernel.stack} bytes of stack a thread, at most {stack} are known")
    if card in TCGEN05 and kernel.name in GEMMS and not kernel.tcgen05:
        said.append("no tcgen05.mma")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    given = parser.parse_args()
    triton.compiler.compile = compile_and_look  # before the package's kernels are made
    failed = 0
    for card in given.cards:
        found.clear()
        start = time.perf_counter()
        of_amd = card.startswith("gfx")
        for name in [name for name in given.calls if not (of_amd and name in OF_NVIDIA)]:
            try:
                with amd(card) if of_amd else nullcontext():
                    compile_call(card, name)
            except RuntimeError as error:
                failed += 1
                print(f"{card} {name}: {error}: {error.__cause__}", flush=True)
        for kernel in found.values():
            for said in faults(card, kernel):
                failed += 1
                print(f"{card} {kernel.name}: {said}", flush=True)
        names = collections.Counter(kernel.name for kernel in found.values())
        most = max(kernel.shared for kernel in found.values())
        gemms = [kernel.stack for kernel in found.values() if kernel.name in GEMMS]
        seconds = time.perf_counter() - start
        print(
            f"{card}: {len(found)} kernels of {len(names)} names, at most {most} of {CARDS[card][0]} bytes of shared "
            f"memory; {sum(map(bool, gemms))} of {len(gemms)} GEMMs have a stack, of {max(gemms, default=0)} bytes at "
            f"most; {seconds:.0f} s",
            flush=True,
        )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
