"""The weight gradient's GEMM adds to a buffer: Triton in the interpreter, against float64."""

# N tokens, D hidden, V vocabulary

import pytest
import torch
from marks import IN_INTERPRETER
from reference_loss import error
from test_triton_saved_logits import RAGGED, case, gradients

import flce_ops
from flce_ops.triton import launch_backward, launch_backward_in_place, launch_forward

pytestmark = IN_INTERPRETER


@pytest.mark.parametrize(
    ("buffer", "retain", "workspace"),
    [
        (torch.float32, 128, None),
        (torch.float32, 0, 16 << 10),  # several chunks
        (torch.float16, 0, None),
        (torch.float16, 128, 16 << 10),
    ],
    ids=str,
)
def test_a_buffer_is_added_to(buffer, retain, workspace, poisoned_memory, fewest_chunks):
    args, cotangents, truth = case(RAGGED, torch.float16, "al")
    rows = launch_forward(*args, retain=retain)
    options = {"retained": rows[8] if retain else None}
    usual = gradients(launch_backward, rows, args, cotangents, **options)
    main_grad = (truth[1].std() * torch.randn_like(truth[1])).to(buffer)
    before = main_grad.double()
    with flce_ops.workspace(workspace or 1 << 20):
        found = gradients(launch_backward_in_place, rows, args, cotangents, main_grad=main_grad, **options)
    assert (flce_ops.last_path().chunks > 1) == (workspace is not None)
    assert found[1].numel() == 0
    # one rounding for each range of rows that is added
    rounded = 0.0 if buffer == torch.float32 else flce_ops.last_path().chunks * 3e-4
    assert error(main_grad.double() - before, truth[1]) <= error(usual[1], truth[1]) + rounded
    for index in (0, 2):
        assert error(found[index], truth[index]) <= 1.05 * error(usual[index], truth[index])


def test_nothing_is_added_without_valid_tokens():
    args, cotangents, _ = case(RAGGED, torch.float16, "al")
    args = (*args[:2], torch.full_like(args[2], -100), *args[3:])
    main_grad = torch.randn(RAGGED[2], RAGGED[1])
    before = main_grad.clone()
    rows = launch_forward(*args)
    found = gradients(launch_backward_in_place, rows, args, cotangents, main_grad=main_grad)
    assert torch.equal(main_grad, before) and not found[0].any()
