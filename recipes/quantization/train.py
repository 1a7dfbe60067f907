"""Quantization-aware training of LeNet-5 with weights of 8, 4 and 2 bits, on Fashion-MNIST and scikit-learn's digits.

The model is trained in single precision, rounded by `onnxtrain.quantize`, and trained again as the quantized model
(`qat=True`). `quantize` writes 8 and 4 bits; the weights of 2 bits are made here from those of 4: the same nodes with
wider steps. Accuracies are those of the saved files in plain ONNX Runtime.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

import onnxtrain

EPOCHS, TUNING = 4, 2


def with_two_bits(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its int4 weights rounded again to -2 ... 1, in steps that suit each channel best."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    tensors = {tensor.name: tensor for tensor in result.graph.initializer}
    for node in result.graph.node:
        if (
            node.op_type != "DequantizeLinear"
            or tensors.get(node.input[0], TensorProto()).data_type != TensorProto.INT4
        ):
            continue
        weight, scale, zero = (tensors[name] for name in node.input)
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        values = np.moveaxis(numpy_helper.to_array(weight).astype(np.float32), axis, -1)
        steps = np.linspace(1.0, 7.0, 25)[:, None]
        rounded = np.clip(np.round(values[..., None, :] / steps), -2, 1)
        errors = (
            ((rounded * steps - values[..., None, :]) ** 2).reshape(-1, *steps.shape[:1], values.shape[-1]).sum(axis=0)
        )
        best = steps[errors.argmin(axis=0), 0]
        integers = np.moveaxis(np.clip(np.round(values / best), -2, 1), -1, axis).astype(np.int8)
        weight.CopyFrom(helper.make_tensor(weight.name, TensorProto.INT2, integers.shape, integers.ravel()))
        zeros = np.zeros(list(zero.dims), np.int8)
        zero.CopyFrom(helper.make_tensor(zero.name, TensorProto.INT2, zeros.shape, zeros.ravel()))
        scale.CopyFrom(numpy_helper.from_array((numpy_helper.to_array(scale) * best).astype(np.float32), scale.name))
    del result.opset_import[:]
    result.opset_import.append(helper.make_opsetid("", 25))
    result.ir_version = 13
    return result


def digits(images: np.ndarray) -> np.ndarray:
    """Enlarge scikit-learn's digits [N, 8, 8] to [N, 1, 28, 28] in [0, 1], with a border of 2."""
    return np.pad(images.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))[:, None].astype(np.float32) / 16


def accuracy(model: onnx.ModelProto, images: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy in percent of the model in plain ONNX Runtime."""
    settings = onnxruntime.SessionOptions()  # without it, ONNX Runtime chooses integer kernels, which int2 lacks
    settings.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    parts = [session.run(None, {"image": images[i : i + 500]})[0].argmax(axis=1) for i in range(0, len(images), 500)]
    return 100 * float(np.mean(np.concatenate(parts) == labels))


def train(options, seed: int) -> dict[str, float]:
    """Train on both sets, and return the accuracies before, after rounding and after training."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = digits(images.reshape(-1, 8, 8)[order]), labels[order].astype(np.int64)
    found = measure(
        "digits", (images[:1300], labels[:1300]), (images[1300:], labels[1300:]), seed, 3 if options.quick else 5
    )
    if not options.quick:
        found |= measure(
            "Fashion-MNIST", options.images("fashion", "train"), options.images("fashion", "t10k"), seed, 1
        )
    return found


def measure(name: str, data: tuple[np.ndarray, ...], test: tuple[np.ndarray, ...], seed: int, times: int) -> dict:
    """Accuracies of a set; ``times`` multiplies the epochs."""
    options = {"loss": "softmax_cross_entropy", "seed": seed, "threads": 1}
    plain = onnxtrain.Trainer(onnxtrain.examples.lenet5(seed=seed), optimizer="adam(lr=2e-3)", **options)
    plain.fit(*data, epochs=times * EPOCHS, batch_size=64, schedule="cosine", progress=False)
    model = plain.model()
    found = {f"{name}, float32": accuracy(model, *test)}
    rounded = {bits: onnxtrain.quantize(model, data[0][:512], bits=bits) for bits in (8, 4)}
    rounded[2] = with_two_bits(rounded[4])
    for bits, quantized in rounded.items():
        trainer = onnxtrain.Trainer(quantized, optimizer="adam(lr=5e-4)", qat=True, **options)
        trainer.fit(*data, epochs=times * TUNING, batch_size=64, schedule="cosine", progress=False)
        with tempfile.TemporaryDirectory() as folder:
            trainer.save(Path(folder) / "tuned.onnx")
            tuned = onnx.load(Path(folder) / "tuned.onnx")
        found[f"{name}, {bits} bits, rounded"] = accuracy(quantized, *test)
        found[f"{name}, {bits} bits, trained"] = accuracy(tuned, *test)
    return found
