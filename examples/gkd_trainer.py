"""GKD of trl.experimental without the logits of either model, for plain models in one process.

TRL's GKDTrainer calls both models for their logits and gives them to one function, so there is no place between hidden
states and loss to replace. GKD's temperature is that of sampling alone.
"""

import torch
from trl.experimental.gkd import GKDTrainer

import flce_ops


class FusedGKDTrainer(GKDTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs:  # with their logits
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        labels, count = inputs["labels"], num_items_in_batch
        if count is None:
            count = (labels[:, 1:] != -100).sum().clamp(min=1)
        with self.accelerator.autocast():  # which is around the forward of the models, not around that of their trunks
            with torch.no_grad():
                teacher = self.teacher_model.eval().model(**tokens).last_hidden_state
            return flce_ops.linear_kl_div(
                model.model(**tokens).last_hidden_state,
                model.lm_head.weight,
                teacher,
                self.teacher_model.lm_head.weight.detach(),
                target=labels,
                shift=True,
                kind="jsd",
                beta=self.beta,
                normalizer=count,
            )
