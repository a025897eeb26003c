"""Hints for a wrong argument: other libraries' names, what to pass instead of an argument that does not exist, values
of the wrong type, targets whose shape does not fit. Only errors read this file.
"""

import difflib
from typing import Any, NoReturn

import torch
from torch import Tensor

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
