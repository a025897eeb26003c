"""A row objective is one file: its operators, schemas, checks, derivatives and kernels are derived from it.

The test adds one objective, alpha-loss (Sypherd et al., 2022), and the signature of its function to a copy of the
package.
"""

# N tokens, D hidden, V vocabulary

import shutil
from pathlib import Path

from fresh_process import ROOT, run_fresh

OBJECTIVE = '''
"""alpha / (alpha - 1) (1 - p^((alpha - 1) / alpha)), p the target's probability."""

from math import inf
from typing import NamedTuple

from torch import Tensor

from flce_ops.math.options import Scalar
from flce_ops.objectives.row import RowFunction, RowObjective, exp, number


class AlphaNumbers(NamedTuple):
    alpha: Scalar = 2.0


class AlphaOptions(NamedTuple):
    alpha: Tensor  # ()


class AlphaLoss(RowObjective):
    name = "linear_alpha_loss"
    numbers, options_of = AlphaNumbers, AlphaOptions
    ranges = {"alpha": ("expected alpha to be at least 1.01", 1.01, inf)}

    @RowFunction
    def of_target(surprisal, weight, at, loss):
        alpha = number(loss.options.alpha, 2.0)
        power = (alpha - 1.0) / alpha
        tempered = exp(-surprisal * power)
        return (1.0 - tempered) / power, tempered
'''
SIGNATURE = '''
from torch import Tensor

from flce_ops.functional.public import call_entry, public


@public(lambda given: call_entry("linear_alpha_loss", given)[0])
def linear_alpha_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    alpha: float = 2.0,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    token_weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> Tensor:
    """See its file."""
'''
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from flce_ops.functional.alpha import linear_alpha_loss
from flce_ops.meta.arguments import ROW_LOSSES
from flce_ops.ops.paths import KERNELS, function

torch.manual_seed(0)
N, D, V = 37, 17, 31
x, w = (torch.randn(rows, D, dtype=torch.float64, requires_grad=True) for rows in (N, V))
target = torch.randint(V, (N,))
target[3] = -100

def dense(x, w, alpha, reduction):
    p = (x @ w.T).softmax(1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    losses = alpha / (alpha - 1) * (1 - p ** ((alpha - 1) / alpha)) * (target >= 0)
    return losses.sum() / (N - 1) if reduction == "mean" else losses

compiled = torch.compile(linear_alpha_loss, fullgraph=True, backend="aot_eager")
for function_of, reduction in ((linear_alpha_loss, "mean"), (linear_alpha_loss, "none"), (compiled, "mean")):
    ours, truth = function_of(x, w, target, alpha=1.7, reduction=reduction), dense(x, w, 1.7, reduction)
    torch.testing.assert_close(ours, truth)
    found, expected = (torch.autograd.grad(loss.sum(), (x, w), create_graph=True) for loss in (
        function_of(x, w, target, alpha=1.7, reduction=reduction), truth))
    torch.testing.assert_close(found, expected)
    if function_of is linear_alpha_loss:
        second = [torch.autograd.grad(grads[0].square().sum(), (x, w)) for grads in (found, expected)]
        torch.testing.assert_close(*second)
try:
    linear_alpha_loss(x, w, target, alpha=1.0)
except ValueError as error:
    assert str(error) == "linear_alpha_loss: expected alpha to be at least 1.01, got 1.0", error
else:
    raise AssertionError("alpha=1.0 was accepted")
if sys.argv[2] == "triton":
    op = torch.ops.flce.linear_alpha_loss_with_grad.default
    options = {"alpha": torch.tensor(1.7), "output_mask": [True, True, False]}
    call = ROW_LOSSES["linear_alpha_loss"].bind(x.detach().float(), w.detach().float(), target, None, None, **options)
    in_triton, *_ = KERNELS["linear_alpha_loss_with_grad"]
    exact = op(x.detach(), w.detach(), target, None, None, **options | {"alpha": options["alpha"].double()})
    for ours, truth in zip(function(in_triton.kernel)(call), exact):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6)
"""


def test_an_objective_is_a_file_and_a_signature(tmp_path):
    import importlib.util

    import torch

    shutil.copytree(ROOT / "flce_ops", tmp_path / "flce_ops", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "flce_ops/objectives/alpha.py").write_text(OBJECTIVE)
    (tmp_path / "flce_ops/functional/alpha.py").write_text(SIGNATURE)
    interpreted = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
    run_fresh(SCRIPT, str(Path(tmp_path)), "triton" if interpreted else "")
