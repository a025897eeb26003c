"""linear_kl_div: GEMM passes, temporary memory, leading dimensions and strides."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

import pytest
import torch
from reference_divergence import KINDS, leaves, make_pair
from test_checkpoint import WAYS
from test_memory import SMALL_CHANGE, MiB, peak_on_cpu, peak_on_cuda
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from flce_ops.aten import gradients
from flce_ops.aten.chunks import ROUNDED_CHUNKS_ON_CPU
from flce_ops.aten.chunks import rows_per_chunk as rows_of_cross_entropy
from flce_ops.support.workspace import matrix_bytes


@pytest.mark.parametrize(
    "options, gradient, student, teacher",
    [({}, True, 3, 1), ({"reduction": "none"}, True, 4, 2), ({}, False, 1, 1), ({"probs": True}, True, 3, 0)],
    ids=["training step", "reduction none", "no gradient", "given probabilities"],
)
def test_gemm_passes(device, options, gradient, student, teacher):
    options = dict(options)
    pair = make_pair((40, 16, 8, 61), device=device, probs=options.pop("probs", False), requires_grad=gradient)
    with FlopCounterMode(display=False) as counter:
        loss = flce_ops.linear_kl_div(**pair, kind="jsd", **options)
        if gradient:
            loss.sum().backward()
    assert counter.get_total_flops() == 2 * 40 * 61 * (16 * student + 8 * teacher)


@pytest.mark.parametrize("way, student, teacher", [("reentrant", 4, 2), ("non_reentrant", 5, 3), ("selective", 4, 2)])
def test_gemm_passes_under_checkpointing(device, way, student, teacher):
    pair = make_pair((40, 16, 8, 61), device=device)

    def block(input):
        return flce_ops.linear_kl_div(**{**pair, "input": input})

    with FlopCounterMode(display=False) as counter:
        checkpoint(block, pair["input"], **WAYS[way]).backward()
    assert counter.get_total_flops() == 2 * 40 * 61 * (16 * student + 8 * teacher)


N, D, E, V = 4096, 16, 24, 2003  # float32 logits: 32 MiB
WORKSPACE = 6 * MiB  # more than the 128 rows need that every chunk has at least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind, softcap", [*((kind, None) for kind in KINDS), ("jsd", 5.0)])
def test_temporary_memory_stays_within_the_workspace(device, softcap, kind, reduction, dtype):
    pair = make_pair((N, D, E, V), device=device, dtype=dtype, bias=True)

    def step():
        loss = flce_ops.linear_kl_div(**pair, kind=kind, reduction=reduction, softcap=softcap, teacher_softcap=softcap)
        torch.autograd.grad(loss.sum(), list(leaves(pair).values()))

    with flce_ops.workspace(WORKSPACE):
        peak = (peak_on_cpu if device == "cpu" else peak_on_cuda)(step)
    assert flce_ops.last_path().chunks > 2  # half matrices on a GPU, float32 ones elsewhere
    results = sum(leaf.numel() * leaf.element_size() for leaf in leaves(pair).values())
    assert peak - results <= WORKSPACE + SMALL_CHANGE, f"{(peak - results) / MiB:.1f} MiB"
    assert peak - results > WORKSPACE / 4, "chunks far smaller than the workspace allows"


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_weight_gradient_is_summed_in_float32_though_cross_entropy_would_need_two_chunks(monkeypatch, reduction):
    """linear_kl_div holds more matrices than linear_cross_entropy, so it has more chunks. The rule for the float32 sum
    depends on the number of chunks.
    """
    dtypes = []

    class Watched(gradients.GradientAccumulator):
        def finish(self):
            dtypes.append(self.weight_sum.dtype)
            super().finish()

    monkeypatch.setattr("flce_ops.aten.kl_div.GradientAccumulator", Watched)
    pair = make_pair((2000, 16, 8, 509), dtype=torch.bfloat16)
    with flce_ops.workspace(2000 * (509 + 200)):
        assert rows_of_cross_entropy(pair["input"], matrix_bytes(2000), 509) > 1000
        flce_ops.linear_kl_div(**pair, kind="jsd", reduction=reduction).sum().backward()
        assert flce_ops.last_path().chunks > ROUNDED_CHUNKS_ON_CPU
    assert dtypes == [torch.float32]


def test_the_teachers_rows_of_a_chunk_are_part_of_the_workspace():
    """The valid rows of the teacher's states are copied chunk by chunk, as the student's are."""
    hidden, vocab, wide = 8, 16, 4096
    rows = []
    for teacher in (8, wide):
        pair = make_pair((4000, hidden, teacher, vocab), requires_grad=False)
        with flce_ops.workspace(10 * MiB):
            flce_ops.linear_kl_div(**pair)
        rows.append(flce_ops.last_path().rows_per_chunk)
    assert rows[0] > 2000 and 128 <= rows[1] <= 10 * MiB // (4 * wide), rows


def test_teacher_states_are_not_held_until_backward(device):
    """Gradients are made in forward, so the memory of a freed teacher is free."""
    import weakref

    pair = make_pair(device=device)
    loss = flce_ops.linear_kl_div(**pair)
    teacher = weakref.ref(pair["teacher_input"])
    del pair["teacher_input"]
    assert teacher() is None
    loss.backward()
