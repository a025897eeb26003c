"""What is not implemented, with the error texts, and the function that errors name.

flce_ops/entry/refusals.py has the combinations of arguments.
"""

import threading
from typing import Any, NoReturn

HOLES = {
    # transforms and exporters
    "forward mode": "forward-mode differentiation (jvp, jacfwd, hessian, make_dual) is not implemented; use reverse "
    "mode ({modes})",
    "empty vmap": "vmap over an empty batch is not implemented; leave the call out where it is",
    "handed over in torch.func": "torch.func transforms are not implemented; call flce_ops.cross_entropy, which has "
    "them",
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


class Running(threading.local):
    function: str = ""  # the public function that the user called, in its backward, too


running = Running()
