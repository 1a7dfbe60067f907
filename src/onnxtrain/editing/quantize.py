"""Quantize a float model in the form that quantization-aware training reads."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxtrain.autodiff.missing import FOR_ONE_CPU
from onnxtrain.data import open_dataset
from onnxtrain.data.data_names import read_names
from onnxtrain.data.model_inputs import FixedBatch, tensor_spec
from onnxtrain.editing.working_copy.inputs import mark_first_axes, mark_image_inputs
from onnxtrain.errors import DataError, ModelError, OptionError
from onnxtrain.errors.formatting import listed
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.domains import NCHWC_DOMAIN
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.proto import drop_initializer_inputs, drop_own_import, unify_default_domain
from onnxtrain.model_file.upgrade import upgrade_opset

_LEAST_OPSET = {8: 13, 4: 21}
"""Least opset by bits: 13 has scales per channel, 21 has int4."""

_logger = logging.getLogger(__name__)

_MASK_STEP, _HUGE_STEP = 1e4 / 255, 1e9 / 255
"""Steps between quantized values from which a mask is among them: before a softmax, and anywhere."""

_BEFORE_SOFTMAX = ("Add", "Where", "Mul", "Div", "Reshape", "Cast", "Unsqueeze", "Expand")
"""Operators between a mask and its softmax."""

_ONE_FILE = 1 << 30
"""Largest model, in bytes, that is passed to the quantizer as one file: intermediate models grow, up to 2 GiB."""


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
    """Quantize a copy of a model that runs in stock ONNX Runtime and trains with ``Trainer(qat=True)``.

    ONNX Runtime's static quantizer does the work, with trainable settings: QuantizeLinear and DequantizeLinear around
    operators, symmetric integer weights, 8-bit activations with a zero point, int32 biases. Before that, batch
    normalization is folded into the convolution in front of it, and constants are folded.

    Args:
        model: A path or a loaded model.
        calibration: A few hundred examples, in any form that :func:`onnxtrain.Trainer.fit` takes; the range of each
            activation is its range on these examples.
        bits: Bits of the weights: 8 or 4. Models with 4 are upgraded to opset 21.
        per_channel: Use one scale per output channel of a weight instead of one per weight.
        exclude: Names of nodes to leave in float.
        batch_size: Number of calibration examples to run at a time.

    Returns:
        The quantized model.

    Raises:
        ModelError: The model cannot be read, or the quantizer refuses it.
        DataError: The calibration data does not fit the model, or is empty.
        OptionError: ``bits`` is neither 8 nor 4, or ``exclude`` names an unknown node.

    Example:
        >>> import onnxtrain
        >>> x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        >>> quantized = onnxtrain.quantize(onnxtrain.examples.mlp((4, 8, 3)), x)
        >>> trainer = onnxtrain.Trainer(quantized, loss="softmax_cross_entropy", qat=True)
    """
    if bits not in _LEAST_OPSET:
        raise OptionError(f"bits is {bits!r}; it is 8 or 4.")
    file = ModelFile.load(model).dense()
    if any(node.domain == NCHWC_DOMAIN for node in file.proto.graph.node):
        raise ModelError(FOR_ONE_CPU)
    known = {node.name for node in file.proto.graph.node}
    unknown = [name for name in exclude if name not in known]
    if unknown:
        raise OptionError(f"exclude names {unknown[0]!r}, but the model has no node of that name.")
    batches = _Batches(file, calibration, batch_size)
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder, "given.onnx"), Path(folder, "quantized.onnx")
        proto = file.inlined()
        drop_initializer_inputs(proto, overridable=True)
        unify_default_domain(proto)
        proto = upgrade_opset(proto, _LEAST_OPSET[bits])
        large = proto.ByteSize() > _ONE_FILE
        onnx.save(proto, given, save_as_external_data=large)
        try:
            _run_quantizer(given, result, batches, bits, per_channel, list(exclude), large)
        except DataError:
            raise
        except Exception as error:  # the quantizer raises many types
            raise ModelError(f"ONNX Runtime's quantizer refused the model: {error}") from error
        quantized = onnx.load(result)
        drop_own_import(quantized)
        return quantized


def _run_quantizer(
    given: Path, result: Path, batches: _Batches, bits: int, per_channel: bool, exclude: list[str], large: bool
) -> None:
    import onnxruntime
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    def quantized() -> onnx.ModelProto:
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
        return onnx.load(result, load_external_data=False)

    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # the quantizer recommends preprocessing, which it gets, on the root logger
    onnxruntime.set_default_logger_severity(4)  # its sessions log in colours
    try:
        prepared = given.with_name("prepared.onnx")
        quant_pre_process(str(given), str(prepared), skip_symbolic_shape=True, save_as_external_data=large)
        with np.errstate(all="ignore"):  # infinite ranges are found below
            masked = _masked_nodes(onnx.load(prepared, load_external_data=False), _scales(quantized()))
            if masked:
                exclude += masked
                batches.rewind()
                quantized()
    finally:
        logger.setLevel(level)
        onnxruntime.set_default_logger_severity(2)
    if masked:
        text = "%d nodes stay in float: masks of infinite or huge numbers leave their other values no steps (%s)."
        _logger.warning(text, len(masked), listed(masked, counted=False))


def _scales(model: onnx.ModelProto) -> dict[str, float]:
    """Return the scale of each quantized activation."""
    known = {tensor.name: tensor for tensor in model.graph.initializer}
    pairs = [node.input[:2] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    return {name: float(numpy_helper.to_array(known[scale]).max()) for name, scale in pairs if scale in known and scale}


def _masked_nodes(model: onnx.ModelProto, scales: Mapping[str, float]) -> list[str]:
    """Return the nodes that compute or read values of which some are masked, as before a softmax."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def meets_softmax(name: str, steps: int = 4) -> bool:
        found = readers.get(name, ())
        if any(node.op_type == "Softmax" for node in found):
            return True
        further = [node.output[0] for node in found if steps and node.op_type in _BEFORE_SOFTMAX]
        return any(meets_softmax(output, steps - 1) for output in further)

    def is_masked(name: str) -> bool:
        step = scales[name]
        return not np.isfinite(step) or step >= _HUGE_STEP or (step >= _MASK_STEP and meets_softmax(name))

    names = {name for name in scales if is_masked(name)}
    return [node.name for node in model.graph.node if node.name and names.intersection((*node.input, *node.output))]


class _Batches:
    """Calibration data reader for ONNX Runtime's quantizer."""

    def __init__(self, file: ModelFile, data: Any, batch_size: int) -> None:
        model = file.training_model()
        mark_image_inputs(model)
        mark_first_axes(infer_shapes(model).graph)
        graph = model.graph
        fixed = FixedBatch.of(graph)
        inputs = read_names(file).specs([tensor_spec(value) for value in graph.inputs])
        dataset = open_dataset(data, inputs, need_target=False)
        if dataset.size == 0:
            raise DataError("calibration has no examples; give a few hundred.")
        batches = dataset.batches(batch_size if fixed is None else fixed.size)
        self._read: list[dict[str, np.ndarray]] = []
        if fixed is not None and (dataset.size is None or dataset.size >= fixed.size):
            self._batches: Iterator[dict[str, np.ndarray]] = (
                dict(batch.inputs) for batch in batches if fixed.rows(batch.inputs) == fixed.size
            )
        elif fixed is not None:
            raise DataError(f"calibration has {dataset.size} examples, but the model takes batches of {fixed.size}.")
        else:
            self._batches = (dict(batch.inputs) for batch in batches)

    def rewind(self) -> None:
        """Begin again with the first batch."""
        self._batches = iter(self._read)
        self._read = []

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next batch, or ``None`` at the end."""
        batch = next(self._batches, None)
        if batch is not None:
            self._read.append(batch)
        return batch

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = self.get_next()
        if batch is None:
            raise StopIteration
        return batch
