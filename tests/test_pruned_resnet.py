"""The methods of the recipe pruned_resnet are compared at equal effort and at equal sparsity."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))

from recipes import run as runner  # noqa: E402
from zoo.mnist_files import write_digits  # noqa: E402

pytestmark = pytest.mark.thorough


class _Count(onnxtrain.callbacks.Callback):
    """Counts the updates of all trainings."""

    steps = 0

    def on_step_end(self, state):
        _Count.steps += 1


@pytest.fixture(scope="module")
def recipe():
    path = ROOT / "recipes" / "pruned_resnet" / "train.py"
    spec = importlib.util.spec_from_file_location("recipe_pruned_resnet", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def task(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fashion")
    write_digits(folder, 1600, 100)
    task = recipe.Comparison(runner.Options(quick=True, folders={"fashion": folder}), 0)
    task.epochs, task.train = (2, 2, 1), tuple(array[:256] for array in task.train)
    return task


@pytest.fixture(scope="module")
def dense(recipe, task, tmp_path_factory):
    path = tmp_path_factory.mktemp("dense") / "dense.onnx"
    task.dense().save(path)
    return onnx.load(path)


def test_every_method_makes_as_many_updates_and_as_many_zeros(recipe, task, dense, monkeypatch):
    fit = onnxtrain.Trainer.fit

    def counted(self, *data, callbacks=(), **options):
        return fit(self, *data, callbacks=[_Count(), *callbacks], **options)

    monkeypatch.setattr(onnxtrain.Trainer, "fit", counted)
    first, cuts, tuning = task.epochs
    steps = -(-len(task.train[1]) // recipe.BATCH)
    for method in recipe.METHODS:
        _Count.steps = 0
        weights = task.pruned(dense, method, 0.5).get_weights()
        of_dense = 0 if method == "SNIP" else first  # SNIP trains no dense network
        assert of_dense + _Count.steps / steps == first + cuts + tuning, method
        values = np.concatenate([array.ravel() for array in weights.values() if array.ndim > 1])
        assert np.count_nonzero(values) == values.size - round(0.5 * values.size), method


def test_snip_keeps_the_weights_with_the_largest_products_with_their_gradients(recipe, task):
    masks, name = task.snip_masks(0.5), "head.weight"
    trainer = task.trainer(recipe.resnet(task.widths, task.seed), onnxtrain.SGD(0.0))
    batch, weight = [array[:256] for array in task.train], np.array(trainer.parameters[name])
    chosen = range(0, weight.size, 10)
    kept, scores = masks[name].ravel()[chosen], np.empty(len(chosen))
    for place, index in enumerate(chosen):  # a small change of a weight changes the loss by its gradient
        losses = []
        for change in (0.05, -0.05):
            changed = weight.copy()
            changed.flat[index] += change
            trainer.parameters[name] = changed
            losses.append(trainer.train_step(*batch))
        scores[place] = abs(weight.flat[index] * (losses[0] - losses[1]))
    assert kept.any()
    assert not kept.all()
    assert scores[kept].min() > scores[~kept].max()
