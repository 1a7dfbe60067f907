"""Two ResNets and a VGG lose channels by default settings, and keep their accuracy."""

import warnings

import numpy as np
import pytest
from sklearn.datasets import load_digits

import onnxtrain

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = [pytest.mark.torch, pytest.mark.thorough]


def digits():
    found = load_digits()
    order = np.random.default_rng(0).permutation(1500)
    x, y = (found.images / 16).astype(np.float32)[order, None], found.target.astype(np.int64)[order]
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


TRAIN, TEST = digits()


def conv(inputs, outputs, norm, stride=1):
    layer = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=not norm)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs)) if norm else layer


class Block(nn.Module):
    def __init__(self, inputs, outputs, norm, stride=1):
        super().__init__()
        self.one, self.two = conv(inputs, outputs, norm, stride), conv(outputs, outputs, norm)
        self.way = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return torch.relu(self.two(torch.relu(self.one(x))) + self.way(x))


def resnet(width, norm):
    blocks = Block(width, width, norm), Block(width, 2 * width, norm, 2), Block(2 * width, 2 * width, norm)
    return nn.Sequential(
        conv(1, width, norm), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)
    )


def vgg(width):
    first = conv(1, width, False), nn.ReLU(), conv(width, width, False), nn.ReLU(), nn.MaxPool2d(2)
    second = conv(width, 2 * width, False), nn.ReLU(), conv(2 * width, 2 * width, False), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 10))


NETWORKS = {"plain ResNet": lambda: resnet(32, False), "ResNet": lambda: resnet(24, True), "VGG": lambda: vgg(24)}


@pytest.fixture(scope="module", params=NETWORKS)
def network(request, tmp_path_factory):
    torch.manual_seed(0)
    model = NETWORKS[request.param]()
    x, y = map(torch.tensor, TRAIN)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    for _ in range(12):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
    path = tmp_path_factory.mktemp("network") / "model.onnx"
    batch = torch.export.Dim("batch")
    how = {"dynamo": True, "opset_version": 18, "external_data": False, "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model.eval(), (x[:2],), path, dynamic_shapes=({0: batch},), **how)
    return path


@pytest.mark.sampled("flops")
@pytest.mark.parametrize("flops", [0.4, 0.55, 0.7])
def test_channels_go_and_the_accuracy_stays(network, flops):
    how = {"loss": "softmax_cross_entropy", "validation": TEST, "structure": "channels", "flops": flops}
    alone = onnxtrain.prune(network, TRAIN, **how, epochs=0, fine_tune_epochs=0)
    result = onnxtrain.prune(network, TRAIN, **how)
    assert result.accuracy_after >= max(alone.accuracy_after, result.accuracy_before - 0.02)
    assert not result.shortfall
