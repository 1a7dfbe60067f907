"""A federated client: it trains the server's model on local data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np

from onnxtrain.editing.working import Model
from onnxtrain.errors import DataError, OnnxTrainError, OptionError
from onnxtrain.graph import Builder
from onnxtrain.interop.flower.messages import answer, flower, refusal, settings_of, weights_of
from onnxtrain.losses.heads import check_numbers
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.plugins.privacy.differential_privacy import DP, fit_privately, in_micro_batches
from onnxtrain.training.config import Options
from onnxtrain.training.objective import Objective
from onnxtrain.training.trainer import Trainer

Data = Any
"""Data in any form that a trainer accepts, or a function from Flower's context to such data."""


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
    """Make a Flower ``ClientApp`` that trains an ONNX model on the data of this client.

    In every round the client loads the server's weights, trains for some epochs with a new optimizer state, and returns
    its weights and its number of examples. With the server strategy FedProx, the loss gets the proximal term with the
    weight that the server sends.

    Args:
        model: A path or a loaded model: the server's, except for its weights.
        data: Training data in any form that :meth:`onnxtrain.Trainer.fit` accepts, or a function from Flower's context
            to such data: ``context.node_config`` identifies the client.
        loss: The loss, as for :class:`onnxtrain.Trainer`.
        optimizer: The optimizer of the client, by default ``Adam()``.
        epochs: Number of epochs per round; ``train_config={"epochs": 2}`` at the server overrides it.
        batch_size: Examples per step.
        validation: Data for evaluating the server's weights in every round; without them the client answers with the
            loss on its training data.
        metrics: Metrics beside the loss.
        target: Name of the target in a file with several remaining arrays.
        dp: Differential privacy of the client's examples: clipped gradients and noise. The reply has the ``epsilon`` of
            all rounds so far.
        mods: Flower's modifiers of training, such as ``secaggplus_mod`` or ``LocalDpMod``.
        options: All other options of :class:`onnxtrain.Trainer`; ``train``, ``freeze``, ``tie``, ``untie`` and
            ``batch_norm``, which determine the trainable parameters, must be the server's.

    Returns:
        A ``flwr.clientapp.ClientApp``. It reports errors during training to the server as one sentence.

    Raises:
        OptionError: Flower is not installed, or an argument is invalid.
    """
    if epochs < 1:
        raise OptionError(f"epochs is {epochs}; it needs a number of at least 1.").about("epochs", got=epochs)
    client = _Client(model, data, loss, optimizer, epochs, batch_size, validation, metrics, target, dp, options)
    app = flower("flwr.clientapp").ClientApp()
    app.train(mods=list(mods))(client.answering(client.train))
    app.evaluate()(client.answering(client.evaluate))
    return app


@dataclass(frozen=True)
class _Client:
    """Message handlers of a client; the fields are the arguments of :func:`client_app`."""

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
        """Wrap a handler so that it reports errors to the server in one sentence."""

        def handle(message: Any, context: Any) -> Any:
            try:
                return work(message, context)
            except OnnxTrainError as error:
                return refusal(message, str(error))

        return handle

    def train(self, message: Any, context: Any) -> Any:
        """Train for a round; answer with the weights, the mean loss and the number of examples."""
        config = settings_of(message)
        trainer = self._trainer(message, round_number=int(config.get("server-round", 0)))
        source = _source(self.data, context)
        size = trainer.open_data(source, target=self.target).size
        if size is None:
            raise DataError("A client's weights are averaged by its number of examples; give data of a known size.")
        epochs = int(config.get("epochs", self.epochs))
        trainer = _near(trainer, mu) if (mu := float(config.get("proximal-mu", 0.0))) else trainer
        if self.dp is None:
            history = trainer.fit(source, target=self.target, epochs=epochs, batch_size=self.batch_size)
            measured = {"loss": float(history.rows[-1]["loss"])}
        else:
            trainer = in_micro_batches(trainer)
            measured = self._privately(trainer, self.dp, source, epochs, context)
        return answer(message, measured, size, dict(trainer.weights))

    def _privately(self, trainer: Trainer, dp: DP, source: Any, epochs: int, context: Any) -> dict[str, float]:
        """Train with noise; epsilon covers the steps of all rounds so far. The loss is not private and is not sent."""
        done = fit_privately(trainer, source, dp, target=self.target, epochs=epochs, batch_size=self.batch_size)
        records = context.state.config_records
        steps = done.steps + (int(records[_PRIVACY]["steps"]) if _PRIVACY in records else 0)
        records[_PRIVACY] = flower("flwr.app").ConfigRecord({"steps": steps})
        return {"epsilon": dp.epsilon(steps, done.sampling)}

    def evaluate(self, message: Any, context: Any) -> Any:
        """Evaluate the server's weights; answer with the metrics and the number of examples."""
        trainer = self._trainer(message, round_number=0)
        given = self.data if self.validation is None else self.validation
        evaluator, dataset = trainer.open_for_evaluation(_source(given, context), target=self.target)
        metrics = evaluator.objective.resolve_metrics(self.metrics)
        check_numbers(metrics)
        measured = evaluator.evaluate(dataset, 256, metrics)
        return answer(message, measured, dataset.size or 0)

    def _trainer(self, message: Any, round_number: int) -> Trainer:
        """Make a trainer with the server's weights; every round has its own data order and dropout."""
        options = self.options.copy()
        options["seed"] = options.get("seed", 0) + round_number
        trainer = Trainer(self.model, loss=self.loss, optimizer=self.optimizer, **options)
        trainer.set_weights(weights_of(message, dict(trainer.weights)))
        return trainer


_PRIVACY = "onnxtrain.privacy"
"""Record in the client's state that counts its private steps."""


def _source(given: Data, context: Any) -> Any:
    return given(context) if callable(given) else given


@dataclass(frozen=True)
class _ProximalObjective(Objective):
    """A loss with a proximal term that pulls the parameters towards anchors."""

    mu: float = 0.0
    anchors: Mapping[str, np.ndarray] = field(default_factory=dict)

    def build_loss(self, op: Builder) -> LossTerms:
        """Emit the loss with the proximal term."""
        terms = super().build_loss(op)
        initializers = self.model.graph.initializers
        distances = []
        for name in self.parameters:
            parameter = op.wrap(initializers[name])
            distance = op.ReduceSumSquare(parameter - op.constant(self.anchors[name], parameter.dtype), keepdims=0)
            distances.append(op.cast(distance, terms.loss.dtype).with_shape(()))
        pull = op.sum_of(distances) * (self.mu / 2)
        return terms._replace(loss=(terms.loss + pull).with_shape(()))


def _near(trainer: Trainer, mu: float) -> Trainer:
    """Return a trainer of the same model that starts from the current weights and stays near them.

    Source: Li et al., Federated Optimization in Heterogeneous Networks, https://arxiv.org/abs/1812.06127, equation 2.
    """
    if not (math.isfinite(mu) and mu >= 0):
        raise OptionError(f"The weight of the proximal term is {mu}; it needs a finite number of at least 0.")
    own = trainer.objective
    fields = {item.name: getattr(own, item.name) for item in dataclasses.fields(Objective)}
    anchors = {name: np.array(value) for name, value in trainer.parameters.items()}
    objective = _ProximalObjective(**fields, mu=mu, anchors=anchors)
    return trainer.rebuilt(objective)
