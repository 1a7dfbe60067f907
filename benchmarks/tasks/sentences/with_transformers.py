"""Fine-tune BERT for sentences with Hugging Face's Trainer."""

import numpy as np
from transformers import Trainer, TrainingArguments

from data import bert, sentences

tokens, mask, labels = sentences()
rows = [{"input_ids": a, "attention_mask": b, "labels": c} for a, b, c in zip(tokens, mask, labels, strict=True)]

arguments = TrainingArguments(
    "trainer",
    learning_rate=1e-3,
    weight_decay=0.01,
    adam_epsilon=1e-8,
    max_grad_norm=1.0,
    lr_scheduler_type="linear",
    warmup_steps=0.1,
    num_train_epochs=4,
    per_device_train_batch_size=16,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
)


def accuracy(predictions):
    """Accuracy of predictions."""
    return {"accuracy": float(np.mean(predictions.predictions.argmax(-1) == predictions.label_ids))}


trainer = Trainer(bert(), arguments, train_dataset=rows[:400], eval_dataset=rows[400:], compute_metrics=accuracy)
trainer.train()
measured = trainer.evaluate()
print("loss", measured["eval_loss"])
print("accuracy", measured["eval_accuracy"])
