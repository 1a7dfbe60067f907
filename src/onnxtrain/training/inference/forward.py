"""Evaluate and predict with a model in inference mode; its operators need no gradients."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.data.data_names import DataNames, read_names, recorded_labels
from onnxtrain.data.labels import is_order_known, learn_labels, no_labels
from onnxtrain.data.naming import TargetNames
from onnxtrain.editing.working_copy.adaptation import Adaptation
from onnxtrain.editing.working_copy.attention import separate_head_norms
from onnxtrain.editing.working_copy.inputs import mark_first_axes, mark_image_inputs, mark_token_inputs
from onnxtrain.editing.working_copy.kv_cache import remove_cache_inputs
from onnxtrain.editing.working_copy.training_modes import Modes, check_samples, set_modes
from onnxtrain.editing.working_copy.widening import narrow_outputs, widen
from onnxtrain.errors import DataError, OptionError
from onnxtrain.errors.hints import Hint, warn_of
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import HALVES
from onnxtrain.losses.heads import LossHead, Metrics
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.losses.probabilities import ScoreKind, kind_of_scores
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.runtime.options import CPU, RuntimeOptions, name_of
from onnxtrain.runtime.states import new_states
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.data_adapter import DataAdapter
from onnxtrain.training.inference.evaluation import Evaluator
from onnxtrain.training.objective import Objective, of_model
from onnxtrain.training.prepare import prepare


@checks_arguments
@refuses_invalid()
def evaluate(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    *,
    loss: LossLike,
    target: TargetNames | None = None,
    metrics: Metrics = (),
    batch_size: int = 256,
    output: str | None = None,
    lora: Adaptation | None = None,
    runtime: RuntimeOptions | None = None,
) -> dict[str, Any]:
    """Measure loss and metrics of a model on data, like :meth:`onnxtrain.Trainer.evaluate` but without a trainer.

    Args:
        model: A path or a loaded model.
        data: Data in any form that :func:`onnxtrain.data.open_dataset` takes.
        loss: See :class:`onnxtrain.Trainer`.
        target: Name of the target in a file with several arrays left.
        metrics: Names (``"accuracy,f1"``, or a list) or functions of (y_true, y_pred), which receive all data at once;
            a mapping by output if several outputs have losses.
        batch_size: Examples per batch.
        output: Name of the output that the loss reads.
        lora: An adapter of the model to use: ``Lora(adapter="tuned.onnx_adapter")``.
        runtime: Threads and providers.

    Returns:
        ``loss`` and every metric over all examples; ``confusion_matrix`` is an array.

    Raises:
        ModelError: The model cannot be read.
        DataError: The data does not fit the model.
        OptionError: An unknown loss, metric or output; ``lora`` names no adapter.
    """
    adapter = _adapter_of(lora)
    config = TrainingConfig.of(model, loss, output=output, lora=lora, runtime=runtime)
    objective = prepare(config, modes=Modes(), table=())
    reader = _KnownLabels(read_names(config.model, adapter), objective, config.model)
    dataset, objective = reader.open_with_targets(objective, data, target=target)
    evaluator = Evaluator(objective, new_states({}, config.runtime), config.runtime)
    found = evaluator.evaluate(dataset, batch_size, metrics)
    warn_of(Hint(text, surprising=True) for text in evaluator.doubts)
    return found


class _KnownLabels(DataAdapter):
    """Convert data for a model without training: text labels need an order of classes that is known."""

    def __init__(self, recorded: DataNames, objective: Objective, file: ModelFile) -> None:
        super().__init__(objective.own_names(recorded), folder=file.folder, recorded=recorded_labels(file))
        self._of_other = recorded.output if recorded.labels is not None else None
        self._output = objective.only_output

    def _learned_labels(self, found: np.ndarray, head: LossHead, orders: Sequence[Sequence[str]]) -> tuple[str, ...]:
        if self._of_other is not None and self._output is not None:
            raise DataError(
                f"the labels beside the model are the classes of its output {self._of_other!r}, but the loss reads "
                f"{self._output!r}; give output={self._of_other!r}."
            )
        learned = learn_labels(found, None, orders)
        if len(learned) != head.classes or not is_order_known(learned, orders):
            raise DataError(no_labels(learned, head.classes))
        return learned


@checks_arguments
@refuses_invalid()
def predict(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    *,
    target: TargetNames | None = None,
    batch_size: int = 256,
    lora: Adaptation | None = None,
    runtime: RuntimeOptions | None = None,
    dropout: bool = False,
    samples: int | None = None,
) -> np.ndarray:
    """Compute the outputs of a model, like :meth:`onnxtrain.Trainer.predict` but without trainer and loss.

    Args:
        model: A path or a loaded model.
        data: Inputs in any form that :func:`onnxtrain.data.open_dataset` takes; targets are not needed.
        target: A table column to ignore.
        batch_size: Examples per batch.
        lora: An adapter of the model to use: ``Lora(adapter="tuned.onnx_adapter")``.
        runtime: Threads and providers.
        dropout: Let Dropout nodes drop, as in training, always by the same masks (Monte Carlo dropout).
        samples: With ``dropout``: how often to predict each example, along a new first axis [samples, N, ...].

    Returns:
        The array of the output; where the model has several, a dictionary by name, for which type checkers want
        :func:`onnxtrain.predict_all`.

    Raises:
        ModelError: The model cannot be read.
        DataError: The data does not fit the model.
        OptionError: ``lora`` names no adapter; ``dropout`` is given, and no Dropout node drops.

    Example:
        >>> import onnxtrain
        >>> onnxtrain.predict(onnxtrain.examples.mlp((4, 3)), np.zeros((2, 4))).shape
        (2, 3)
    """
    arrays = predict_all(
        model, data, target=target, batch_size=batch_size, lora=lora, runtime=runtime, dropout=dropout, samples=samples
    )
    found: Any = next(iter(arrays.values())) if len(arrays) == 1 else arrays
    return found  # type: ignore[no-any-return]


@checks_arguments
@refuses_invalid()
def predict_all(
    model: str | os.PathLike[str] | onnx.ModelProto,
    data: Any,
    *,
    target: TargetNames | None = None,
    batch_size: int = 256,
    lora: Adaptation | None = None,
    runtime: RuntimeOptions | None = None,
    dropout: bool = False,
    samples: int | None = None,
) -> dict[str, np.ndarray]:
    """Compute the outputs of a model by name, also of a model with one output; see :func:`predict`."""
    adapter = _adapter_of(lora)
    file = ModelFile.load(model)
    working = file.training_model()
    remove_cache_inputs(working)
    mark_token_inputs(working)
    mark_image_inputs(working)
    runtime = runtime or RuntimeOptions()
    if lora is not None or _needs_widening(working, runtime):
        declared = {str(value.name): value.dtype for value in working.graph.outputs if value.dtype in HALVES}
        widen(working)
        narrow_outputs(working, declared)
    infer_shapes(working)
    mark_first_axes(working.graph)
    separate_head_norms(working)
    modes = Modes(dropout=dropout)
    set_modes(working, modes)
    check_samples(working, modes, samples)
    if lora is not None:
        _attach(lora, working, file)
    objective = dataclasses.replace(of_model(working), modes=modes)
    dataset = DataAdapter(read_names(file, adapter), folder=file.folder).open(objective, data, target=target)
    return Evaluator(objective, new_states({}, runtime), runtime).predict(dataset, batch_size, samples=samples)


def _adapter_of(lora: Adaptation | None) -> str | os.PathLike[str] | None:
    if lora is not None and lora.adapter is None:
        raise OptionError("lora names no adapter, so that it would change nothing; give Lora(adapter=PATH).").about(
            "lora"
        )
    return None if lora is None else lora.adapter


def _attach(lora: Adaptation, model: ir.Model, file: ModelFile) -> None:
    """Add an adapter to a working copy that computes in float32, in place, and the tensors trained beside it."""
    for name, array in lora.attach(model, file, output=None, seed=0, training=False).initial.items():
        value = model.graph.initializers.get(name)
        if value is not None and value.dtype is not None:
            value.const_value = ir.tensor(array.astype(value.dtype.numpy(), copy=False), name=name)


def _needs_widening(model: ir.Model, runtime: RuntimeOptions) -> bool:
    """Return whether a model has weights in bfloat16, in which ONNX Runtime computes on GPUs only."""
    weights = model.graph.initializers.values()
    on_cpu = name_of(runtime.provider_list()[0]) == CPU
    return on_cpu and any(value.dtype == ir.DataType.BFLOAT16 for value in weights)


def kind_of_output(file: ModelFile, name: str) -> ScoreKind | None:
    """Return whether an output of a model holds logits or probabilities; ``None`` where its nodes do not tell."""
    model = infer_shapes(file.training_model())
    (value,) = (value for value in model.graph.outputs if value.name == name)
    return kind_of_scores(value, model.functions).kind
