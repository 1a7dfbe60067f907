"""Knowledge distillation on Fashion-MNIST: a small convolutional network learns from a large one and the labels.

The teacher is LeNet-5 in Caffe's form (431,080 parameters), the student has 3,130 parameters. It is trained twice: on
labels alone, and with the loss `distillation`. Source: Hinton, Vinyals, Dean, "Distilling the knowledge in a neural
network", 2015, whose experiment has perceptrons on MNIST.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.losses import Distillation

TEACHER_EPOCHS, STUDENT_EPOCHS = 8, 15


def student(seed: int) -> onnx.ModelProto:
    """`image` [N, 1, 28, 28] to ten logits: convolutions of 8 and 16 filters 3x3 with max pooling, one linear layer."""
    rng = np.random.default_rng(seed)
    nodes, initializers, value, channels = [], [], "image", 1

    def weights(name: str, outputs: int, *inputs: int) -> list[str]:
        weight = rng.normal(0, (2 / np.prod(inputs)) ** 0.5, (outputs, *inputs)).astype(np.float32)
        initializers.append(numpy_helper.from_array(weight, f"{name}.weight"))
        initializers.append(numpy_helper.from_array(np.zeros(outputs, np.float32), f"{name}.bias"))
        return [f"{name}.weight", f"{name}.bias"]

    for name, filters, pool in (("conv1", 8, 2), ("conv2", 16, 4)):
        nodes.append(helper.make_node("Conv", [value, *weights(name, filters, channels, 3, 3)], [name]))
        nodes.append(helper.make_node("Relu", [name], [f"{name}.relu"]))
        shape = {"kernel_shape": [pool, pool], "strides": [pool, pool]}
        nodes.append(helper.make_node("MaxPool", [f"{name}.relu"], [f"{name}.pool"], **shape))
        value, channels = f"{name}.pool", filters
    nodes.append(helper.make_node("Flatten", [value], ["flat"]))
    nodes.append(helper.make_node("Gemm", ["flat", *weights("head", 10, 16 * 2 * 2)], ["logits"], transB=1))
    graph = helper.make_graph(
        nodes,
        "student",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 28, 28])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def train(options, seed: int) -> dict[str, float]:
    """Train teacher and students; return the test errors in percent, and how much of their gap is closed."""
    count, factor, batch = (2000, 2, 32) if options.quick else (None, 1, 128)
    data, test = options.images("fashion", "train", count), options.images("fashion", "t10k", count)

    def fitted(model: onnx.ModelProto, loss: object, epochs: int) -> onnxtrain.Trainer:
        trainer = onnxtrain.Trainer(model, loss=loss, optimizer=onnxtrain.Adam(2e-3), seed=seed, threads=1)
        trainer.fit(*data, epochs=max(1, epochs // factor), batch_size=batch, schedule="cosine", progress=False)
        return trainer

    def error(trainer: onnxtrain.Trainer) -> float:
        return 100 * (1 - trainer.evaluate(*test, metrics="accuracy")["accuracy"])

    teacher = fitted(onnxtrain.examples.lenet5_caffe(seed=seed), "softmax_cross_entropy", TEACHER_EPOCHS)
    alone = error(fitted(student(seed), "softmax_cross_entropy", STUDENT_EPOCHS))
    with tempfile.TemporaryDirectory() as folder:
        teacher.save(Path(folder) / "teacher.onnx")
        loss = Distillation(Path(folder) / "teacher.onnx", temperature=4.0, mix=0.9)
        distilled = error(fitted(student(seed), loss, STUDENT_EPOCHS))
    best = error(teacher)
    return {
        "teacher, error, %": best,
        "student alone, error, %": alone,
        "student distilled, error, %": distilled,
        "gap closed, %": 100 * (alone - distilled) / (alone - best),
    }
