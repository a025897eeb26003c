"""Snapshots of the forward and backward graphs: call_function targets with dtype and shape.

getitem, detach, view and the like are left out, because they differ between torch versions and cost nothing. So are
results that were not asked for, which contain no numbers.
Set EXPECTTEST_ACCEPT=1 to accept new snapshots.
"""

# N tokens, D hidden, V vocabulary

import re

import torch
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from inputs import make_inputs
from torch._dynamo.backends.common import aot_autograd

import flce_ops

N, D, V = 12, 8, 31
SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.bool: "b8",
    torch.bfloat16: "bf16",
}
# views, and constants, whose number differs between versions
LEFT_OUT = ("getitem", "detach", "view", "reshape", "alias", "clone", "_unsafe_view", "sym_size", "scalar_tensor")


def describe(value) -> str:
    if isinstance(value, torch.Tensor):
        shape = re.sub(r"\bs\d+", "N", ", ".join(map(str, value.shape)))  # the symbol's number differs between versions
        return f"{SHORT.get(value.dtype, value.dtype)}[{shape}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(v) for v in value if v.numel())})"
    return str(value)


def listing(graph_module) -> str:
    lines = []
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            name = str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))
            namespace = getattr(node.target, "namespace", "")
            if name not in LEFT_OUT:
                lines.append(f"{namespace + '.' if namespace else ''}{name} -> {describe(node.meta.get('val'))}")
    return "\n".join(lines)


def graphs_of(function, inputs, dynamic=False, **options) -> str:
    """The forward and backward graphs that the partitioner passes to a compiler."""
    found = {}

    def keep(name):
        def compiler(graph_module, example_inputs):
            found[name] = listing(graph_module)
            return make_boxed_func(graph_module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=min_cut_rematerialization_partition
    )
    if dynamic:
        for tensor in (inputs.input, inputs.target):
            torch._dynamo.mark_dynamic(tensor, 0)
    loss = torch.compile(function, backend=backend, fullgraph=True)(*inputs.args, **inputs.options, **options)
    if loss.requires_grad:
        loss.sum().backward()
    return "\n".join(f"{name}:\n{text}" for name, text in found.items())


def test_mean():
    graphs = graphs_of(flce_ops.linear_cross_entropy, make_inputs((N, D, V)))
    assert_expected_inline(
        graphs,
        """\
forward:
flce.linear_cross_entropy_with_grad -> (f32[], f32[12], f32[12, 8], f32[31, 8])
backward:
flce.linear_cross_entropy_upstream -> (f32[12, 8], f32[31, 8])""",
    )


def test_none():
    graphs = graphs_of(flce_ops.linear_cross_entropy, make_inputs((N, D, V)), reduction="none")
    assert_expected_inline(
        graphs,
        """\
forward:
flce.linear_cross_entropy_forward -> (f32[12], f32[12, 2], i16[12, 80])
aten.select -> f32[12]
aten.select -> f32[12]
aten.sub -> f32[12]
aten.add -> f32[12]
aten.clamp -> f32[12]
aten.sub -> f32[12]
aten.ne -> b8[12]
aten.where -> f32[12]
backward:
aten.where -> f32[12]
aten.neg -> f32[12]
aten.select_backward -> f32[12, 2]
aten.select -> f32[12]
flce.linear_cross_entropy_backward -> (f32[12, 8], f32[31, 8])""",
    )


def test_no_gradient():
    graphs = graphs_of(flce_ops.linear_cross_entropy, make_inputs((N, D, V), requires_grad=False))
    assert_expected_inline(
        graphs,
        """\
forward:
aten.ne -> b8[12]
aten.sum -> f32[]
flce.linear_cross_entropy_forward -> (f32[12], f32[12, 2])
aten.select -> f32[12]
aten.select -> f32[12]
aten.sub -> f32[12]
aten.add -> f32[12]
aten.clamp -> f32[12]
aten.sub -> f32[12]
aten.where -> f32[12]
aten.sum -> f32[]
aten.div -> f32[]""",
    )


def test_any_number_of_tokens():
    """A graph for any length contains no guard, size or constant of one length."""
    graphs = graphs_of(flce_ops.linear_cross_entropy, make_inputs((N, D, V)), dynamic=True)
    assert f"[{N}" not in graphs
    assert_expected_inline(
        graphs,
        """\
forward:
flce.linear_cross_entropy_with_grad -> (f32[], f32[N], f32[N, 8], f32[31, 8])
backward:
flce.linear_cross_entropy_upstream -> (f32[N, 8], f32[31, 8])""",
    )


def test_autocast():
    def under_autocast(*args, **options):
        with torch.autocast("cpu", torch.bfloat16):
            return flce_ops.linear_cross_entropy(*args, **options)

    assert_expected_inline(
        graphs_of(under_autocast, make_inputs((N, D, V))),
        """\
forward:
aten._to_copy -> bf16[12, 8]
aten._to_copy -> bf16[31, 8]
flce.linear_cross_entropy_with_grad -> (f32[], f32[12], bf16[12, 8], bf16[31, 8])
backward:
flce.linear_cross_entropy_upstream -> (bf16[12, 8], bf16[31, 8])
aten._to_copy -> f32[31, 8]
aten._to_copy -> f32[12, 8]""",
    )


def test_no_graph_holds_the_logits():
    for reduction in ("none", "mean"):
        inputs = make_inputs((N, D, V), bias=True, weight=True, token_weight=True)
        graphs = graphs_of(flce_ops.linear_cross_entropy, inputs, reduction=reduction, label_smoothing=0.1, z_loss=0.1)
        assert f"[{N}, {V}]" not in graphs and f"[{V}, {N}]" not in graphs
        assert "flce.linear_cross_entropy" in graphs
