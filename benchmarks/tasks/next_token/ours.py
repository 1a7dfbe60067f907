"""Train a language model on the next token, ignoring padding."""

import numpy as np

import onnxtrain
from data import gpt2_file, sequences

tokens, mask = sequences()
targets = np.where(mask == 1, tokens, -100)
targets = np.concatenate([targets[:, 1:], np.full((len(tokens), 1), -100)], axis=1)

trainer = onnxtrain.Trainer(gpt2_file(), loss="cross_entropy", optimizer="adamw(lr=3e-3)", tie=True, untie=True)
inputs = {"input_ids": tokens, "attention_mask": mask}
train, test = ({name: array[part] for name, array in inputs.items()} for part in (slice(256), slice(256, None)))
trainer.fit(train, targets[:256], epochs=6, batch_size=16, progress=False)
measured = trainer.evaluate(test, targets[256:], metrics="perplexity")
print("loss", measured["loss"])
print("perplexity", measured["perplexity"])
