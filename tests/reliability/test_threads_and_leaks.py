"""Parallel trainers give the same results as single ones; successive trainers take no more memory than one."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

import onnxtrain

POINTS = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
LABELS = POINTS[:, :3].argmax(1)


def train(seed: int) -> bytes:
    model = onnxtrain.examples.mlp((4, 16, 3), seed=seed)
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", seed=seed, clip_norm=1.0)
    trainer.fit((POINTS, LABELS), epochs=3, batch_size=8)
    weights = b"".join(array.tobytes() for array in dict(trainer.weights).values())
    with_gradient = onnxtrain.gradient(model)
    return weights + trainer.predict(POINTS).tobytes() + with_gradient.SerializeToString(deterministic=True)


def test_trainers_in_threads_give_the_same_bits():
    alone = [train(seed) for seed in range(4)]
    found: dict[int, bytes | BaseException] = {}

    def work(number: int) -> None:
        try:
            found[number] = train(number % 4)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(8)] == alone * 2


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def grown(trainers: int) -> float:
    """Return the bytes that each trainer of a series leaks; the first half, which fills caches, is not counted."""
    model = onnxtrain.examples.mlp((64, 512, 64))  # 260 kB of weights, as much again for each state
    points, targets = np.zeros((8, 64), np.float32), np.zeros((8, 64), np.float32)
    half = 0
    for number in range(trainers):
        if number == trainers // 2:
            gc.collect()
            half = resident()
        trainer = onnxtrain.Trainer(model, loss="mean_squared_error", threads=1)
        trainer.fit((points, targets), epochs=1)
        trainer.evaluate((points, targets))
        del trainer
    gc.collect()
    return (resident() - half) / (trainers - trainers // 2)


def test_trainers_free_their_memory():
    assert grown(50) < 100_000


@pytest.mark.slow
def test_many_trainers_free_their_memory():
    assert grown(400) < 20_000


def test_nothing_stays_open():
    folder = Path("/proc/self/fd")
    train(0)
    gc.collect()
    before = len([*folder.iterdir()])
    for _ in range(5):
        train(0)
    gc.collect()
    assert len([*folder.iterdir()]) <= before
