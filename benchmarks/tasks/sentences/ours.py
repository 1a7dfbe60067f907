"""Fine-tune BERT for sentences with AdamW, no decay of biases and norms, and a warm-up."""

import torch

import onnxtrain
from data import bert, sentences

tokens, mask, labels = sentences()
example = (torch.tensor(tokens[:2]), torch.tensor(mask[:2]))
axes = {"input_ids": {0: "batch"}, "attention_mask": {0: "batch"}}
names = {"input_names": list(axes), "output_names": ["logits"], "dynamic_axes": axes}
torch.onnx.export(bert(), example, "bert.onnx", dynamo=False, **names)

groups = [onnxtrain.Group("*bias|*norm*", weight_decay=0.0)]
optimizer = onnxtrain.AdamW(1e-3, weight_decay=0.01)
trainer = onnxtrain.Trainer("bert.onnx", loss="cross_entropy", optimizer=optimizer, groups=groups, clip_norm=1.0)
train, test = slice(0, 400), slice(400, None)
x = {"input_ids": tokens, "attention_mask": mask}
part = {name: array[train] for name, array in x.items()}
trainer.fit(part, labels[train], epochs=4, batch_size=16, schedule="warmup(0.1)+linear", progress=False)
rest = {name: array[test] for name, array in x.items()}
measured = trainer.evaluate(rest, labels[test], metrics="accuracy")
print("loss", measured["loss"])
print("accuracy", measured["accuracy"])
