"""shift=True: labels are as long as the hidden states; each position is scored with the next one's label."""

# B sequences, T tokens of one, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from in_worlds import in_worlds
from process_pool import worlds
from recorded import Recorded
from sharded_inputs import full, mesh_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flce_ops

B, T, D, V = 3, 7, 5, 11


def make(shape=(B, T), *, device="cpu", dtype=torch.float64, label_dtype=torch.int64, ignore_index=-100):
    hidden = torch.randn(*shape, D, dtype=dtype, device=device, requires_grad=True)
    head = torch.randn(V, D, dtype=dtype, device=device, requires_grad=True)
    labels = torch.randint(V, shape, device=device).to(label_dtype)
    labels[torch.rand(shape, device=device) < 0.2] = ignore_index
    return hidden, head, labels


def cut_by_hand(labels, of):
    """What users write without the argument: all positions of `of` but the last, and all labels but the first."""
    return of[..., :-1, :], labels[..., 1:]


@pytest.mark.parametrize("shape", [(B, T), (2, 2, T), (T,), (B, 2), (B, 1), (B, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_each_position_is_scored_against_the_next_label(device, reduction, shape):
    hidden, head, labels = make(shape, device=device)
    options = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01, "reduction": reduction}
    loss = flce_ops.linear_cross_entropy(hidden, head, labels, shift=True, **options)
    inner, target = cut_by_hand(labels, hidden)
    expected = flce_ops.linear_cross_entropy(inner, head, target.contiguous(), **options)
    found = torch.autograd.grad(loss.sum(), (hidden, head))
    if reduction == "none":
        assert loss.shape == labels.shape
        assert not loss[..., -1:].any()
        loss = loss[..., :-1]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), (hidden, head)))


@pytest.mark.parametrize("label_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("ignore_index", [-100, 4, None])
def test_mean_metrics_and_token_weights(ignore_index, label_dtype):
    value = -100 if ignore_index is None else ignore_index
    hidden, head, labels = make(label_dtype=label_dtype, ignore_index=value)
    labels[0, 1] = (value + 1) % V  # a label that counts
    labels = labels.t().contiguous().t()
    factor = torch.rand(B, T, dtype=torch.float64)
    options = {"ignore_index": ignore_index, "weight": torch.rand(V)}
    loss, metrics = flce_ops.linear_cross_entropy(
        hidden, head, labels, shift=True, token_weight=factor, return_metrics=True, **options
    )
    inner, target = cut_by_hand(labels, hidden)
    right, expected = flce_ops.linear_cross_entropy(
        inner, head, target, token_weight=factor[:, :-1], return_metrics=True, **options
    )
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(metrics.token_accuracy, expected.token_accuracy)
    assert torch.equal(metrics.argmax, F.pad(expected.argmax, (0, 1), value=-1))


def test_log_probs_divergences_given_logits_and_modules_shift_too():
    hidden, head, labels = make()
    inner, target = cut_by_hand(labels, hidden)
    found = flce_ops.linear_log_probs(hidden, head, labels, shift=True, entropy=True, argmax=True, tail=True)
    for part, right in zip(found, flce_ops.linear_log_probs(inner, head, target, entropy=True, argmax=True, tail=True)):
        torch.testing.assert_close(part, F.pad(right, (0, 1), value=0 if right.is_floating_point() else -1))
    teacher = torch.randn(V, D, dtype=torch.float64)
    found = flce_ops.linear_kl_div(hidden, head, hidden.detach(), teacher, target=labels, shift=True)
    cut = (inner, head, inner.detach(), teacher)
    torch.testing.assert_close(found, flce_ops.linear_kl_div(*cut, target=target))
    loss = flce_ops.linear_cross_entropy(inner, head, target)
    torch.testing.assert_close(flce_ops.cross_entropy(hidden @ head.T, labels, shift=True), loss)
    made = flce_ops.cross_entropy(hidden @ head.T, labels, shift=True, inplace_backward=True)
    gradients = [torch.autograd.grad(result, hidden)[0] for result in (made, loss)]
    torch.testing.assert_close(*gradients)
    module = flce_ops.LinearCrossEntropyHead(D, V, dtype=torch.float64)
    whole = flce_ops.LinearCrossEntropyLoss(D, V, dtype=torch.float64)
    for weight in (module.weight, whole.linear.weight):
        weight.data.copy_(head)
    torch.testing.assert_close(module(hidden, labels, shift=True), loss)
    torch.testing.assert_close(whole(hidden, labels, shift=True), loss)


def test_neither_hidden_states_nor_logits_are_copied():
    hidden, head, labels = make()
    logits = torch.randn(B, T, V, requires_grad=True)
    with Recorded(lambda func, args, _: args[:1] if func.namespace == "flce" else []) as first:
        flce_ops.linear_cross_entropy(hidden, head, labels, shift=True)
        flce_ops.linear_log_probs(hidden, head, labels, shift=True)
        flce_ops.cross_entropy(logits, labels, shift=True)
    given = [hidden, hidden, logits]
    assert [tensor.data_ptr() for tensor in first.seen] == [tensor.data_ptr() for tensor in given]


def test_one_graph_for_any_number_of_tokens():
    shifted = torch.compile(flce_ops.linear_cross_entropy, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((B, T), (2, 9)):
        hidden, head, labels = make(shape)
        loss, eager = (f(hidden, head, labels, shift=True) for f in (shifted, flce_ops.linear_cross_entropy))
        torch.testing.assert_close(loss, eager)
        torch.testing.assert_close(torch.autograd.grad(loss, hidden), torch.autograd.grad(eager, hidden))


def test_what_cannot_be_shifted_is_refused_by_name():
    hidden, head, labels = make()
    loss = flce_ops.linear_cross_entropy
    with pytest.raises(ValueError, match=r"shift=True.*target.*\(3, 7, 5\).*float32.*\(3, 7, 11\)"):
        loss(hidden, head, torch.rand(B, T, V), shift=True)
    with pytest.raises(ValueError, match=r"shift=True.*target.*\(3, 7, 2\)"):
        loss(hidden, head[:, None].expand(V, 2, D), labels[..., None].expand(B, T, 2), shift=True)
    with pytest.raises(ValueError, match=r"shift=True.*target.*0|\(\)"):
        loss(hidden[0, 0], head, labels[0, 0], shift=True)
    with pytest.raises(TypeError, match="shift to be True or False.*got 2"):
        loss(hidden, head, labels, shift=2)
    with pytest.raises(ValueError, match=r"expected target of shape \(3, 7\)"):
        loss(hidden, head, labels[:, 1:], shift=True)
    with pytest.raises(ValueError, match="^linear_kl_div: shift=True expects the labels"):
        flce_ops.linear_kl_div(hidden, head, hidden.detach(), head.detach(), shift=True)
    with pytest.raises(TypeError, match="target.*nested"):
        loss(hidden, head, torch.nested.nested_tensor(list(labels)), shift=True)


@in_worlds(worlds(2))
def test_dtensors_are_shifted_unless_their_sequences_are_cut(device):
    mesh = mesh_of(device, dist.get_world_size())
    hidden, head, labels = (tensor.detach() for tensor in make(device=device))
    right = flce_ops.linear_cross_entropy(hidden, head, labels, shift=True, reduction="none")
    for tokens, rows, of_labels in (
        (Shard(0), Replicate(), Shard(0)),
        (Shard(0), Replicate(), None),
        (Shard(1), Replicate(), Replicate()),
        (Shard(1), Shard(0), None),
    ):
        placed = [distribute_tensor(hidden, mesh, [tokens]), distribute_tensor(head, mesh, [rows])]
        target = labels if of_labels is None else distribute_tensor(labels, mesh, [of_labels])
        found = flce_ops.linear_cross_entropy(*placed, target, shift=True, reduction="none")
        torch.testing.assert_close(full(found), right)
    with pytest.raises(NotImplementedError, match="shift=True.*target is .*Shard.*whole sequences"):
        flce_ops.linear_cross_entropy(*placed, distribute_tensor(labels, mesh, [Shard(1)]), shift=True)
