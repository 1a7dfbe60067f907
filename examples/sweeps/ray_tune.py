"""Search a learning rate with Ray Tune, which stops bad trials early: `python examples/sweeps/ray_tune.py`.

It needs `pip install 'ray[tune]' scikit-learn`.
"""

from __future__ import annotations

import argparse

import numpy as np
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits

import onnxtrain
from onnxtrain.training.callbacks import Callback
from onnxtrain.training.examples import digits_cnn


class ReportToTune(Callback):
    """Report the validation loss of every epoch to Ray Tune, which stops bad trials."""

    def on_epoch_end(self, state) -> None:
        """Report."""
        tune.report({"val_loss": state.metrics["val_loss"]})


def train(config: dict[str, float]) -> None:
    """One trial."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    trainer = onnxtrain.Trainer(
        digits_cnn(seed=int(config["seed"])),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.Adam(config["learning_rate"]),
        seed=int(config["seed"]),
        threads=1,
    )
    trainer.fit(images, labels, validation=0.2, epochs=8, callbacks=[ReportToTune()])


def main() -> tune.ResultGrid:
    """Try some learning rates, and print the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    arguments = parser.parse_args()
    tuner = tune.Tuner(
        train,
        param_space={"learning_rate": tune.loguniform(1e-5, 1e-1), "seed": tune.choice([0, 1, 2])},
        tune_config=tune.TuneConfig(
            metric="val_loss",
            mode="min",
            num_samples=arguments.trials,
            scheduler=ASHAScheduler(max_t=8, grace_period=2),
        ),
    )
    results = tuner.fit()
    best = results.get_best_result()
    pruned = sum(result.metrics["training_iteration"] < 8 for result in results)
    print(f"best: {best.config} with the validation loss {best.metrics['val_loss']:.4f}; {pruned} trials ended early")
    return results


if __name__ == "__main__":
    main()
