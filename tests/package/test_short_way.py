"""The way from the user's call to the GEMM is short: a forward on a CPU makes few Python calls, in few files."""

import sys
from pathlib import Path

import torch
from inputs import make_inputs

import flce_ops

PACKAGE = str(Path(flce_ops.__file__).parent)


def test_a_forward_on_a_cpu_makes_few_calls_in_few_files():
    """Counted in the second call; the first one imports kernels and fills tables."""
    inputs = make_inputs((512, 64, 1000), dtype=torch.float32, ignored=0.0)
    calls, depths = [], [0]

    def count(frame, event, _):
        if frame.f_code.co_filename.startswith(PACKAGE) and event in ("call", "return"):
            depths.append(depths[-1] + (1 if event == "call" else -1))
            if event == "call":
                calls.append(frame.f_code.co_filename)

    flce_ops.linear_cross_entropy(inputs.input, inputs.linear_weight, inputs.target)
    sys.setprofile(count)
    try:
        flce_ops.linear_cross_entropy(inputs.input, inputs.linear_weight, inputs.target)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 100 and max(depths) <= 12 and len(set(calls)) <= 23, (len(calls), max(depths), set(calls))
