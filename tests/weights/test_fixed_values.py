"""Fixed matrices of signal processing are known by their values; no learned weight is taken for one."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain.parameters.fixed_values import fixed_matrix

N = np.arange


def hann(n):
    return 0.5 - 0.5 * np.cos(2 * np.pi * N(n) / n)


def gauss(n, sigma):
    bell = np.exp(-0.5 * ((N(n) - (n - 1) / 2) / sigma) ** 2)
    return bell / bell.sum()


def stft(n, window=1.0, *, interleaved=False):
    angles = 2 * np.pi * np.outer(N(n // 2 + 1), N(n)) / n
    parts = np.cos(angles) * window, -np.sin(angles) * window
    return np.stack(parts, 1).reshape(-1, n) if interleaved else np.concatenate(parts)


def dct(n, rows=None):
    basis = np.cos(np.pi / n * np.outer(N(rows or n), N(n) + 0.5)) * np.sqrt(2 / n)
    basis[0] /= np.sqrt(2)
    return basis


def mel(filters, bins, rate=16000):
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate / 1400), filters + 2) / 2595) - 1)
    f = np.linspace(0, rate / 2, bins)[:, None]
    rising, falling = (f - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - f) / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rising, falling))


def graph(n, share=0.3):
    edges = np.triu(np.random.default_rng(n).random((n, n)) < share, 1)
    return (edges + edges.T + np.eye(n)).astype(float)


def normalized(edges):
    scale = edges.sum(1) ** -0.5
    return scale[:, None] * edges * scale


def resampling(old, new, width=6):
    base = min(old, new) * 0.99
    reach = int(np.ceil(width * old / base))
    t = ((N(-reach, reach + old) / old + N(0, -new, -1)[:, None] / new) * base).clip(-width, width)
    return np.sinc(t) * np.cos(t * np.pi / width / 2) ** 2 * base / old


def gabor(size, angle):
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    along = x * np.cos(angle) + y * np.sin(angle)
    return np.exp(-(x**2 + y**2) / 8) * np.cos(1.2 * along)


def bilinear(size):
    line = 1 - np.abs(N(size) - (size - 1) / 2) / ((size + 1) // 2)
    return np.outer(line, line)


SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1.0]])
KIRSCH = np.array([[5, 5, 5], [-3, 0, -3], [-3, -3, -3.0]])
HAAR = np.array([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]) / 2
DB2 = np.array([0.48296291, 0.8365163, 0.22414387, -0.12940952])
LUMA = np.array([0.299, 0.587, 0.114])
BLUR = np.outer(gauss(5, 1), gauss(5, 1))

FIXED = {
    "Conv": {
        "Fourier basis with a window": stft(512, hann(512))[:, None],
        "Fourier basis": stft(64)[:, None],
        "interleaved Fourier basis": stft(256, hann(256), interleaved=True)[:, None],
        "padded Hamming": np.pad(stft(400, 0.08 + 0.92 * hann(400)), ((0, 0), (56, 56)))[:, None],
        "DCT of blocks": np.einsum("ai,bj->abij", dct(8), dct(8)).reshape(64, 1, 8, 8),
        "mel filters": mel(64, 513).T[:, :, None],
        "blur of channels": np.tile(BLUR, (3, 1, 1, 1)),
        "blur": np.outer(gauss(11, 1.5), gauss(11, 1.5))[None, None],
        "small blur": gauss(3, 0.8)[None, None],
        "box": np.full((3, 1, 3, 3), 1 / 9),
        "Sobel": np.stack([SOBEL, SOBEL.T])[:, None] / 8,
        "Laplace": np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0.0]])[None, None],
        "unsharp": np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0.0]])[None, None],
        "Kirsch": np.stack([np.rot90(KIRSCH, turn) for turn in range(4)])[:, None],
        "motion blur": np.tile([[0.1, 0.2, 0], [0, 0.4, 0.05], [0, 0.2, 0.05]], (3, 1, 1, 1)),
        "median": np.eye(9).reshape(9, 1, 3, 3),
        "pixel unshuffle": np.eye(4).reshape(4, 1, 2, 2),
        "edges of Canny": np.stack([np.eye(9)[4] - np.eye(9)[i] for i in (5, 8, 7, 6)]).reshape(4, 1, 3, 3),
        "gray": LUMA.reshape(1, 3, 1, 1),
        "Haar": HAAR.reshape(4, 1, 2, 2),
        "Daubechies": np.stack([DB2[::-1], DB2 * [-1, 1, -1, 1]])[:, None],
        "halved rate": resampling(2, 1)[:, None],
        "resampling": resampling(160, 147)[:, None],
        "low pass": (np.sinc((N(12) - 5.5) / 2) * np.kaiser(12, 4))[None, None],
        "Gabor": np.stack([gabor(11, angle) for angle in np.linspace(0, 3, 8)])[:, None],
        "bins of distances": N(16.0).reshape(1, 16, 1, 1),
        "pre-emphasis": np.array([[[-0.97, 1]]]),
    },
    "ConvTranspose": {
        "bilinear": np.tile(bilinear(4), (5, 1, 1, 1)),
        "bilinear of channels": np.einsum("oi,xy->oixy", np.eye(3), bilinear(4)),
    },
    "MatMul": {
        "cosines": stft(64, hann(64))[:33].T,
        "DCT": dct(40, 13).T,
        "small DCT": dct(8),
        "mel": mel(80, 201),
        "mel, transposed": mel(40, 257).T,
        "linear bank": np.maximum(0, 1 - np.abs(N(129)[:, None] / 128 * 21 - N(1, 21))),
        "adjacency": graph(10),
        "normalized adjacency": normalized(graph(20)),
        "averages": graph(12) / graph(12).sum(1, keepdims=True),
        "Laplacian": np.eye(14) - normalized(graph(14, 0.2)),
        "causal": np.tril(np.ones((8, 8))),
        "reversal": np.eye(8)[::-1],
        "Hadamard": np.kron(HAAR, HAAR),
        "YUV": np.array([LUMA, [-0.147, -0.289, 0.436], [0.615, -0.515, -0.1]]),
        "RGB of YUV": np.array([[1, 0, 1.14], [1, -0.396, -0.581], [1, 2.029, 0]]),
    },
    "Einsum": {"partitions": np.stack([np.eye(12), normalized(graph(12, 0.1)), normalized(graph(12, 0.1))])},
    "Mul": {
        "Hann": hann(400),
        "Hamming": np.hamming(400),
        "Blackman": np.blackman(256),
        "Kaiser": np.kaiser(128, 14),
        "Bartlett": np.bartlett(64),
        "Gauss": gauss(65, 9)[None, None],
        "root of Hann": np.sqrt(hann(512)),
        "luma": LUMA.reshape(1, 3, 1, 1),
    },
    "Gather": {"one-hot rows": np.eye(20)},
}


def kind(operator, array, dtype=np.float32):
    node = ir.Node("", operator, [ir.Value(name="x"), ir.Value(name="w")])
    return fixed_matrix(np.asarray(array, dtype), [(node, 0 if operator == "Gather" else 1)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("operator", "name"), [(op, name) for op, arrays in FIXED.items() for name in arrays])
def test_fixed_matrices(operator, name):
    array = FIXED[operator][name]
    assert kind(operator, array)
    assert kind(operator, array, np.float64)
    noise = 1e-2 * np.random.default_rng(0).normal(size=array.shape) * np.abs(array).max()
    assert not kind(operator, array + noise)  # as after a few steps of training


def matrices(rng, a, b):
    yield from (rng.normal(size=(a, b)), rng.uniform(-1, 1, (a, b)), rng.random((a, b)))
    yield np.linalg.qr(rng.normal(size=(max(a, b), max(a, b))))[0][:a, :b]
    yield from (np.zeros((a, b)), np.ones((a, b)), np.full((a, b), 0.02), np.eye(a, b), np.tile(np.eye(a, b), (2, 1)))
    yield from (np.eye(a, b) + 0.01 * rng.normal(size=(a, b)), np.maximum(rng.normal(size=(a, b)), 0))
    yield rng.normal(size=(a, b)) * (rng.random((a, b)) > 0.9)
    yield rng.integers(-1, 2, (a, b)) * 0.3
    yield np.outer(rng.normal(size=a), rng.normal(size=b))
    yield np.exp(-N(a) / 3)[:, None] + 1e-3 * rng.normal(size=(a, b))


def kernels(rng, shape):
    dirac, of_groups = np.zeros(shape), np.zeros(shape)
    middle = tuple(size // 2 for size in shape[2:])
    for channel in range(min(shape[:2])):
        dirac[(channel, channel, *middle)] = 1
    of_groups[(slice(None), slice(shape[1] == 1), *middle)] = 1
    yield from (rng.normal(size=shape), rng.uniform(-0.3, 0.3, shape), rng.random(shape))
    yield from (np.zeros(shape), np.ones(shape), dirac, of_groups, dirac + 0.01 * rng.normal(size=shape))
    taps = tuple(range(2, len(shape)))
    positive = np.exp(rng.normal(size=shape))
    yield positive / positive.sum(taps, keepdims=True)
    centred = rng.normal(size=shape)
    yield centred - centred.mean(taps, keepdims=True)
    yield np.clip(rng.normal(size=shape), -2, 2)
    yield np.sign(rng.normal(size=shape)) * 0.1
    yield np.cumsum(rng.normal(size=shape), -1)
    yield rng.normal(size=shape) * (rng.random(shape) > 0.8)


def test_learned_matrices_are_none():
    rng = np.random.default_rng(0)
    sizes = [(2, 2), (3, 3), (4, 4), (8, 8), (3, 8), (8, 3), (16, 16), (64, 64), (1, 3), (3, 1), (100, 10), (9, 16)]
    for (a, b), operator in itertools.product(sizes, ("MatMul", "Gemm", "Mul", "Gather")):
        for number, array in enumerate(matrices(rng, a, b)):
            identity = operator == "Gather" and number == 7
            assert identity or not kind(operator, array), (a, b, operator, number)
    for size, operator in itertools.product((3, 8, 16, 64, 512), ("Mul", "Add")):
        vectors = (
            rng.normal(size=size),
            1 + 0.1 * rng.normal(size=size),
            np.zeros(size),
            np.ones(size),
            np.eye(size)[0],
        )
        more = np.linspace(0, 1, size), np.exp(-N(size)), np.sort(rng.random(size)), np.eye(size)[size // 2]
        assert not any(kind(operator, array) for array in (*vectors, *more))


def test_learned_kernels_are_none():
    rng = np.random.default_rng(0)
    channels = [(8, 1), (1, 1), (4, 4), (3, 1), (16, 3), (64, 1), (2, 1), (3, 3)]
    taps = [(3, 3), (5, 5), (7,), (7, 7), (16,), (3,), (5,), (2, 2), (1, 3), (2,), (4, 4), (1, 1), (8, 8)]
    for outer, inner in itertools.product(channels, taps):
        for number, array in enumerate(kernels(rng, (*outer, *inner))):
            found = {operator: kind(operator, array) for operator in ("Conv", "ConvTranspose")}
            assert not any(found.values()), (outer, inner, number, found)


def front_end() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> f (float[N, 5, 64] x) => (float[N, 5, 3] y)
      { f = Mul(x, window) a = MatMul(f, stft.real) b = MatMul(f, stft.imag) p = Mul(a, a) q = Mul(b, b) r = Add(p, q)
        m = MatMul(r, bank) d = MatMul(m, dct) y = MatMul(d, head.weight) }""".replace(".", "_")
    )
    arrays = {"window": hann(64), "bank": mel(20, 33), "dct": dct(20, 13).T}
    arrays |= {"stft.real": stft(64)[:33].T, "stft.imag": stft(64)[33:].T}
    arrays["head.weight"] = np.random.default_rng(0).normal(size=(13, 3))
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    for node in model.graph.node:
        node.input[:] = [name.replace("t_", "t.").replace("d_", "d.") for name in node.input]
    return model


def test_a_front_end_is_not_trained_and_one_hint_names_it():
    model = front_end()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is no surprise
        trainer = onnxtrain.Trainer(model, loss="mse")
    assert list(trainer.parameters) == ["head.weight"]
    (hint,) = trainer.hints
    assert hint.startswith("5 tensors are not trained, by their values: window (a window); ")
    assert "bank (a filter bank)" in hint
    assert set(onnxtrain.Trainer(model, loss="mse", train=["*", "bank"]).parameters) == {"bank", "head.weight"}


def test_what_a_file_declares_comes_first():
    model = front_end()
    for name, declared in {"bank": "PARAMETER", "head.weight": "BUFFER"}.items():
        shape = next(tensor.dims for tensor in model.graph.initializer if tensor.name == name)
        info = onnx.helper.make_tensor_value_info(name, 1, shape)
        info.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=declared)
        model.graph.value_info.append(info)
    assert {row.name for row in onnxtrain.inspect(model).initializers if row.trainable} == {"bank"}


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
def test_front_ends_of_pytorch(dynamo, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Front(torch.nn.Module):
        def __init__(self):
            super().__init__()
            arrays = {"basis": stft(64, hann(64))[:, None], "mel": mel(16, 33), "edges": normalized(graph(16))}
            for name, array in arrays.items():
                self.register_buffer(name, torch.tensor(array, dtype=torch.float32))
            self.mean, self.std = (torch.nn.Parameter(torch.rand(16, 4)) for _ in range(2))
            self.head = torch.nn.Linear(4, 3)

        def forward(self, x):
            real, imaginary = torch.nn.functional.conv1d(x[:, None], self.basis, stride=32).chunk(2, 1)
            bands = (self.edges @ (self.mel.T @ (real**2 + imaginary**2))).mean(-1)
            members = torch.exp(-(((bands[:, :, None] - self.mean) / self.std) ** 2))
            return self.head(members.mean(1))

    net, path = Front().eval(), tmp_path / "front.onnx"
    torch.onnx.export(net, (torch.randn(2, 256),), str(path), dynamo=dynamo, verbose=False)
    assert onnxtrain.inspect(path).trainable_size == sum(parameter.numel() for parameter in net.parameters())
