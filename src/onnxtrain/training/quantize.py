"""Make a quantized model of one in floating point, in the form that quantization-aware training takes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxtrain.data import open_dataset
from onnxtrain.data.data_names import read_names
from onnxtrain.errors import DataError, ModelError, OptionError
from onnxtrain.ir.domains import is_default_domain
from onnxtrain.losses.heads import tensor_spec
from onnxtrain.losses.partial_batches import FixedBatch
from onnxtrain.model_file.file import ModelFile
from onnxtrain.spelling import checks_arguments

_LEAST_OPSET = {8: 13, 4: 21}
"""From which opset QuantizeLinear has a scale for each channel, and integers of 4 bits."""

_ONE_FILE = 1 << 30
"""Bytes up to which the quantizer gets its model as one file; it grows in between, and 2 GiB are the limit."""


@checks_arguments
def quantize(
    model: str | os.PathLike[str] | onnx.ModelProto,
    calibration: Any,
    *,
    bits: int = 8,
    per_channel: bool = True,
    exclude: Sequence[str] = (),
    batch_size: int = 32,
) -> onnx.ModelProto:
    """A quantized copy of a model that runs in stock ONNX Runtime and trains with ``Trainer(qat=True)``.

    ONNX Runtime's quantizer does it, with the settings that train: QuantizeLinear and DequantizeLinear around
    operators, weights in integers that are symmetric around zero, activations in 8 bits with a zero point, biases in
    int32. Before it, batch normalization behind a convolution becomes part of its weight and bias (folding), and
    constants are computed.

    Args:
        model: A path or a loaded model.
        calibration: Some hundred examples, in any form that :func:`onnxtrain.Trainer.fit` takes: the ends of each
            activation are those that it has on them.
        bits: Of the weights: 8 or 4. Models with 4 become opset 21 where they are below it.
        per_channel: One scale for each output channel of a weight instead of one for the whole.
        exclude: Names of nodes that stay as they are.
        batch_size: Examples at a time.

    Returns:
        The quantized model.

    Raises:
        ModelError: The model cannot be read, or the quantizer refuses it.
        DataError: The calibration data do not fit the model, or there are none.
        OptionError: ``bits`` is neither 8 nor 4, or there is no node to exclude.

    Example:
        >>> import onnxtrain
        >>> x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        >>> quantized = onnxtrain.quantize(onnxtrain.examples.mlp((4, 8, 3)), x)
        >>> trainer = onnxtrain.Trainer(quantized, loss="softmax_cross_entropy", qat=True)
    """
    if bits not in _LEAST_OPSET:
        raise OptionError(f"bits is {bits!r}; it is 8 or 4.")
    file = ModelFile.load(model)
    known = {node.name for node in file.proto.graph.node}
    unknown = [name for name in exclude if name not in known]
    if unknown:
        raise OptionError(f"exclude names {unknown[0]!r}, but the model has no node of that name.")
    batches = _Batches(file, calibration, batch_size)
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder, "given.onnx"), Path(folder, "quantized.onnx")
        proto = _upgraded(file.inlined(), _LEAST_OPSET[bits])
        large = proto.ByteSize() > _ONE_FILE
        onnx.save(proto, given, save_as_external_data=large)
        try:
            _run_quantizer(given, result, batches, bits, per_channel, list(exclude), large)
        except DataError:
            raise
        except Exception as error:  # whatever it raises: it checks little of what it is given
            raise ModelError(f"ONNX Runtime's quantizer refused the model: {error}") from error
        return onnx.load(result)


def _upgraded(model: onnx.ModelProto, least: int) -> onnx.ModelProto:
    from onnx import version_converter

    opset = next(entry.version for entry in model.opset_import if is_default_domain(entry.domain))
    return model if opset >= least else version_converter.convert_version(model, least)


def _run_quantizer(
    given: Path, result: Path, batches: _Batches, bits: int, per_channel: bool, exclude: list[str], large: bool
) -> None:
    import logging

    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # it recommends, on the root's logger, what has just been done
    try:
        prepared = given.with_name("prepared.onnx")
        quant_pre_process(str(given), str(prepared), skip_symbolic_shape=True, save_as_external_data=large)
        quantize_static(
            str(prepared),
            str(result),
            batches,
            quant_format=QuantFormat.QDQ,
            per_channel=per_channel,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8 if bits == 8 else QuantType.QInt4,
            nodes_to_exclude=exclude,
            use_external_data_format=large,
            extra_options={"WeightSymmetric": True, "ActivationSymmetric": False},
        )
    finally:
        logger.setLevel(level)


class _Batches:
    """Calibration data, as ONNX Runtime's quantizer reads them."""

    def __init__(self, file: ModelFile, data: Any, batch_size: int) -> None:
        graph = file.training_model().graph
        fixed = FixedBatch.of(graph)
        inputs = read_names(file).specs([tensor_spec(value) for value in graph.inputs])
        dataset = open_dataset(data, inputs, need_target=False)
        if dataset.size == 0:
            raise DataError("calibration has no examples; give some hundred.")
        batches = dataset.batches(batch_size if fixed is None else fixed.size)
        if fixed is not None and (dataset.size is None or dataset.size >= fixed.size):
            size = fixed.size
            self._batches: Iterator[dict[str, np.ndarray]] = (
                dict(batch.inputs) for batch in batches if all(len(array) == size for array in batch.inputs.values())
            )
        elif fixed is not None:
            raise DataError(f"calibration has {dataset.size} examples, but the model takes batches of {fixed.size}.")
        else:
            self._batches = (dict(batch.inputs) for batch in batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch, or ``None`` at the end."""
        return next(self._batches, None)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = self.get_next()
        if batch is None:
            raise StopIteration
        return batch
