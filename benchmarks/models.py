"""Models of the benchmarks: the same network as a torch module and as an ONNX file.

    name = "resnet18"
    model = MODELS[name]
    module = model.module()                       # in training mode, seeded
    path = model.onnx("build/models")             # exported once, kept there
    inputs, target = model.batch(32)              # seeded random data
    loss = model.torch_loss(module(*map(torch.from_numpy, inputs.values())), torch.from_numpy(target))

torch is imported by the methods that need it, not before: a process that measures onnxtrain alone must not
pay for it. Both sides start from the same weights: the file is an export of the module with the same seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmark_model import TEXT, VOCABULARY, BenchmarkModel, architecture
from real_models import REAL
from recurrent_models import RECURRENT
from ten_models import TEN
from zoo_models import ZOO

if TYPE_CHECKING:
    import torch

# The loss of every model, by its name in onnxtrain.
LOSS = "softmax_cross_entropy"


def _mlp() -> torch.nn.Module:
    from torch import nn

    return architecture("Mlp", (784, 512, 512, 10), nn.ReLU)()


_IMAGE = {"image": (3, 32, 32)}

MODELS: dict[str, BenchmarkModel] = {
    model.name: model
    for model in (
        BenchmarkModel("mlp", "MLP 784-512-512-10", _mlp, {"image": (784,)}),
        BenchmarkModel("lenet5", "LeNet-5, 28x28", architecture("LeNet5"), {"image": (1, 28, 28)}),
        BenchmarkModel("conv6", "six convolutions with strides, 32x32", architecture("StridedConvNet"), _IMAGE),
        BenchmarkModel("resnet18", "ResNet-18, 32x32", architecture("ResNet"), _IMAGE),
        BenchmarkModel("mobilenet_v2", "MobileNetV2, 32x32", architecture("MobileNetV2"), _IMAGE),
        BenchmarkModel(
            "bert_mini",
            "BERT-mini, 4 layers, 256 wide, sequences of 128",
            architecture("bert", vocabulary=VOCABULARY),
            TEXT,
            vocabulary=VOCABULARY,
        ),
        BenchmarkModel(
            "unet",
            "U-Net, two levels, 32 wide, 64x64",
            architecture("UNet", "transpose", channels=3, width=32, classes=10),
            {"image": (3, 64, 64)},
            labels=(64, 64),
        ),
        BenchmarkModel(
            "distilbert",
            "DistilBERT, 3 layers, 128 wide, sequences of 64",
            architecture("distilbert", vocabulary=5000, width=128, layers=3, length=64, classes=10),
            {"input_ids": (64,), "attention_mask": (64,)},
            vocabulary=5000,
        ),
        BenchmarkModel(
            "gpt2",
            "GPT-2, 3 layers, 128 wide, sequences of 64",
            architecture("gpt2", vocabulary=1000, width=128, layers=3, length=64, tied=False),
            {"input_ids": (64,), "attention_mask": (64,)},
            classes=1000,
            vocabulary=1000,
            labels=(64,),
        ),
        BenchmarkModel("vit_tiny", "ViT-tiny, 12 layers, 192 wide, patch 4 on 32x32", architecture("vit"), _IMAGE),
    )
}


def find_model(name: str) -> BenchmarkModel:
    """A model of ``MODELS``, ``real_models.py``, ``recurrent_models.py``, ``zoo_models.py`` or ``ten_models.py``."""
    if name in MODELS:
        return MODELS[name]
    return (REAL | RECURRENT | ZOO | TEN)[name]
