"""Search a learning rate with Optuna, which prunes bad trials: `python examples/sweeps/optuna_sweep.py`.

It needs `pip install optuna scikit-learn`.
"""

from __future__ import annotations

import argparse

import numpy as np
import optuna
from sklearn.datasets import load_digits

import onnxtrain
from onnxtrain.training.callbacks import Callback
from onnxtrain.training.examples import digits_cnn


class ReportToOptuna(Callback):
    """Report the validation loss of every epoch to a trial, and end it if the pruner says so."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_epoch_end(self, state) -> None:
        """Report the loss, and end a pruned trial."""
        self.trial.report(state.metrics["val_loss"], state.step)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def objective(trial: optuna.Trial) -> float:
    """Return the validation loss after eight epochs."""
    rate = trial.suggest_float("learning_rate", 1e-5, 1.0, log=True)
    seed = trial.suggest_categorical("seed", [0, 1, 2])
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    model = digits_cnn(seed=seed)
    trainer = onnxtrain.Trainer(
        model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(rate), seed=seed, threads=1
    )
    try:
        history = trainer.fit(images, labels, validation=0.2, epochs=8, callbacks=[ReportToOptuna(trial)])
    except onnxtrain.errors.NumericalError as error:  # such a rate is too high
        raise optuna.TrialPruned from error
    return float(history.rows[-1]["val_loss"])


def main() -> optuna.Study:
    """Try some learning rates, and print the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    arguments = parser.parse_args()
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
    study.optimize(objective, n_trials=arguments.trials)
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"best: {study.best_params} with the validation loss {study.best_value:.4f}; {pruned} trials ended early")
    return study


if __name__ == "__main__":
    main()
