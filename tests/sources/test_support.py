"""The support that was sampled from: rows of a token's own classes, in both forms, and what is said of wrong ones."""

# N tokens, K ids of each, E ids of all, D hidden, V vocabulary

import pytest
import torch
from inputs import SHAPES
from reference_loss import error
from reference_support import allowed, as_csr, dense_rows, draw
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import flce_ops

flce = torch.ops.flce
SHAPE = (61, 23, 127)
OPTIONS = [{}, {"softcap": 5.0, "logit_scale": 0.7, "temperature": 0.8}]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FORMS = {"padded": lambda ids: ids, "ids and offsets": as_csr}


def run(function, inputs, cotangents, **options):
    inputs = inputs.clone()
    found = function(*inputs.args, **options)
    rows = [found.log_probs, found.entropy] if hasattr(found, "log_probs") else list(found)
    sum((row * c).sum() for row, c in zip(rows, cotangents)).backward()
    gradients = {name: leaf.grad for name, leaf in inputs.leaves.items()}
    return {"log_probs": rows[0].detach(), "entropy": rows[1].detach(), **gradients}


def compared(inputs, ids, options, form="padded"):
    dtype = torch.float64 if inputs.input.dtype == torch.float64 else torch.float32
    generator = torch.Generator(ids.device).manual_seed(3)
    cotangents = [torch.randn(inputs.target.shape, dtype=dtype, device=ids.device, generator=generator) for _ in "lh"]
    exact = inputs.clone(torch.float64)
    truth = run(dense_rows, exact, [c.double() for c in cotangents], ids=ids, **options)
    ours = run(flce_ops.linear_log_probs, inputs, cotangents, support=FORMS[form](ids), entropy=True, **options)
    plain = run(dense_rows, inputs, cotangents, ids=ids, **options)
    return ours, plain, truth


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_gradients_are_no_worse_than_dense_logits_with_a_mask(device, dtype, bias, options, form):
    inputs, ids = draw(SHAPE, 9, dtype=dtype, bias=bias, device=device)
    ours, plain, truth = compared(inputs, ids, options, form)
    for name, found in ours.items():
        assert error(found, truth[name]) <= 1.5 * error(plain[name], truth[name]) + 10 * torch.finfo(found.dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "logit_scale": 0.7}], ids=str)
def test_each_token_may_have_a_temperature(device, dtype, options):
    inputs, ids = draw(SHAPE, 9, dtype=dtype, bias=True, device=device)
    temperature = 0.3 + 2.0 * torch.rand(SHAPE[0], device=device)
    ours, plain, truth = compared(inputs, ids, {"temperature": temperature, **options})
    for name, found in ours.items():
        assert error(found, truth[name]) <= 1.5 * error(plain[name], truth[name]) + 10 * torch.finfo(found.dtype).eps


@pytest.mark.parametrize("without", [0, 1, 2])  # every token has a support, none has, every other one
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(device, shape, without):
    inputs, ids = draw(shape, 6, dtype=torch.float64, bias=True, device=device, without=without)
    ours, _, truth = compared(inputs, ids, OPTIONS[1])
    for name, found in ours.items():
        assert error(found, truth[name]) < 1e-11, name


def test_lse_argmax_and_metrics_are_of_the_support(device):
    inputs, ids = draw(SHAPE, 9, dtype=torch.float64, bias=True, device=device)
    names = ("log_sum_sq_probs", "mean_logit")
    found, metrics = flce_ops.linear_log_probs(*inputs.args, support=ids, argmax=True, tail=True, return_metrics=names)
    inside, valid = allowed(ids, SHAPE[2]), inputs.target >= 0
    z = torch.nn.functional.linear(inputs.input, inputs.linear_weight, inputs.linear_bias)
    masked = z.masked_fill(~inside, -torch.inf)
    q = masked.softmax(-1)
    assert torch.equal(found.argmax, masked.argmax(-1).where(valid, -1))
    assert error(found.lse, masked.logsumexp(-1).where(valid, 0.0)) < 1e-13
    assert error(metrics["log_sum_sq_probs"], q.square().sum(-1).log().where(valid, 0.0)) < 1e-13
    mean = z.masked_fill(~inside, 0.0).sum(-1) / inside.sum(-1)
    assert error(metrics["mean_logit"], mean.where(valid, 0.0)) < 1e-13
    others = torch.log1p(-found.log_probs.exp()).where(valid & (inside.sum(-1) > 1), 0.0)
    assert error(found.tail_log_prob.where(valid & (inside.sum(-1) > 1), 0.0), others) < 1e-8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_order_nor_repeats_nor_the_form_matter(device, dtype):
    inputs, ids = draw(SHAPE, 9, dtype=dtype, bias=True, device=device)
    twice = torch.cat([ids.flip(1), ids], 1)
    ways = [ids, twice, twice.int(), as_csr(ids), [part.int() for part in as_csr(twice)]]
    cotangents = [torch.ones_like(inputs.target, dtype=torch.float32)] * 2
    first, *others = [run(flce_ops.linear_log_probs, inputs, cotangents, support=way, entropy=True) for way in ways]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_without_ids_has_all_classes_to_the_bit(device, dtype):
    inputs, ids = draw(SHAPE, 9, dtype=dtype, device=device)
    input, linear_weight, target, _ = (None if t is None else t.detach() for t in inputs.args)
    none = (ids < 0).all(1)
    alone = target.where(none, -100)  # the sums of a CPU's BLAS depend on how many rows there are
    found = flce_ops.linear_log_probs(input, linear_weight, target, support=ids, entropy=True)
    usual = flce_ops.linear_log_probs(input, linear_weight, alone, entropy=True)
    nowhere = flce_ops.linear_log_probs(input, linear_weight, target, support=ids[:, :0], entropy=True)
    everywhere = flce_ops.linear_log_probs(input, linear_weight, target, entropy=True)
    assert torch.equal(found.log_probs[none], usual.log_probs[none])
    assert torch.equal(found.entropy[none], usual.entropy[none])
    assert torch.equal(nowhere.log_probs, everywhere.log_probs) and torch.equal(nowhere.entropy, everywhere.entropy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_the_token_alone(device, dtype):
    inputs, ids = draw((96, 40, 301), 12, dtype=dtype, device=device, without=0, bias=True)
    input, *others = (t.detach() for t in inputs.args if t is not None)
    linear_weight, target, bias = others

    def of(tokens):
        leaf = input[tokens].requires_grad_()
        found = flce_ops.linear_log_probs(leaf, linear_weight, target[tokens], bias, support=ids[tokens], entropy=True)
        (found.log_probs.sum() - found.entropy.sum()).backward()
        return found.log_probs.detach(), found.entropy.detach(), leaf.grad

    whole = of(torch.arange(96, device=device))
    for tokens in (torch.arange(17, 18), torch.arange(3, 95), torch.randperm(96)[:33]):
        tokens = tokens.to(device)
        for alone, among in zip(of(tokens), whole):
            assert torch.equal(alone, among[tokens])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_class_has_probability_one(device, dtype, temperature):
    inputs, _ = draw(SHAPE, 2, dtype=dtype, bias=True, device=device)
    support = inputs.target.clamp(min=-1)[:, None]
    found = flce_ops.linear_log_probs(*inputs.args, support=support, entropy=True, temperature=temperature)
    assert torch.equal(found.log_probs, torch.zeros_like(found.log_probs)) and not found.entropy.any()


def test_a_bias_of_minus_infinity_takes_a_class_out_of_the_support():
    inputs, ids = draw(SHAPE, 9, dtype=torch.float64, bias=True, without=0)
    off = ids[:, 1].clamp(min=0).unique()
    off = off[~torch.isin(off, inputs.target)]
    with torch.no_grad():
        inputs.linear_bias[off] = -torch.inf
    kept = torch.where(torch.isin(ids, off), -1, ids)
    cotangents = [torch.ones(SHAPE[0], dtype=torch.float64)] * 2
    ways = [run(flce_ops.linear_log_probs, inputs, cotangents, support=way, entropy=True) for way in (ids, kept)]
    for name in ways[0]:
        assert error(ways[0][name].nan_to_num(), ways[1][name].nan_to_num()) < 1e-13, name
        assert ways[0][name].isfinite().all()


def test_what_ignored_tokens_hold_does_not_matter():
    inputs, ids = draw(SHAPE, 9, dtype=torch.float64, ignored=0.4)
    cotangents = [torch.ones(SHAPE[0], dtype=torch.float64)] * 2
    usual = run(flce_ops.linear_log_probs, inputs, cotangents, support=ids, entropy=True)
    ignored = inputs.target < 0
    with torch.no_grad():
        inputs.input[ignored] = torch.nan
    ids[ignored] = torch.randint(-1, SHAPE[2], (int(ignored.sum()), 9))
    found = run(flce_ops.linear_log_probs, inputs, cotangents, support=ids, entropy=True)
    assert all(torch.equal(usual[name], found[name]) for name in usual)
    assert not found["input"][ignored].any()


def test_no_class_outside_is_multiplied():
    inputs, ids = draw(SHAPE, 9, without=0)
    with FlopCounterMode(display=False) as counter:
        flce_ops.linear_log_probs(*inputs.args, support=ids).log_probs.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * ids.numel() * SHAPE[1]


@pytest.mark.parametrize("names", ["input", "linear_weight", "linear_bias"])
def test_one_gradient_alone_is_what_it_is_beside_the_others(device, names):
    inputs, ids = draw(SHAPE, 9, dtype=torch.float64, bias=True, device=device)
    cotangents = [torch.ones_like(inputs.input[:, 0])] * 2
    every = run(flce_ops.linear_log_probs, inputs, cotangents, support=ids, entropy=True)
    for name, leaf in list(inputs.leaves.items()):
        leaf.requires_grad_(name in names)
    alone = run(flce_ops.linear_log_probs, inputs, cotangents, support=ids, entropy=True)
    assert torch.equal(alone[names], every[names]) and len(alone) == 3


def test_derivatives_are_the_differences():
    inputs, ids = draw((7, 5, 13), 4, dtype=torch.float64, bias=True)

    def results(*leaves):
        found = flce_ops.linear_log_probs(leaves[0], leaves[1], inputs.target, leaves[2], support=ids, entropy=True)
        return found.log_probs, found.lse, found.entropy

    leaves = inputs.input, inputs.linear_weight, inputs.linear_bias
    assert torch.autograd.gradcheck(results, leaves)


def test_sequences_autocast_learnt_scale_and_small_workspace():
    inputs, ids = draw((60, 23, 127), 9, dtype=torch.float64)
    usual = flce_ops.linear_log_probs(*inputs.args, support=ids).log_probs
    shaped = inputs.input.view(4, 15, 23), inputs.linear_weight, inputs.target.view(4, 15)
    for support in (ids.view(4, 15, 9), as_csr(ids)):
        assert torch.equal(flce_ops.linear_log_probs(*shaped, support=support).log_probs, usual.view(4, 15))
    with flce_ops.workspace(40000):
        assert error(flce_ops.linear_log_probs(*inputs.args, support=ids).log_probs, usual) < 1e-14
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    flce_ops.linear_log_probs(*inputs.args, support=ids, logit_scale=scale).log_probs.sum().backward()
    other = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    dense_rows(*inputs.args, ids=ids, logit_scale=other)[0].sum().backward()
    assert error(scale.grad, other.grad) < 1e-10  # a sum whose terms may cancel
    half = inputs.clone(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = flce_ops.linear_log_probs(*half.args, support=ids).log_probs
    assert torch.equal(found, flce_ops.linear_log_probs(*inputs.clone(torch.bfloat16).args, support=ids).log_probs)


# ---------------------------------------------------------------- policies


def policy_loss(log_probs, advantages, old):  # PPO's, of tokens
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_policy_loss_is_that_of_the_renormalised_policy(device, dtype, reduction):
    inputs, ids = draw(SHAPE, 9, dtype=dtype, bias=True, device=device)
    exact, valid = inputs.clone(torch.float64), inputs.target >= 0
    with torch.no_grad():
        log_probs = dense_rows(*exact.args, ids=ids)[0]
    old, advantages = log_probs + 0.3 * torch.randn_like(log_probs), torch.randn_like(log_probs)
    of = {"advantages": advantages.to(torch.float32), "old_log_probs": old.to(torch.float32)}
    of = of if dtype != torch.float64 else {"advantages": advantages, "old_log_probs": old}

    def reduced(rows):
        rows = rows.where(valid, 0.0)
        return {"mean": rows.sum() / valid.sum(), "sum": rows.sum(), "none": rows}[reduction]

    def dense(made):
        loss = reduced(policy_loss(dense_rows(*made.args, ids=ids)[0], of["advantages"], of["old_log_probs"]))
        loss.sum().backward()
        return [loss, *(leaf.grad for leaf in made.leaves.values())]

    truth, plain, ours = dense(exact), dense(inputs.clone()), inputs.clone()
    input, linear_weight, target, linear_bias = ours.args
    call = {**of, "linear_bias": linear_bias, "reduction": reduction, "support": ids}
    found = flce_ops.linear_policy_loss(input, linear_weight, target, **call)
    found.loss.sum().backward()
    for mine, theirs, right in zip([leaf.grad for leaf in ours.leaves.values()], plain[1:], truth[1:]):
        assert error(mine, right) <= 1.5 * error(theirs, right) + 10 * torch.finfo(dtype).eps
    # losses of both signs may add up to nearly 0
    size = reduced(policy_loss(log_probs, advantages, old).abs()).norm()
    mine, theirs = ((loss - truth[0]).norm() for loss in (found.loss, plain[0]))
    assert mine <= 1.5 * theirs + 10 * torch.finfo(dtype).eps * size
    assert not found.log_probs.requires_grad


def test_tokens_of_weight_0_are_left_out():
    inputs, ids = draw(SHAPE, 9, dtype=torch.float64)
    token_weight = torch.ones(SHAPE[0], dtype=torch.float64)
    token_weight[5:20] = 0.0
    ids[5:20] = torch.where(ids[5:20] >= 0, 0, -1)
    ids[5:20, 0] = inputs.target[5:20].clamp(min=-1)
    input, linear_weight, target, _ = inputs.args
    call = (input, linear_weight, target, torch.ones(SHAPE[0]))
    found = flce_ops.linear_policy_loss(*call, support=ids, token_weight=token_weight)
    found.loss.backward()
    assert not inputs.input.grad[5:20].any() and not found.log_probs[5:20].any()


# ---------------------------------------------------------------- graphs and transforms


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_one_graph_without_breaks(device, form, dynamic):
    inputs, ids = draw(SHAPE, 9, bias=True, device=device)
    support = FORMS[form](ids)

    def loss(input, linear_weight, target, linear_bias, support):
        found = flce_ops.linear_log_probs(input, linear_weight, target, linear_bias, support=support, entropy=True)
        return (found.log_probs - 0.1 * found.entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    ours, theirs = inputs.clone(), inputs.clone()
    results = [f(*made.args, support) for f, made in ((compiled, ours), (loss, theirs))]
    for result in results:
        result.backward()
    assert error(*results) < 1e-6
    for name in ours.leaves:
        assert error(ours.leaves[name].grad, theirs.leaves[name].grad) < 1e-6


def test_an_exported_program_has_the_operator():
    inputs, ids = draw(SHAPE, 9, requires_grad=False)

    class Rows(torch.nn.Module):
        def forward(self, input, linear_weight, target, ids):
            return flce_ops.linear_log_probs(input, linear_weight, target, support=ids).log_probs

    args = (*inputs.args[:3], ids)
    tokens = torch.export.Dim("tokens", min=2, max=1000)
    program = torch.export.export(Rows(), args, dynamic_shapes=({0: tokens}, None, {0: tokens}, {0: tokens}))
    fewer = tuple(t[:30] if t.shape[0] == SHAPE[0] else t for t in args)
    for given in (args, fewer):
        assert torch.equal(program.module()(*given), Rows()(*given))
    with pytest.raises(NotImplementedError, match="export_decompositions: rows of a support"):
        program.run_decompositions(flce_ops.export_decompositions())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)])
def test_opcheck(device, dtype):
    inputs, ids = draw(SHAPE, 9, dtype=dtype, bias=True, device=device)
    opcheck(flce.linear_log_probs.default, inputs.args, {"support": ids, "entropy": True})
    flat, offsets = as_csr(ids)
    opcheck(flce.linear_log_probs.default, inputs.args, {"support": flat, "support_offsets": offsets})
    operands, support = prepared(inputs, ids)
    opcheck(flce.linear_support_forward.default, (*operands, *support), {"expected_log_prob": True, "argmax": True})
    with torch.no_grad():
        _, lse, expected, *_, rest, products = flce.linear_support_forward(*operands, *support, expected_log_prob=True)
    cotangents = [torch.randn_like(lse), torch.randn_like(lse), None]
    options = {"output_mask": [True, True, True], "lse_rest": rest, "expected_log_prob": expected}
    options["grad_expected_log_prob"] = torch.randn_like(lse)
    args = (*cotangents, *(t.detach() for t in operands), *support, products, lse)
    opcheck(flce.linear_support_backward.default, args, options)


def prepared(inputs, ids):
    from flce_ops.math.support import PaddedIds

    classes = inputs.linear_weight.shape[0]
    return inputs.args, PaddedIds(ids).support(inputs.target != -100, classes, slice(0, classes))


def test_torch_func():
    inputs, ids = draw((12, 5, 31), 4, dtype=torch.float64, without=0, ignored=0.0)

    def loss(input, linear_weight, target, ids):
        return flce_ops.linear_log_probs(input, linear_weight, target, support=ids).log_probs.sum()

    args = (*(t.detach() for t in inputs.args[:3]), ids)
    grads = torch.func.grad(loss, (0, 1))(*args)
    loss(inputs.input, inputs.linear_weight, inputs.target, ids).backward()
    assert torch.equal(grads[0], inputs.input.grad) and torch.equal(grads[1], inputs.linear_weight.grad)
    one = torch.func.grad(lambda x, target, ids: loss(x[None], args[1], target[None], ids[None]))
    each = torch.func.vmap(one)(args[0], args[2], ids)
    assert error(each, inputs.input.grad) < 1e-13


def test_second_derivatives_are_refused_by_the_name_of_the_function_that_was_called():
    inputs, ids = draw(SHAPE, 9, dtype=torch.float64)
    input, linear_weight, target, _ = inputs.args

    def of_policy():
        advantages = torch.ones(target.shape, dtype=torch.float64)
        return flce_ops.linear_policy_loss(input, linear_weight, target, advantages, support=ids).loss

    def of_log_probs():
        return flce_ops.linear_log_probs(input, linear_weight, target, support=ids).log_probs.sum()

    for function, name in ((of_policy, "linear_policy_loss"), (of_log_probs, "linear_log_probs")):
        (grad,) = torch.autograd.grad(function(), input, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"^{name}: second derivatives with a support"):
            grad.sum().backward()


@pytest.mark.parametrize("function", ["linear_log_probs", "linear_policy_loss"])
def test_ids_that_no_token_reads_may_be_anything(device, function):
    inputs, ids = draw(SHAPE, 9, dtype=torch.float64, without=0, ignored=0.4, device=device)
    input, linear_weight, target, _ = inputs.args
    per_token = (torch.ones(target.shape, dtype=torch.float64, device=device),) if function.endswith("loss") else ()
    flat, offsets = as_csr(ids)
    wrong = torch.tensor([-7, 10**12, SHAPE[2]], device=device)
    ignored = target == -100
    anything = torch.where(ignored[:, None], wrong[torch.randint(3, ids.shape, device=device)], ids)
    ragged_anything, of_token = flat.clone(), torch.repeat_interleave(offsets.diff())
    ragged_anything[ignored[of_token]] = 10**12
    usual = getattr(flce_ops, function)(input, linear_weight, target, *per_token, support=ids).log_probs
    for support in (anything, (ragged_anything, offsets), (torch.cat([flat, wrong]), offsets)):
        found = getattr(flce_ops, function)(input, linear_weight, target, *per_token, support=support).log_probs
        assert torch.equal(found, usual)


# ---------------------------------------------------------------- wrong supports


def wrong_calls():
    inputs, ids = draw(SHAPE, 9, without=0, ignored=0.0, requires_grad=False)
    outside = ids.clone()
    outside[3] = (inputs.target[3] + 1) % SHAPE[2]
    flat, offsets = as_csr(ids)
    cases = {
        "outside": (outside, ValueError, "expected target to be among the ids of its token's support"),
        "outside, ragged": (as_csr(outside), ValueError, "expected target to be among the ids of its token's support"),
        "range": (ids.clone().fill_(SHAPE[2]), ValueError, r"class indices in \[0, 127\), or -1 for none, got another"),
        "negative": (ids.clone().fill_(-2), ValueError, r"class indices in \[0, 127\), or -1 for none, got another"),
        "dtype": (ids.float(), TypeError, "expected support in int64 or int32, got torch.float32"),
        "shape": (ids[:-1], ValueError, r"expected support of shape \(61,\) \+ \(K,\)"),
        "one": (ids[:, 0], ValueError, r"expected support of shape \(61,\) \+ \(K,\)"),
        "offsets": ((flat, offsets[:-1]), ValueError, r"a pair of ids \(E,\) and offsets \(62,\)"),
        "falling": ((flat, offsets.flip(0)), ValueError, "expected offsets of support to rise from 0"),
        "beyond": ((flat[:-1], offsets), ValueError, "expected offsets of support to rise from 0"),
        "offsets' dtype": ((flat, offsets.double()), TypeError, "expected offsets of support in int64 or int32"),
        "type": ("top-p", TypeError, r"expected support to be a tensor of ids \(..., K\) or a pair \(ids, offsets\)"),
        "sparse": (ids.to_sparse(), TypeError, "expected support to be a dense tensor"),
        "ids": (ids[:, :1].expand(-1, 2**26), ValueError, "expected support of at most 2147483647 ids, got 4093640704"),
    }
    return inputs, cases


@pytest.mark.parametrize("case", wrong_calls()[1])
def test_a_wrong_support_is_refused_by_name(case):
    inputs, cases = wrong_calls()
    support, kind, message = cases[case]
    input, linear_weight, target, _ = inputs.args
    with pytest.raises(kind, match=f"linear_log_probs: {message}|linear_log_probs: .*{message}"):
        flce_ops.linear_log_probs(input, linear_weight, target, support=support)
    with pytest.raises(kind, match=message):
        flce_ops.linear_policy_loss(input, linear_weight, target, torch.ones(SHAPE[0]), support=support)


def test_a_shifted_target_is_refused_beside_a_support():
    inputs, ids = draw(SHAPE, 9)
    with pytest.raises(NotImplementedError, match="linear_log_probs: shift=True with a support is not implemented"):
        flce_ops.linear_log_probs(*inputs.args, support=ids, shift=True)


def test_a_target_outside_the_vocabulary_is_an_index_error():
    inputs, ids = draw(SHAPE, 9, without=0, ignored=0.0)
    inputs.target[4] = SHAPE[2]
    with pytest.raises(IndexError, match="expected target in"):
        flce_ops.linear_log_probs(*inputs.args, support=ids)


def test_a_target_that_nobody_could_refuse_has_log_probability_minus_infinity(device):
    inputs, ids = draw(SHAPE, 9, dtype=torch.float64, without=0, ignored=0.0, device=device)
    ids[3] = (inputs.target[3] + 1) % SHAPE[2]
    operands, support = prepared(inputs, ids)
    found, *_ = flce.linear_support_forward(*operands, *support)
    assert found[3] == -torch.inf and found.isinf().sum() == 1
    if device == "cuda":
        rows = flce_ops.linear_log_probs(*inputs.args, support=ids).log_probs
        assert rows[3] == -torch.inf and rows.isinf().sum() == 1


def test_a_threshold_without_a_gradient_changes_nothing():
    input, weight, target = torch.randn(4, 3, requires_grad=True), torch.randn(6, 3), torch.arange(4)
    call, per_token = {"support": target[:, None]}, torch.randn(4)
    with torch.no_grad():
        usual = flce_ops.linear_log_probs(input, weight, target, **call)
        found = flce_ops.linear_log_probs(input, weight, target, gradient_threshold=1e-3, **call)
        assert torch.equal(usual.log_probs, found.log_probs)
        usual = flce_ops.linear_policy_loss(input, weight, target, per_token, **call)
        found = flce_ops.linear_policy_loss(input, weight, target, per_token, gradient_threshold=1e-3, **call)
        assert torch.equal(usual.loss, found.loss)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_rank_without_tokens_may_hold_the_classes_of_others(device, dtype):
    """Ids and offsets of all tokens are on every rank. Where tokens are cut unevenly, one may have none of them."""
    inputs, _ = draw((0, 5, 31), 4, dtype=dtype, device=device)
    support = (torch.arange(9, device=device), torch.zeros(1, dtype=torch.int64, device=device))
    found = flce_ops.linear_log_probs(*inputs.args, support=support, entropy=True, argmax=True)
    assert found.log_probs.shape == found.entropy.shape == found.argmax.shape == (0,)
    (found.log_probs.sum() + found.entropy.sum()).backward()
    for name, leaf in inputs.leaves.items():
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any(), name
