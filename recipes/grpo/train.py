"""Group relative policy optimization (GRPO) of a small transformer that learns to add, from rewards alone.

A prompt is `3+4=`, an answer two digits, `07`, and its reward the share of digits that are right. The network begins
with random weights and sees no right answer. Source: Shao et al., "DeepSeekMath", 2024.
"""

from __future__ import annotations

import numpy as np
import onnx
import tokenizers
from onnx import TensorProto

import onnxtrain
from network import Network

CHARACTERS, WIDTH, HEADS, LAYERS, LENGTH = "0123456789+=", 64, 4, 2, 8
END = len(CHARACTERS)


def words() -> tokenizers.Tokenizer:
    """Return a tokenizer of characters."""
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)} | {"</s>": END}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="</s>"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    found.decoder = tokenizers.decoders.Fuse()
    found.add_special_tokens(["</s>"])
    return found


def transformer(seed: int) -> onnx.ModelProto:
    """A decoder with learned positions: `input_ids` [N, T] to `logits` [N, T, 13]."""
    net = Network(seed)
    net.constant("one", [1], np.int64)
    net.constant("zero", [0], np.int64)
    net.constant("top", 0, np.int64)
    net.constant("step", 1, np.int64)
    net.constant("heads", [0, 0, HEADS, WIDTH // HEADS], np.int64)
    net.constant("joined", [0, 0, WIDTH], np.int64)
    net.node("Constant", output="masked", value_float=-1e9)
    net.node("Constant", output="scale", value_float=(WIDTH // HEADS) ** -0.5)
    shape = net.node("Shape", "input_ids", output="shape", start=1, end=2)
    length = net.node("Squeeze", shape, output="length")
    indices = net.node("Range", "top", length, "step", output="indices")
    later = net.node("Less", net.node("Unsqueeze", indices, "one", output="column"), indices, output="later")
    tokens = net.node("Gather", net.normal("tokens.weight", 0.5, END + 1, WIDTH), "input_ids", output="embedded")
    places = net.node("Gather", net.normal("positions.weight", 0.5, LENGTH, WIDTH), indices, output="places")
    x = net.node("Add", tokens, places, output="x")

    def linear(x: str, name: str, inputs: int, outputs: int) -> str:
        weight = net.normal(f"{name}.weight", inputs**-0.5, inputs, outputs)
        product = net.node("MatMul", x, weight, output=f"{name}.product")
        return net.node("Add", product, net.zeros(f"{name}.bias", outputs), output=name)

    def norm(x: str, name: str) -> str:
        scale = net.constant(f"{name}.weight", np.ones(WIDTH))
        return net.node("LayerNormalization", x, scale, net.zeros(f"{name}.bias", WIDTH), output=name)

    for layer in range(LAYERS):
        at = f"layers.{layer}"
        y = norm(x, f"{at}.norm1")
        parts = []
        for part, axes in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            split = net.node("Reshape", linear(y, f"{at}.{part}", WIDTH, WIDTH), "heads", output=f"{at}.{part}.split")
            parts.append(net.node("Transpose", split, output=f"{at}.{part}.heads", perm=axes))
        scores = net.node("Mul", net.node("MatMul", *parts[:2], output=f"{at}.qk"), "scale", output=f"{at}.scores")
        visible = net.node("Where", later, "masked", scores, output=f"{at}.visible")
        mixed = net.node("MatMul", net.node("Softmax", visible, output=f"{at}.softmax"), parts[2], output=f"{at}.mixed")
        back = net.node("Transpose", mixed, output=f"{at}.back", perm=[0, 2, 1, 3])
        joined = net.node("Reshape", back, "joined", output=f"{at}.joined")
        x = net.node("Add", x, linear(joined, f"{at}.out", WIDTH, WIDTH), output=f"{at}.attended")
        hidden = net.node("Relu", linear(norm(x, f"{at}.norm2"), f"{at}.up", WIDTH, 4 * WIDTH), output=f"{at}.hidden")
        x = net.node("Add", x, linear(hidden, f"{at}.down", 4 * WIDTH, WIDTH), output=f"{at}.y")
    head = net.normal("head.weight", 0.3 * WIDTH**-0.5, WIDTH, END + 1)
    net.node("MatMul", norm(x, "norm"), head, output="logits")
    return net.model({"input_ids": ("N", "T")}, {"logits": ("N", "T", END + 1)}, TensorProto.INT64)


def share_of_digits(prompts, completions, total, **columns):
    """Share of the digits that are right."""
    return [
        sum(one == other for one, other in zip(text, right, strict=False)) / 2
        for text, right in zip(completions, total, strict=True)
    ]


def train(options, seed: int) -> dict[str, float]:
    """Learn from rewards; return the first and the last ones."""
    rows = [{"prompt": f"{a}+{b}=", "total": f"{a + b:02d}"} for a in range(10) for b in range(10)]
    trainer = onnxtrain.Trainer(transformer(seed), loss="grpo", optimizer="adam(lr=5e-4)", clip_norm=1.0)
    steps = 80 if options.quick else 800
    found = onnxtrain.text.grpo(
        trainer,
        rows,
        share_of_digits,
        max_steps=steps,
        batch_size=32,
        num_generations=16,
        max_completion_length=2,
        tokenizer=words(),
        seed=seed,
    )
    first, last = (float(np.mean([row["reward"] for row in part])) for part in (found[:5], found[-5:]))
    return {"mean reward of the first 5 steps": first, "mean reward of the last 5 steps": last}
