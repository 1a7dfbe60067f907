"""A client of a federation: trains the model that the server sends on data that stay here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from onnxtrain.config import Options
from onnxtrain.edit.working import Model
from onnxtrain.errors import DataError, OnnxTrainError, OptionError
from onnxtrain.flower.messages import answer, refusal, settings_of, weights_of
from onnxtrain.flower.records import flower
from onnxtrain.losses.heads import check_numbers
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.trainer import Trainer
from onnxtrain.training.differential_privacy import DP, fit_privately, in_micro_batches
from onnxtrain.training.fitting import fit
from onnxtrain.training.proximal import near

Data = Any
"""Data in any form that a trainer takes, or a function of Flower's context that returns them."""


def client_app(
    model: Model,
    data: Data,
    *,
    loss: LossLike,
    optimizer: Optimizer | str | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    validation: Data = None,
    metrics: str | Sequence[Any] = (),
    target: str | None = None,
    dp: DP | None = None,
    mods: Sequence[Any] = (),
    **options: Unpack[Options],
) -> Any:
    """A Flower ``ClientApp`` that trains an ONNX model on the data of this client.

    In every round the client takes the server's weights, trains for some epochs with an optimizer that starts anew, and
    sends its own weights back with the number of its examples. Where the server's strategy is FedProx, the loss has its
    proximal term, of the weight that the server sends.

    Args:
        model: A path or a loaded model: the same one as at the server, except for its weights.
        data: Training data in any form that :meth:`onnxtrain.Trainer.fit` takes, or a function that is given Flower's
            context and returns them: ``context.node_config`` says which client this is.
        loss: What to minimise, as for :class:`onnxtrain.Trainer`.
        optimizer: The update rule of the client, by default ``Adam()``.
        epochs: How often to go through the data in a round; ``train_config={"epochs": 2}`` at the server wins.
        batch_size: Examples per step.
        validation: Data on which the server's weights are measured in every round; without them the client answers
            with the loss on its training data.
        metrics: What to measure beside the loss.
        target: Name of the target in a file with several arrays left.
        dp: Differential privacy of the client's examples: clipped gradients and noise. The reply has the ``epsilon`` of
            all rounds so far.
        mods: Flower's own modifiers of training, such as ``secaggplus_mod`` or ``LocalDpMod``.
        options: All other options of :class:`onnxtrain.Trainer`; ``train``, ``freeze``, ``tie``, ``untie`` and
            ``batch_norm``, which decide what is trained, as at the server.

    Returns:
        A ``flwr.clientapp.ClientApp``. What goes wrong while it trains goes to the server as one sentence.

    Raises:
        OptionError: Flower is not installed, or an argument has a value that it cannot have.
    """
    if epochs < 1:
        raise OptionError(f"epochs is {epochs}; it needs a number of at least 1.")
    client = _Client(model, data, loss, optimizer, epochs, batch_size, validation, metrics, target, dp, options)
    app = flower("flwr.clientapp").ClientApp()
    app.train(mods=list(mods))(client.answering(client.train))
    app.evaluate()(client.answering(client.evaluate))
    return app


@dataclass(frozen=True)
class _Client:
    """What a client does with messages; the fields are the arguments of :func:`client_app`."""

    model: Model
    data: Data
    loss: LossLike
    optimizer: Optimizer | str | None
    epochs: int
    batch_size: int
    validation: Data
    metrics: str | Sequence[Any]
    target: str | None
    dp: DP | None
    options: Options

    def answering(self, work: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A handler that tells the server what went wrong, in one sentence."""

        def handle(message: Any, context: Any) -> Any:
            try:
                return work(message, context)
            except OnnxTrainError as error:
                return refusal(message, str(error))

        return handle

    def train(self, message: Any, context: Any) -> Any:
        """The weights after a round of training, the mean loss, and the number of examples."""
        config = settings_of(message)
        trainer = self._trainer(message, round_number=int(config.get("server-round", 0)))
        source = _source(self.data, context)
        size = trainer.open(source, target=self.target).size
        if size is None:
            raise DataError("A client's weights count by its number of examples; give data of a known size.")
        epochs = int(config.get("epochs", self.epochs))
        trainer = near(trainer, mu) if (mu := float(config.get("proximal-mu", 0.0))) else trainer
        if self.dp is None:
            history = fit(trainer, source, target=self.target, epochs=epochs, batch_size=self.batch_size)
            measured = {"loss": float(history.rows[-1]["loss"])}
        else:
            trainer = in_micro_batches(trainer)
            measured = self._privately(trainer, self.dp, source, epochs, context)
        return answer(message, measured, size, dict(trainer._trained))

    def _privately(self, trainer: Trainer, dp: DP, source: Any, epochs: int, context: Any) -> dict[str, float]:
        """Train with noise; the steps of all rounds so far count for epsilon. The loss is not private, and stays."""
        done = fit_privately(trainer, source, dp, target=self.target, epochs=epochs, batch_size=self.batch_size)
        records = context.state.config_records
        steps = done.steps + (int(records[_PRIVACY]["steps"]) if _PRIVACY in records else 0)
        records[_PRIVACY] = flower("flwr.app").ConfigRecord({"steps": steps})
        return {"epsilon": dp.epsilon(steps, done.sampling)}

    def evaluate(self, message: Any, context: Any) -> Any:
        """The loss of the server's weights on the validation data, and their number of examples."""
        trainer = self._trainer(message, round_number=0)
        given = self.data if self.validation is None else self.validation
        evaluator, dataset = trainer._open_for_evaluation(_source(given, context), target=self.target)
        metrics = evaluator.objective.resolve_metrics(self.metrics)
        check_numbers(metrics)
        measured = evaluator.evaluate(dataset, 256, metrics)
        return answer(message, measured, dataset.size or 0)

    def _trainer(self, message: Any, round_number: int) -> Trainer:
        """A trainer with the server's weights; every round has an order of the data and dropout of its own."""
        options = self.options.copy()
        options["seed"] = options.get("seed", 0) + round_number
        trainer = Trainer(self.model, loss=self.loss, optimizer=self.optimizer, **options)
        trainer.set_weights(weights_of(message, dict(trainer._trained)))
        return trainer


_PRIVACY = "onnxtrain.privacy"
"""The record of a client's state that says how many private steps it has taken."""


def _source(given: Data, context: Any) -> Any:
    return given(context) if callable(given) else given
