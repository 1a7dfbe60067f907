"""Losses that compute logits of many classes in chunks of rows."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.losses import SoftmaxCrossEntropy
from onnxtrain.runtime.native import kernels_available

K, V, N, T = 6, 11, 3, 5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, T, K))
IDS = RNG.integers(0, V, (N, T))
LABELS = np.where(np.arange(T) < np.array([[5], [3], [1]]), IDS, -100)

HEADS = {
    "product": "logits = MatMul(h, head)",
    "bias": "p = MatMul(h, head)  logits = Add(bias, p)",
    "gemm": "flat = Reshape(h, rows)  p = Gemm <transB: int = 1> (flat, turned, bias)  logits = Reshape(p, back)",
    "tied": "w = Transpose <perm = [1, 0]> (turned)  logits = MatMul(h, w)",
    "capped": "p = MatMul(h, head)  q = Div(p, cap)  r = Tanh(q)  logits = Mul(r, cap)",
    "low rank": "p = MatMul(h, head)  a = MatMul(h, a0)  b = MatMul(a, b0)  c = Mul(b, cap)  logits = Add(p, c)",
    "quantized": "w = DequantizeLinear <axis: int = 1> (eight, scale)  logits = MatMul(h, w)",
    "int4": f"logits = com.microsoft.MatMulNBits <K: int = {K}, N: int = {V}, bits: int = 4, block_size: int = 16> "
    "(h, four, of_blocks)",
}


def model(head, dtype=np.float32, sizes="b, s"):
    kind = "float" if dtype == np.float32 else "double"
    made = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> f ({kind}[{sizes}, {K}] x)
        => ({kind}[{sizes}, {V}] logits) {{ h0 = MatMul(x, w0)  h = Tanh(h0)  {HEADS[head]} }}"""
    )
    rng = np.random.default_rng(1)
    shapes = {"w0": (K, K), "head": (K, V), "turned": (V, K), "bias": (V,), "a0": (K, 2), "b0": (2, V)}
    given = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    given |= {"cap": np.asarray(2.0, dtype), "rows": np.array([-1, K]), "back": np.array([-1, T, V])}
    given |= {
        "eight": rng.integers(-9, 9, (K, V)).astype(np.int8),
        "scale": rng.uniform(0.1, 0.2, V).astype(np.float32),
    }
    given |= {"four": rng.integers(0, 255, (V, 1, 8)).astype(np.uint8), "of_blocks": np.full((V, 1), 0.1, np.float32)}
    read = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in given.items() if name in read)
    return made


def trained(given, loss, x=X, labels=LABELS, sample_weight=None, steps=2, **options):
    """Return the losses of some steps and the parameters after them."""
    trainer = onnxtrain.Trainer(given, loss=loss, optimizer="sgd(lr=0.5)", **options)
    dtype = np.float64 if given.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.DOUBLE else np.float32
    weights = {} if sample_weight is None else {"sample_weight": sample_weight}
    losses = [trainer.train_step(x.astype(dtype), labels, **weights) for _ in range(steps)]
    return losses, {name: np.array(value) for name, value in trainer.parameters.items()}


def assert_same(one, other, **tolerance):
    np.testing.assert_allclose(one[0], other[0], **tolerance)
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        np.testing.assert_allclose(value, other[1][name], **tolerance)


@pytest.mark.sampled("kernels")
@pytest.mark.parametrize("kernels", [False, None])
@pytest.mark.parametrize("head", HEADS)
def test_steps_are_those_of_all_logits_at_once(head, kernels):
    options = onnxtrain.RuntimeOptions(kernels=kernels)
    whole, chunks = (trained(model(head), f"next_token({given})", runtime=options) for given in ("", "chunk=4"))
    assert len(whole[1]) >= 1 + (head not in ("quantized", "int4"))
    assert_same(chunks, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 15, 100])
@pytest.mark.parametrize(
    "loss",
    [
        "softmax_cross_entropy(axis=-1, chunk={})",
        "softmax_cross_entropy(axis=-1, ignore_index=3, chunk={})",
        "softmax_cross_entropy(axis=-1, label_smoothing=0.2, chunk={})",
        "softmax_cross_entropy(axis=-1, class_weights=(1,2,0,1,1,3,1,1,1,0.5,1), label_smoothing=0.1, chunk={})",
        "next_token(class_weights={{3: 2.5}}, reduction='sum', weight=0.1, chunk={})",
    ],
)
def test_options_in_double_precision(loss, chunk):
    given = model("bias", np.float64)
    labels = np.where(LABELS == -100, 3, LABELS) if "ignore_index=3" in loss else LABELS
    whole, chunks = (trained(given, loss.format(size), labels=labels) for size in ("none", chunk))
    assert_same(chunks, whole, rtol=1e-10, atol=1e-12)


def test_a_fixed_shape_and_one_row_for_each_example():
    whole, chunks = (trained(model("product", sizes=f"{N}, {T}"), f"next_token(chunk={size})") for size in ("none", 5))
    assert_same(chunks, whole, rtol=1e-5, atol=1e-6)
    flat = [
        trained(model("product", sizes="b"), f"softmax_cross_entropy(chunk={size})", X[:, 0], IDS[:, 0])
        for size in ("none", 2)
    ]
    assert_same(flat[1], flat[0], rtol=1e-5, atol=1e-6)


def test_weights_of_examples_and_micro_batches():
    weights = np.array([0.5, 2.0, 1.0])
    for options in ({}, {"accumulate": 3}):
        whole, chunks = (
            trained(model("bias"), f"next_token(label_smoothing=0.1, chunk={size})", sample_weight=weights, **options)
            for size in ("none", 4)
        )
        assert_same(chunks, whole, rtol=1e-5, atol=1e-6)


def test_all_labels_ignored():
    losses, parameters = trained(model("product"), "next_token(chunk=4)", labels=np.full((N, T), -100))
    assert losses == [0.0, 0.0]
    np.testing.assert_array_equal(parameters["head"], trained(model("product"), "next_token", steps=0)[1]["head"])


@pytest.mark.parametrize("frozen", [False, True])
def test_half_precision(frozen):
    made = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> f (float16[b, s, {K}] x) => (float16[b, s, {V}] logits)
        {{ h = MatMul(x, w0)  logits = MatMul(h, head) }}"""
    )
    for name, shape in (("w0", (K, K)), ("head", (K, V))):
        made.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=shape).astype(np.float16), name))
    whole, chunks = (trained(made, f"next_token(chunk={size})", train="w0" if frozen else None) for size in ("none", 4))
    assert_same(chunks, whole, rtol=1e-5, atol=1e-6)


def test_adapters_beside_the_head():
    lora = onnxtrain.Lora(rank=2, alpha=4, targets="*", init="gaussian")
    whole, chunks = (trained(model("product"), f"next_token(chunk={size})", lora=lora, seed=3) for size in ("none", 4))
    assert len(whole[1]) == 4
    assert_same(chunks, whole, rtol=1e-5, atol=1e-6)


def dequantized(given):
    """Return the low-bit model with its head dequantized."""
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in given.graph.initializer}
    integers = np.stack([tensors["four"] & 15, tensors["four"] >> 4], -1).reshape(V, 16)
    made = model("product")
    for tensor in made.graph.initializer:
        if tensor.name == "head":
            head = (integers[:, :K].T - np.float32(8)) * np.float32(0.1)
            tensor.CopyFrom(numpy_helper.from_array(head.astype(np.float32), "head"))
    return made


@pytest.mark.skipif(not kernels_available(), reason="the native kernels are not installed")
def test_a_low_bit_head_stays_quantized():
    trainer = onnxtrain.Trainer(model("int4"), loss="next_token(chunk=4)", optimizer="sgd(lr=0.5)")
    trainer.train_step(X.astype(np.float32), LABELS)
    (scan,) = (node for node in trainer.executor.session._steps[0].step.model.graph if node.op_type == "Scan")
    readers = [node for node in scan.attributes["body"].as_graph() if any(v.name == "four" for v in node.inputs)]
    assert [(node.domain, node.op_type) for node in readers] == [
        ("onnxtrain", "MatMulNBits"),
        ("onnxtrain", "MatMulNBitsGradient"),
    ]
    given = model("int4")
    floats, bits = (trained(each, "next_token(chunk=4)", train="w0") for each in (dequantized(given), given))
    assert_same(bits, floats, rtol=1e-5, atol=1e-6)


def test_evaluation_and_padded_batches():
    x, labels = np.concatenate([X, X + 1])[:4].astype(np.float32), np.concatenate([LABELS, IDS])[:4]
    for sizes in ("b, s", f"3, {T}"):
        found = []
        for size in ("none", 4):
            trainer = onnxtrain.Trainer(model("product", sizes=sizes), loss=f"next_token(chunk={size})", seed=0)
            trainer.fit(x, labels, epochs=2, batch_size=3, progress=False)
            found.append([*trainer.evaluate((x, labels), metrics=["perplexity", "accuracy"]).values()])
        np.testing.assert_allclose(*found, rtol=1e-5)


MEASURE = """
import re, sys
from pathlib import Path
import numpy as np, onnxtrain
from onnx import numpy_helper, parser

def peak():
    # Not getrusage: it starts with the peak of the parent process.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

made = parser.parse_model('<ir_version: 10, opset_import: ["": 18]> f (float[b, s, 16] x) => (float[b, s, 20000] z)'
    '{{ z = MatMul(x, head) }}')
made.graph.initializer.append(numpy_helper.from_array(np.zeros((16, 20000), np.float32), "head"))
trainer = onnxtrain.Trainer(made, loss="{loss}(chunk={chunk})", threads=1)
inputs, targets = {data}
before = peak()
trainer.train_step(inputs, targets)
trainer.evaluate((inputs, targets))
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_memory_falls():
    """All logits take 41 MB: three times as much without chunks, and little for 64 rows at a time."""
    check_memory_falls("next_token", "np.ones((4, 128, 16), np.float32), np.zeros((4, 128), np.int64)")


def check_memory_falls(loss, data):
    """Compare the KiB that a step and an evaluation add without chunks and with chunks of 64.

    Args:
        loss: Name of a loss on logits of 20,000 tokens.
        data: Its inputs and targets, as Python code.
    """
    peaks = []
    for chunk in (None, 64):
        code = MEASURE.format(loss=loss, data=data, chunk=chunk)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[0] > 90_000
    assert peaks[1] < 0.5 * peaks[0]


def test_the_training_model_computes_the_same(tmp_path):
    made = onnxtrain.training_model(model("product"), loss="next_token(chunk=4)", optimizer="sgd(lr=0.5)")
    onnx.checker.check_model(made)
    step = onnxtrain.lower(made)
    assert {node.op_type for node in step.graph.node} >= {"Scan"}
    logits = [node for node in step.graph.node if "logits" in node.output]
    assert not logits


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftmaxCrossEntropy(chunk=0), "chunk is 0; it is a number of rows, 1 or more"),
        (
            lambda: onnxtrain.Trainer(model("product"), loss="softmax_cross_entropy(axis=1, chunk=4)"),
            "needs the classes on the last axis of 'logits'.*axis=-1",
        ),
        (
            lambda: onnxtrain.Trainer(
                model("product"), loss="softmax_cross_entropy(axis=2, chunk=4)", targets="values"
            ),
            "chunk=4 needs labels as targets, but they are distributions",
        ),
        (
            lambda: onnxtrain.Trainer(_gathered(), loss="next_token(chunk=4)"),
            "they come from Gather of 'table' .*Leave chunk out",
        ),
    ],
)
def test_impossible_chunks_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def _gathered():
    made = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> f (int64[b, s] ids) => (float[b, s, {V}] logits)
        {{ logits = Gather(table, ids) }}"""
    )
    made.graph.initializer.append(numpy_helper.from_array(np.zeros((V, V), np.float32), "table"))
    return made
