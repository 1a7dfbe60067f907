"""Text classification: tokenize sentences, and train a small transformer to tell praise from complaint.

The sentences are synthetic. To use a real tokenizer, replace `encode`.
"""

import itertools
from pathlib import Path

import numpy as np

import onnxtrain

LENGTH = 10
PRAISE = ["great", "kind", "delicious", "quick", "lovely", "fresh"]
COMPLAINT = ["awful", "rude", "cold", "slow", "dirty", "stale"]
THINGS = ["soup", "waiter", "dessert", "service", "table", "bread", "coffee"]
FORMS = [
    "the {thing} was {word}",
    "what a {word} {thing}",
    "we found the {thing} really {word}",
    "{word} {thing} again",
]


def sentences() -> tuple[list[str], np.ndarray]:
    """Return every combination of template, noun and adjective, with the label: 1 for praise."""
    made = [
        (form.format(thing=thing, word=word), word in PRAISE)
        for form, thing, word in itertools.product(FORMS, THINGS, PRAISE + COMPLAINT)
    ]
    texts, labels = zip(*made, strict=True)
    return list(texts), np.array(labels, np.int64)


def encode(texts: list[str], vocabulary: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the model's inputs: token ids [N, 10], 0 for padding, and a mask of the same shape."""
    ids = np.zeros((len(texts), LENGTH), np.int64)
    for row, text in zip(ids, texts, strict=True):
        found = [vocabulary[word] for word in text.split()[:LENGTH] if word in vocabulary]
        row[: len(found)] = found
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}


def main(folder: Path) -> float:
    """Train on three quarters of the sentences, and return the accuracy on the others."""
    texts, labels = sentences()
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(words, 1)}
    order = np.random.default_rng(0).permutation(len(texts))
    inputs = encode([texts[index] for index in order], vocabulary)
    labels, split = labels[order], len(texts) * 3 // 4
    train = {name: array[:split] for name, array in inputs.items()}
    test = {name: array[split:] for name, array in inputs.items()}

    model = onnxtrain.examples.small_transformer(vocabulary=len(vocabulary) + 1, classes=2)
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adamw(lr=2e-3)", clip_norm=1.0)
    trainer.fit(train, labels[:split], epochs=6, schedule="warmup(0.1)+linear", progress=False)
    trainer.save(folder / "reviews.onnx")

    for text in ("the bread was awful", "what a quick waiter"):
        scores = onnxtrain.predict(folder / "reviews.onnx", encode([text], vocabulary))[0]
        print(f"{text}: {'praise' if scores[1] > scores[0] else 'complaint'}")
    return trainer.evaluate((test, labels[split:]), metrics="accuracy")["accuracy"]


if __name__ == "__main__":
    print(f"held-out accuracy {main(Path.cwd()):.2f}")
