"""Triton compiles the kernels of a head once, for every number of tokens, and ahead of the first launch.

Without a GPU: kernels are compiled for one that is not there. Where compilations are only counted, none is made.
"""

import json

import pytest
import torch
from fresh_process import run_script

import flce_ops

pytest.importorskip("triton")

# what is in the cache of kernels is counted by Triton's own key
COUNT = """
import json, os, random, sys
os.environ.pop("TRITON_INTERPRET", None)
import torch, flce_ops
from flce_ops.triton.launch import ahead
from triton.runtime.jit import JITFunction

compiled = []

def compile_nothing(self, key, signature, device, *rest, **options):
    compiled.append(self.__name__)
    self.device_caches[device][0][key] = compile_nothing
    return compile_nothing

JITFunction._do_compile = compile_nothing
function, hidden, vocab, workspace, options = json.loads(sys.argv[1])
random.seed(0)
some = ahead.TOKENS
others = [2048, 2047, 2046, 1000, 128, 100, 17, 1, 20000, *(random.randint(1, 20000) for _ in range(60)), 150001]
counts = []
with flce_ops.workspace(workspace):
    for ahead.TOKENS, ahead.ENOUGH_LAUNCHES in ((some, ahead.ENOUGH_LAUNCHES), (others, 1 << 30)):
        flce_ops.warmup(hidden, vocab, function=getattr(flce_ops, function), arch=90, **options)
        counts.append(len(compiled))
print(json.dumps([counts, len(set(compiled)), compiled[counts[0]:]]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="arch is that of the GPU")
@pytest.mark.parametrize(
    ("function", "hidden", "vocab", "workspace", "options"),
    [
        ("linear_cross_entropy", 512, 32000, None, {}),
        ("linear_cross_entropy", 4096, 128256, None, {"bias": True}),
        ("linear_cross_entropy", 1024, 50257, 64 << 20, {"label_smoothing": 0.1}),  # V odd; logits are made again
        ("linear_cross_entropy", 512, 50257, None, {"gradient_threshold": 0.02}),
        ("linear_log_probs", 512, 32000, None, {"entropy": True}),
        ("linear_log_probs", 4096, 128256, None, {"entropy": True}),
        ("linear_policy_loss", 2048, 151936, None, {"clip_high": 0.3}),
        ("linear_kl_div", 1024, 32000, None, {"kind": "reverse"}),
        ("cross_entropy", 1, 32000, None, {}),
    ],
)
def test_no_number_of_tokens_compiles_a_kernel_that_was_not_compiled_ahead(function, hidden, vocab, workspace, options):
    done = run_script(COUNT, json.dumps([function, hidden, vocab, workspace or flce_ops.get_workspace(), options]))
    assert done.returncode == 0, done.stderr
    (ahead, in_the_end), kernels, new = json.loads(done.stdout)
    assert in_the_end == ahead, new
    assert kernels <= ahead <= 2.1 * kernels  # variants are few: the first chunk, the last, a rescue's


COMPILE = """
import logging, os, pathlib, sys, tempfile
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = folder = tempfile.mkdtemp()
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import flce_ops
count = flce_ops.warmup(1, 1000, function=flce_ops.cross_entropy, arch=90)
assert len(list(pathlib.Path(folder).rglob("*.cubin"))) == count > 1
assert flce_ops.last_path() is None
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="arch is that of the GPU")
def test_kernels_are_compiled_into_tritons_cache_for_a_gpu_that_is_not_there():
    done = run_script(COMPILE)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert "kernels of cross_entropy, 1 x 1000 in torch.bfloat16 compiled" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_without_a_gpu_the_architecture_is_asked_for():
    with pytest.raises(ValueError, match="expected arch, as no GPU is visible"):
        flce_ops.warmup(64, 1000)


def test_calls_of_one_head_differ_in_no_more_than_tokens():
    """A head whose kernels are compiled is known again, whatever the number of tokens."""
    from flce_ops.meta.arguments import WithGrad
    from flce_ops.triton.launch.ahead import head_of

    def head(tokens, hidden=16, **options):
        operands = torch.randn(tokens, hidden), torch.randn(31, hidden), torch.zeros(tokens, dtype=torch.int64)
        return head_of(WithGrad.bind(*operands, None, None, None, output_mask=[True, True, False], **options))

    assert head(7) == head(31) == head(16)
    assert head(7) != head(7, hidden=32)
    assert head(7) != head(7, softcap=torch.tensor(30.0))
