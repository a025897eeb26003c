"""Inputs on a mesh, in any placement, together with the same inputs in one process.

Mesh dimensions are named after what they shard: "dp" tokens, "tp" the vocabulary.
"""

# B batch, T tokens of one sequence, N = B T, D hidden, V vocabulary

import pytest
import torch
from inputs import Inputs, make_inputs
from process_pool import worlds
from reference_loss import error, run_reference
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import flce_ops

B, T, D = 3, 14, 16  # T gives uneven shards over 4 and 8 ranks
V = 61  # prime: uneven shards for every number of ranks
TOLERANCE = 2e-5  # float32 against float64
FLOAT = 4  # bytes of a float32

R = Replicate()
ANY = worlds(2, 4, 8)
SQUARE = worlds(4, 8)  # two mesh dimensions
EVERY_SPLIT = pytest.mark.parametrize(  # every way to divide a vocabulary over the ranks
    "vocab", [V, 64, 9, 3], ids=["prime", "even", "last rank short or empty", "ranks without classes"]
)

# every argument that changes the loss, so that a factor missing on one shard is noticed
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"softcap": 5.0, "logit_scale": 0.7},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "softcap": 4.0, "z_loss": 1e-2, "logit_scale": 1.3},
]


def mesh_of(device: torch.device, *shape: int) -> DeviceMesh:
    names = ("dp", "tp")[-len(shape) :] if len(shape) < 3 else ("replicate", "dp", "tp")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def batch(device: torch.device, *, vocab: int = V, tokens: int = T, **options) -> Inputs:
    """make_inputs with tokens (B, T), the same in every process. Most ignored tokens are in the first sequence."""
    inputs = make_inputs((B * tokens, D, vocab), device="cpu", **options)
    inputs.target[: tokens // 2] = inputs.ignore_index  # ranks have different numbers of valid tokens
    changes = {}
    for name in ("input", "target", "token_weight"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            shaped = tensor.detach().reshape(B, tokens, *tensor.shape[1:])
            changes[name] = shaped.requires_grad_(tensor.requires_grad)
    return to_device(Inputs(**{**vars(inputs), **changes}), device)


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    moved = {
        name: value.detach().to(device).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in vars(inputs).items()
    }
    return Inputs(**moved)


def place(inputs: Inputs, mesh: DeviceMesh, tokens, rows, plain=()) -> Inputs:
    """Token tensors get the placements `tokens`, tensors with a row per class `rows`; the others are replicated."""
    layouts = {"input": tokens, "target": tokens, "token_weight": tokens, "linear_weight": rows, "linear_bias": rows}
    placed = {}
    for name, value in vars(inputs).items():
        if isinstance(value, Tensor) and name not in plain:
            layout = layouts.get(name, [R] * mesh.ndim)
            value = distribute_tensor(value.detach(), mesh, layout).requires_grad_(value.requires_grad)
        elif isinstance(value, Tensor):
            value = value.detach().clone().requires_grad_(value.requires_grad)
        placed[name] = value
    return Inputs(**placed)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_same_as_one_process(placed: Inputs, inputs: Inputs, loss_function=flce_ops.linear_cross_entropy, **options):
    placed.linear_weight.grad = None
    cotangent = torch.linspace(0.5, 1.5, inputs.target.numel(), device=inputs.target.device).view(inputs.target.shape)
    if options.get("reduction") != "none":
        cotangent = torch.tensor(0.7, device=inputs.target.device)
    expected = run_reference(inputs, cotangent, **options)
    loss = loss_function(*placed.args, **placed.options, **options)
    assert isinstance(loss, DTensor)
    assert loss.shape == expected["loss"].shape
    grad_output = distribute_tensor(cotangent.to(loss.dtype), loss.device_mesh, loss.placements)
    loss.backward(grad_output)
    assert error(full(loss), expected.pop("loss")) < TOLERANCE
    leaves = placed.leaves
    assert leaves.keys() == expected.keys()
    for name, exact in expected.items():
        assert error(full(leaves[name].grad), exact) < TOLERANCE, name
