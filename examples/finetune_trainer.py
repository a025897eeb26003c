"""Fine-tunes a Transformers model with Trainer, with its loss computed without logits: one more line.

    pip install -e ".[transformers]"
    python -m examples.finetune_trainer [--steps 20] [--lora]      (--lora: pip install peft)

A Llama with random weights replaces the checkpoint, and Python's own language reference the data.
"""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from examples.text import byte_pair_encode, python_reference
from flce_ops.integrations.transformers import patch

# T tokens of one sequence

CONTEXT = 48


def small_llama(vocab_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def with_adapters(model: PreTrainedModel) -> torch.nn.Module:
    """LoRA on the blocks. The head is frozen, so the operator skips the matrix product for its gradient."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))


def rows_of(ids: list[int], count: int) -> list[dict[str, list[int]]]:
    """Every row has a prompt of another length, whose tokens get no loss."""
    rows = []
    for start in range(0, count * CONTEXT, CONTEXT):
        tokens = ids[start : start + CONTEXT]
        prompt = 4 + start % 17
        rows.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return rows


def fine_tune(model: torch.nn.Module, rows: list[dict], steps: int, out: str) -> list[float]:
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,  # Trainer passes num_items_in_batch, and the operator divides by it
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    print(f"loss of 8 rows, evaluated without logits: {trainer.evaluate()['eval_loss']:.4f}")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(steps: int = 20, *, lora: bool = False, patched: bool = True) -> list[float]:
    torch.manual_seed(0)
    ids, pieces = byte_pair_encode(python_reference()[:60_000], 512)
    model = small_llama(len(pieces))
    if lora:
        model = with_adapters(model)
    if patched:
        patch(model)
    with tempfile.TemporaryDirectory() as out:
        return fine_tune(model, rows_of(ids, 64), steps, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", action="store_true", help="train adapters on the blocks only")
    options = parser.parse_args()
    main(options.steps, lora=options.lora)
