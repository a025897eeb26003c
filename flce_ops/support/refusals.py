"""What is refused: what is not implemented, with the error texts, and hints for a likely mistake. Errors read them.

    HOLES       what a single argument or one operator does not do
    REFUSED     combinations: from features of a call (features_of in entry/loss.py) to the text of the error
    ELSEWHERE   an argument's names in other libraries; INSTEAD: what to pass for an argument that does not exist

All other combinations are implemented. A new feature that does not combine with everything adds its name and its rows
to REFUSED:

    source        positions (a head for each)
    objective     class probabilities, target_weight, metrics, argmax, teacher_probs
    sink          main_grad, sparse gradient, gradient_class_order, batch_invariant
    layout        DTensors, sharded vocabulary
"""

import difflib
import threading
from typing import Any, NoReturn

import torch
from torch import Tensor

HOLES = {
    # transforms and exporters
    "forward mode": "forward-mode differentiation (jvp, jacfwd, hessian, make_dual) is not implemented; use reverse "
    "mode ({modes})",
    "empty vmap": "vmap over an empty batch is not implemented; leave the call out where it is",
    "handed over in torch.func": "torch.func transforms are not implemented; call flce_ops.cross_entropy, which has "
    "them",
    "functionalize": "torch.func.functionalize, with which torch's scan and associative_scan make gradients, takes no "
    "autograd.Function; call it for all tokens at once, which it divides into chunks itself, or in torch's map",
    "torch.fx": "torch.fx.symbolic_trace is not implemented, since its Proxy (as {name}) has no shape or dtype; use "
    "torch.export.export, or torch.fx.wrap your function that makes the call",
    "onnx": "ONNX has no such operator; call torch's own formula there",
    # arguments that get no gradient
    "number": "{name} gets no gradient here; pass it detached",
    "constant": "{name} is a constant and gets no gradient; pass {name}.detach()",
    "closure": "{name} closes over a tensor of shape {shape} that requires a gradient and would get none; detach it, "
    "or multiply the loss by it",
    "temperature of tokens": "a temperature of each token is not implemented; pass input / temperature.unsqueeze(-1), "
    "or logits so divided; with linear_bias make the bias one more feature of both operands first; with softcap call "
    "once for each temperature",
    "teacher": "the teacher is constant, but {name} requires a gradient; pass {name}.detach(), or freeze the teacher "
    "with requires_grad_(False)",
    # derivatives
    "sparse entropy": "the gradient of the entropy with gradient_threshold is not implemented, as it is not made of "
    "probabilities alone; detach the entropy, or leave gradient_threshold out",
    "second of a sparse gradient": "second derivatives of a loss with gradient_threshold are not implemented, as its "
    "gradient is a sample; leave gradient_threshold out",
    "second of main_grad": "a backward that adds to main_grad cannot be differentiated (create_graph=True); leave "
    "main_grad out where a second derivative is wanted",
    "second of given logits": "second derivatives of a scalar loss are not implemented, as its gradient was made in "
    'forward and the logits were not kept; use reduction="none" and reduce the losses, which can be differentiated '
    "twice",
    "second of a divergence": "second derivatives are not implemented; use F.kl_div or F.cross_entropy on the logits, "
    "F.linear(input, linear_weight), for them",
    # values of arguments
    "float16": "gradient_threshold in float16 is not implemented, as its gradients wait for the loss scale; use "
    "bfloat16",
    "temperature and softcap": "a tensor as temperature is not implemented together with softcap, behind which it "
    "divides; pass temperature as a number",
    "option of probabilities": "{name} is not implemented for a target of class probabilities{instead}",
    "acc_dtype": "options.acc_dtype={given} is not implemented for input in {dtype}, whose sums are kept in "
    "{expected}; pass acc_dtype=None",
    "accurate main_grad": "options.acc_policy='accurate' is not implemented with main_grad for {dtype} on a CPU, where "
    "it multiplies a float32 copy of linear_weight; leave one of them out",
    # DTensors
    "vocab_size of DTensors": "vocab_size={vocab_size} with DTensors is not implemented, as rows would move between "
    "ranks; give the padding a bias of -inf in both models, or distribute weight[:vocab_size]",
    "scale of DTensors": "a DTensor as {name} is not implemented; pass a plain tensor or a number, or multiply the "
    "hidden states by it before the head",
    "shift over ranks": "shift=True needs the label of the next position, which another rank may hold: target is "
    "{layout}; pass the labels of whole sequences, as a plain tensor that is the same on every rank or as a DTensor "
    "that is not sharded along them, or shift before you shard",
    "strided classes": "logits are sharded along their classes in strides, {layout}, which is not implemented; pass "
    "logits.redistribute(placements=[Shard(-1)]) or [Replicate()]",
    "two dimensions of classes": "linear_weight is {layout}: a vocabulary sharded over more than one mesh dimension "
    "is not implemented; shard it over one and replicate it over the others",
}


def refuse_hole(op: str, hole: str, **said: Any) -> NoReturn:
    not_implemented(op, HOLES[hole].format(**said))


def not_implemented(op: str, text: str) -> NoReturn:
    raise NotImplementedError(f"{op}: {text}")


NO_SPARSE = "the sparse gradient {} is not implemented; leave gradient_threshold out"
REFUSED: dict[str, dict[tuple[str, ...], str]] = {
    "target_weight": {
        ("argmax",): "return_metrics of accuracy and argmax is not implemented beside target_weight, whose target "
        "names several classes; linear_log_probs(..., argmax=True) finds the largest logit",
    },
    "main_grad": {
        ("torch.func",): "main_grad is not implemented under torch.func, whose functions are pure",
        ("DTensors",): "main_grad beside DTensors is not implemented; pass this rank's tensors, or leave main_grad out",
        ("positions",): "main_grad is not implemented for a K-dimensional loss; add the gradient to it yourself",
        ("class probabilities",): "main_grad is not implemented for a target of class probabilities; add the gradient "
        "to it yourself",
    },
    "sparse gradient": {
        ("positions",): NO_SPARSE.format("of a K-dimensional loss"),
        ("class probabilities",): NO_SPARSE.format("of class probabilities"),
        ("main_grad",): NO_SPARSE.format("with main_grad"),
        ("gradient_class_order", "DTensors"): NO_SPARSE.format("of DTensors with gradient_class_order"),
        ("sharded vocabulary",): NO_SPARSE.format("over a sharded vocabulary"),
    },
    "learnt scale": {
        ("DTensors",): "the gradient of a logit_scale or temperature beside DTensors is not implemented; pass it "
        "detached, or multiply the hidden states by it before the head",
        ("sparse gradient",): NO_SPARSE.format("beside the gradient of a logit_scale or temperature"),
    },
    "batch_invariant": {
        ("sharded vocabulary",): "batch_invariant over a sharded vocabulary is not implemented; leave it out",
        ("sparse gradient",): "batch_invariant of a sparse gradient is not implemented; leave one of them out",
        ("a CPU",): "batch_invariant on a CPU is not implemented; leave it out",
    },
    "positions": {
        ("DTensors",): "a K-dimensional loss (linear_weight of shape {linear_weight}) with DTensors is not "
        "implemented; pass plain tensors, or one head of shape (V, D) at a time",
        ("target_weight",): "target_weight is not implemented for a K-dimensional loss (linear_weight of shape "
        "{linear_weight}); pass one head of shape (V, D) at a time",
    },
    "class probabilities": {
        ("metrics",): "return_metrics is not implemented for a target of class probabilities, which names no class; "
        "linear_log_probs(..., argmax=True) finds the largest logit",
        ("DTensors",): "a target of class probabilities with DTensors is not implemented; pass plain tensors "
        "throughout, or the model that makes them to linear_kl_div as DTensors",
    },
    "teacher_probs": {
        ("DTensors",): "teacher_probs with DTensors is not implemented; pass the teacher's hidden states and weight "
        "(teacher_input, teacher_weight) as DTensors, or plain tensors throughout",
    },
}


def refuse(op: str, call: Any, features: set[str]) -> None:
    for feature, rows in REFUSED.items():
        if feature in features:
            for others, text in rows.items():
                if features.issuperset(others):
                    not_implemented(op, text.format(linear_weight=tuple(call.linear_weight.shape)))


class Running(threading.local):
    function: str = ""  # the public function that the user called, in its backward, too


running = Running()


# D hidden, V vocabulary, L positions

# Each of this package's arguments, with its names in other libraries and in users' code.
ELSEWHERE = {
    "input": "hidden hidden_state hidden_states last_hidden_state x h e inp inputs embeddings features student_input "
    "student_hidden student_hidden_states",
    "logits": "input inputs x pred preds y_pred output outputs",
    "linear_weight": "w c head head_weight lm_head lm_head_weight lin_weight classifier classifier_weight "
    "output_weight proj_weight embed_weight student_weight student_lm_head",
    "linear_bias": "b bias head_bias lm_head_bias student_bias",
    "target": "y y_true label labels targets target_ids selected_token_ids completion_ids",
    "weight": "class_weight class_weights ce_weight",
    "token_weight": "sample_weight sample_weights loss_weight loss_weights loss_mask token_weights mask attention_mask",
    "normalizer": "denominator n_items num_items_in_batch num_tokens",
    "softcap": "logit_softcapping final_logit_softcapping softcapping logits_soft_cap logit_cap cap",
    "logit_scale": "logits_scaling logits_scale logit_multiplier scale",
    "z_loss": "lse_square_scale z_loss_weight z_loss_coef",
    "ignore_index": "ignore_idx ignored_index pad_token_id padding_idx",
    "reduction": "reduce size_average",
    "inplace_backward": "inplace",
    "teacher_input": "teacher teacher_hidden teacher_hidden_state teacher_hidden_states",
    "teacher_weight": "teacher_head teacher_lm_head teacher_linear_weight",
    "teacher_bias": "teacher_linear_bias",
    "teacher_probs": "teacher_probabilities target_probs",
    "advantages": "advantage adv",
    "old_log_probs": "old_logps old_per_token_logps old_log_prob",
    "ref_log_probs": "ref_logps ref_per_token_logps ref_log_prob",
    "clip_low": "epsilon epsilon_low eps_low cliprange",
    "clip_high": "epsilon_high eps_high",
    "dual_clip": "delta clip_ratio_c",
    "return_metrics": "return_z_loss return_token_accuracy return_lse return_entropy",
}
QUANTIZED = "a quantized weight is not taken; dequantize it, and pass it as linear_weight"
LOGITS = "logits are made of input and linear_weight here; flce_ops.cross_entropy takes logits"
PAIR = (
    "append the pair's features: torch.cat([input, low_rank_input], -1) and "
    "torch.cat([linear_weight, low_rank_weight], 1)"
)
INSTEAD = {
    "support": "call linear_log_probs with the classes of the support as target (..., K), and subtract the logsumexp "
    "of their log-probabilities",
    **dict.fromkeys(("low_rank_input", "low_rank_weight", "lora_a", "lora_b"), PAIR),
    **dict.fromkeys(("linear_weight_scale", "weight_scale", "quant_state"), QUANTIZED),
    "teacher_logits": "flce_ops.linear_kl_div takes teacher_input and teacher_weight, or "
    "teacher_probs=teacher_logits.softmax(-1)",
    "logits": LOGITS,
    "student_logits": LOGITS,
}


def refuse_name(op: str, name: str, names: tuple[str, ...]) -> NoReturn:
    lower = name.lower()
    meant = [ours for ours, theirs in ELSEWHERE.items() if ours in names and lower in theirs.split()]
    if not meant and lower not in INSTEAD:
        meant = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {meant[0]}?" if meant else INSTEAD.get(lower, f"there are {', '.join(names)}")
    raise TypeError(f"{op}: no argument is named {name}; {hint}")


def refuse_class_weight(op: str, given: dict[str, Any]) -> None:
    """Refuses a head that came as `weight`, without linear_weight."""
    weight = given.get("weight")
    if "linear_weight" not in given and isinstance(weight, Tensor) and weight.dim() > 1:
        raise TypeError(
            f"{op}: linear_weight is missing; weight holds class weights, (V,), but has shape {tuple(weight.shape)}; "
            "pass a head as linear_weight"
        )


def hint_of_type(name: str, value: Any) -> str:
    """What to pass for a tensor."""
    if isinstance(value, torch.nn.Module):
        return f"; pass {name}.weight" if isinstance(getattr(value, "weight", None), Tensor) else ""
    if isinstance(value, list | tuple):
        return f"; pass torch.tensor({name})"
    return f"; pass torch.from_numpy({name})" if type(value).__name__ == "ndarray" else ""


def hint_of_target(
    target: Tensor,
    rows: Tensor,  # (..., D) hidden states, or (..., V) logits
    of: str,  # the name of `rows`
    num_classes: int,
    *,
    probabilities: bool = False,  # whether the function takes class probabilities
) -> str:
    """The likely mistake behind a target of another shape."""
    shape, tokens = tuple(target.shape), tuple(rows.shape[:-1])
    if shape == (*tokens, num_classes):
        also = ", or target.float() for class probabilities" if probabilities else ""
        return f"; if it is one-hot, pass target.argmax(-1){also}"
    if of == "logits" and rows.dim() > 2 and shape == (rows.shape[0], *rows.shape[2:]):
        return "; the classes come last here, not second: pass logits.movedim(1, -1)"
    if target.numel() == rows.shape[:-1].numel() and shape != tokens:
        return "; pass target.flatten()" if len(tokens) == 1 else f"; pass target.view({', '.join(map(str, tokens))})"
    if shape and len(shape) == len(tokens) and shape == (*tokens[:-1], tokens[-1] - 1):
        return f"; if the labels are shifted and {of} is not, pass all labels with shift=True"
    return ""
