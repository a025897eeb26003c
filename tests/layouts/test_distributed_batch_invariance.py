"""batch_invariant=True over a sharded vocabulary: a token's results have the bits that one rank's have.

Through DTensors over gloo and over NCCL, and the Triton kernels in the interpreter. Shards begin at a multiple of a
tile, of 128 classes or of 256.
"""

# N tokens, D hidden, V vocabulary

import pytest
import torch
import torch.distributed as dist
from process_pool import run_in_world, worlds
from sharded_inputs import mesh_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flce_ops
from benchmarks.batch_invariance import bits

N, D, V = 37, 24, 2047  # the last shard is ragged, of 2 ranks as of 4
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)")
METRICS = ["lse", "entropy", "log_sum_sq_probs", "mean_logit", "z_loss", "argmax", "token_accuracy", "is_top1"]
OPTIONS = {"none": {}, "capped": {"softcap": 5.0, "logit_scale": 0.7}, "scaled": {"temperature": 0.6}}


def operands_of(dtype, device="cpu"):
    x, w = torch.randn(N, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    target = torch.randint(V, (N,))
    target[::5] = -100
    bias = torch.randn(V, dtype=dtype)
    bias[500:1100] = -torch.inf  # a shard of 4 ranks, and parts of others
    rescued = torch.arange(6, N, 5)  # tokens whose target has a logit far below the others: their rows are made again
    w[target[rescued]] = -8.0 * x[rescued]
    bias[target[rescued]] = 0.0
    return tuple(operand.to(device) for operand in (x, w, target, bias))


def tensors_of(found):
    if isinstance(found, torch.Tensor):
        found = [found]
    parts = found.values() if hasattr(found, "values") else found
    return [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts if part is not None]


def calls(options, device="cpu"):
    """Functions of operands, with the option or without."""
    weight = torch.rand(V).to(device)
    shared = {"advantages": torch.randn(N).to(device), "old_log_probs": (torch.randn(N) - 7.0).to(device)}

    def losses(x, w, y, b, **more):
        return flce_ops.linear_cross_entropy(
            x, w, y, b, weight=weight, label_smoothing=0.1, z_loss=1e-3, reduction="none", **options, **more
        )

    def metrics(x, w, y, b, **more):
        named = [name for name in METRICS if name not in ("z_loss", "entropy")]
        return flce_ops.linear_cross_entropy(x, w, y, b, return_metrics=named, **options, **more)[1]

    def metrics_and_entropy(x, w, y, b, **more):
        named = [name for name in METRICS if name != "z_loss"]
        return flce_ops.linear_cross_entropy(x, w, y, b, return_metrics=named, **options, **more)[1]

    def log_probs(x, w, y, b, **more):
        all_of = {"entropy": True, "argmax": True, "return_metrics": ["log_sum_sq_probs", "mean_logit"]}
        found, named = flce_ops.linear_log_probs(x, w, y, b, **all_of, **options, **more)
        return [*found, *named.values()]

    def plain_log_probs(x, w, y, b, **more):
        return flce_ops.linear_log_probs(x, w, y, b, **options, **more)

    def policy(x, w, y, b, **more):
        return flce_ops.linear_policy_loss(
            x, w, y, *shared.values(), linear_bias=b, reduction="none", **options, **more
        )

    def mean_policy(x, w, y, b, **more):
        return flce_ops.linear_policy_loss(x, w, y, *shared.values(), linear_bias=b, **options, **more).log_probs

    return losses, metrics, metrics_and_entropy, log_probs, plain_log_probs, policy, mean_policy


def differing(mine, others):
    assert len(mine) == len(others) and mine
    return sum(int((counted(a) != counted(b)).sum()) for a, b in zip(mine, others, strict=True))


def counted(result):
    """The bits of a loss, or of tokens that count: the entropy of others is 0 or -0."""
    counts = torch.arange(N, device=result.device) % 5 > 0
    return bits(result.detach()[counts] if result.dim() else result.detach())


@pytest.mark.parametrize("world", worlds(2, 4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_results_have_the_bits_of_one_rank(world, dtype):
    if world[0] == "cuda" and dtype.itemsize > 2:
        pytest.skip("not promised: cuBLAS picks its kernel by the number of rows")
    run_in_world(world, on_shards, dtype)


def on_shards(device, dtype):
    mesh = mesh_of(device, dist.get_world_size())
    x, w, target, bias = operands_of(dtype, device)
    sharded = [distribute_tensor(part, mesh, [Shard(0)]) for part in (w, bias)]
    x_of_all, different = distribute_tensor(x, mesh, [Replicate()]), 0
    for options in OPTIONS.values():
        for call in calls(options, device):
            for wanted in (True, False):
                if wanted and device.type == "cuda" and call.__name__ == "metrics_and_entropy":
                    continue  # one rank's kernels make them in one pass, with the GEMM's logit of the target
                leaf = x_of_all.detach().requires_grad_(wanted)
                one = tensors_of(call(x.detach().requires_grad_(wanted), w, target, bias, batch_invariant=True))
                with flce_ops.workspace(1 << 18):
                    found = call(leaf, sharded[0], target, sharded[1], batch_invariant=True)
                assert not differing(one, tensors_of(found)), (call.__name__, options, wanted)
            different += differing(one, tensors_of(call(x_of_all, sharded[0], target, sharded[1])))
    assert different > 0  # without the option shards are added up in another order


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_those_of_one_rank(ranks):
    run_in_world(("cpu", ranks), gradients)


def gradients(device):
    mesh = mesh_of(device, dist.get_world_size())
    x, w, target, bias = operands_of(torch.float64)
    bias = bias.nan_to_num(neginf=0.0)
    for call in calls({}):
        found = []
        for parts in ((x, w, bias), [distribute_tensor(t, mesh, [p]) for t, p in zip((x, w, bias), SHARDED)]):
            leaves = [part.detach().requires_grad_() for part in parts]
            results = tensors_of(call(leaves[0], leaves[1], target, leaves[2], batch_invariant=True))
            value = sum((k + 1) * result.sum() for k, result in enumerate(results) if result.requires_grad)
            if isinstance(value, int):
                break  # metrics have no gradient
            found.append(tensors_of(list(torch.autograd.grad(value, leaves))))
        for one, other in zip(*found[:2]):
            torch.testing.assert_close(other, one)


SHARDED = [Replicate(), Shard(0), Shard(0)]


def test_what_is_refused_over_shards():
    run_in_world(("cpu", 2), refused)


def refused(device):
    mesh = mesh_of(device, 2)
    x, w, y = torch.randn(8, 5), torch.randn(512, 5), torch.randint(500, (8,))
    x = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    for classes in (500, 128, 1):
        shards = distribute_tensor(w[:classes], mesh, [Shard(0)])
        for function in (flce_ops.linear_cross_entropy, flce_ops.linear_log_probs):
            with pytest.raises(NotImplementedError, match="batch_invariant over a vocabulary of which every rank has"):
                function(x, shards, y % classes, batch_invariant=True)
    shards = distribute_tensor(w, mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="batch_invariant of several classes a token"):
        flce_ops.linear_log_probs(x, shards, y[:, None], batch_invariant=True)
    loss = flce_ops.linear_log_probs(x, shards, y, batch_invariant=True).log_probs.sum()
    with pytest.raises(NotImplementedError, match="second derivatives with batch_invariant over a sharded vocabulary"):
        torch.autograd.grad(loss, x, create_graph=True)


@no_cuda
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_kernels_have_the_bits_of_one_rank(ranks):
    pytest.importorskip("triton")
    run_in_world(("cpu", ranks), by_kernels)


def by_kernels(device):
    from flce_ops.triton import launch_forward

    rank, ranks, classes = dist.get_rank(), dist.get_world_size(), 511
    x, w, target, bias = operands_of(torch.float32)
    w, bias, target = w[:classes], bias[:classes], torch.where(target < 0, target, target % classes)
    rows = -(-classes // ranks)
    own = slice(rank * rows, min((rank + 1) * rows, classes))
    asked = dict.fromkeys(("logit_sum", "expected_log_prob", "argmax", "log_sum_sq_probs", "mean_logit"), True)
    for options, weight in (({}, None), (asked, None), (asked, torch.rand(classes))):
        own_weight = None if weight is None else weight[own]
        one = launch_forward(x, w, target, bias, weight, **options)
        group = {"group": dist.group.WORLD.group_name, "ranks": ranks, "vocab_start": own.start, "vocab_size": classes}
        with flce_ops.workspace(1 << 16):  # several chunks
            found = launch_forward(x, w[own], target, bias[own], own_weight, **options, **group, batch_invariant=True)
        assert not differing([r for r in one if r.numel()], [r for r in found if r.numel()])
        shard = launch_forward(x, w[own], target, bias[own], None, **options, vocab_start=own.start, vocab_size=classes)
        assert differing([one[1]], [shard[1]])
