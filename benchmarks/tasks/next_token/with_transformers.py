"""Train a language model on the next token with Hugging Face's Trainer, ignoring padding."""

import math

from transformers import Trainer, TrainingArguments

from data import gpt2, sequences

tokens, mask = sequences()
rows = [
    {"input_ids": a, "attention_mask": b, "labels": [x if kept else -100 for x, kept in zip(a, b, strict=True)]}
    for a, b in zip(tokens.tolist(), mask.tolist(), strict=True)
]

arguments = TrainingArguments(
    "trainer",
    learning_rate=3e-3,
    weight_decay=0.01,
    max_grad_norm=0.0,
    lr_scheduler_type="constant",
    num_train_epochs=6,
    per_device_train_batch_size=16,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(gpt2(), arguments, train_dataset=rows[:256], eval_dataset=rows[256:])
trainer.train()
measured = trainer.evaluate()
print("loss", measured["eval_loss"])
print("perplexity", math.exp(measured["eval_loss"]))
