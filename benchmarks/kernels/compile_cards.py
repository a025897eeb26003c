"""Compiles every Triton kernel of the package for cards that need not be here; prints what does not fit.

    python -m benchmarks.kernels.compile_cards [--cards 80 86 gfx942 ...] [--calls loss ...]

The kernels are those that the first calls below compile: for any number of tokens, forward and backward.
A kernel fails where it does not compile, takes more shared memory than a block may have on the card, or, a GEMM, has
more stack than was seen so far: registers that are kept in memory (spills). On sm_100 and sm_103 the GEMMs' products
are tcgen05's. AMD's cards (gfx942, gfx950) are compiled as far as Triton and LLVM go: nobody has run them there.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_STORE_BINARY_ONLY"] = "0"  # the PTX tells whether a product is tcgen05's

import torch
import triton
from triton.backends.compiler import GPUTarget

import flce_ops
from flce_ops import meta
from flce_ops.ops import paths
from flce_ops.ops.call_facts import facts_of
from flce_ops.ops.registration import OPERATORS
from flce_ops.support.table import choose
from flce_ops.triton import first_call

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
    "sparse": (loss, 512, 50257, bf16, {"gradient_threshold": 0.02, "gradient_seed": torch.tensor(0)}),
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
failures: list[tuple[str, Exception]] = []  # a first call leaves them to the launch, which does not come here
compile_kernel = triton.compiler.compile


def compile_and_look(source: Any, *args: Any, **options: Any) -> Any:
    try:
        kernel = compile_kernel(source, *args, **options)
    except Exception as error:
        failures.append((source.name, error))
        raise
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


def pretend_to_have(card: str) -> torch.device:
    """Makes this process compile for the card. Each card has a number, so that none uses the kernels of another."""
    number, of_amd = list(CARDS).index(card), card.startswith("gfx")
    capability = divmod(80 if of_amd else int(card), 10)  # on AMD's, tiles are Ampere's, which ask for no tensor maps

    class Driver:
        launcher_cls = staticmethod(lambda *args: None)
        utils = SimpleNamespace(
            load_binary=lambda *args: (object(), object(), 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 1 << 30},  # faults() compares with the card's
        )

        def get_current_target(self):
            return GPUTarget("hip", card, 64) if of_amd else GPUTarget("cuda", int(card), 32)

        def get_current_device(self):
            return number

        def get_current_stream(self, device):
            return 0

    triton.runtime.driver.set_active(Driver())
    cuda: Any = torch.cuda
    cuda.current_device = lambda: number
    cuda.device = lambda device: nullcontext()
    cuda.get_device_capability = lambda device: capability
    cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=CARDS[card][1])
    return torch.device("cuda", number)


caught: list[tuple[Any, Any]] = []  # calls of inner operators on the CPU, and what would launch them on a GPU
library = torch.library.Library("flce", "IMPL")


def catch(name: str) -> Any:
    def run(*args, **kwargs):
        call = OPERATORS[name].arguments.bind(*args, **kwargs)
        path = choose(paths.KERNELS[name], facts_of(call)._replace(device="cuda"))
        if path.name == "triton":
            caught.append((paths.function(path.kernel).__wrapped__, call))
        return meta.outputs(call)

    return run


for _name in OPERATORS:
    library.impl(_name, catch(_name), "CPU")


def step(name: str) -> None:
    function, hidden, vocab, dtype, options = CALLS[name]

    def empty(*shape: int, dtype: torch.dtype = dtype, trained: bool = True) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype).requires_grad_(trained)

    tokens, target, weight = empty(16, hidden), torch.zeros(16, dtype=torch.int64), empty(vocab, hidden)
    if options.get("bias"):
        options = {key: value for key, value in options.items() if key != "bias"} | {"linear_bias": empty(vocab)}
    operands: tuple[torch.Tensor, ...] = (tokens, weight, target)
    if function is given:
        operands = empty(16, vocab), target
    elif function is divergence:
        operands = tokens, weight, empty(16, hidden, trained=False), empty(vocab, hidden, trained=False)
    elif function is policy:
        operands += torch.zeros(16), torch.zeros(16)
    result = function(*operands, **options)
    results = result if isinstance(result, tuple) else (result,)
    wanted = [part for part in results if isinstance(part, torch.Tensor) and part.requires_grad]
    torch.autograd.backward(wanted, [torch.ones_like(part) for part in wanted])


def compile_call(card: str, name: str) -> None:
    device = pretend_to_have(card)
    caught.clear()
    step(name)
    for launch, call in caught:
        first_call.compile_kernels(launch, call, device)


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
    chosen = parser.parse_args()
    triton.compiler.compile = compile_and_look  # before the package's kernels are made
    failed = 0
    for card in chosen.cards:
        found.clear()
        start = time.perf_counter()
        of_amd = card.startswith("gfx")
        for name in [name for name in chosen.calls if not (of_amd and name in OF_NVIDIA)]:
            failures.clear()
            compile_call(card, name)
            failed += len(failures)
            for kernel_name, error in failures:
                print(f"{card} {name}: {kernel_name}: {error!r}", flush=True)
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
