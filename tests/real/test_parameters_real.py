"""Parameters, tables, masks and scalars as exporters write them: which are trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

pytestmark = pytest.mark.filterwarnings("ignore::onnxtrain.errors.TrainingHint")

LOWEST = float(np.finfo(np.float32).min)
RNG = np.random.default_rng(0)
POSITIONS, WIDTH = 24, 8


def angles(positions: int = POSITIONS, width: int = WIDTH) -> np.ndarray:
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    return np.outer(np.arange(positions), frequencies)


def sinusoids() -> np.ndarray:
    """Return the table of "Attention Is All You Need": alternating sines and cosines."""
    table = np.zeros((POSITIONS, WIDTH), np.float32)
    table[:, 0::2], table[:, 1::2] = np.sin(angles()), np.cos(angles())
    return table


@dataclass
class Case:
    """A graph of x [N, S, 8] and ids [N, S] around one initializer ``value`` called ``name``.

    Attributes:
        name: Its name.
        value: Its value.
        nodes: Lines ``output = Operator(inputs)``; ``@`` stands for its name. The last one gives y.
        trained: True if it is a parameter.
        reason: What ``inspect`` says where it is not.
        others: Further initializers.
    """

    name: str
    value: object
    nodes: str
    trained: bool
    reason: str = ""
    others: dict[str, object] = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        lines = [line.strip() for line in self.nodes.replace("@", "VALUE").split(";")]
        text = "  ".join(lines)
        head = '<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]> m (float[N,S,8] x, int64[N,S] ids) => (y)'
        model = onnx.parser.parse_model(f"{head} {{ {text} }}")
        del model.graph.output[:]
        model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
        arrays = {"VALUE": np.asarray(self.value, np.float32)}
        for name, value in self.others.items():
            array = np.asarray(value)
            arrays[name] = array.astype(np.float32) if array.dtype.kind == "f" else array
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
        for node in model.graph.node:
            node.input[:] = [self.name if name == "VALUE" else name for name in node.input]
        model.graph.initializer[0].name = self.name
        return model


SCALAR = "a scalar of the computation"
NUMBERS = "a tensor that was made of numbers, by its name"
EXPONENT = "exponent of Pow"
OPEN = "neither its use nor its name says that it is learned"
FILL = "ones, zeros or another single value that an exporter wrote"
PREPROCESSING = "mean or deviation of preprocessing"
EVEN = "a position table: its values are evenly spaced"
HUGE = "a mask: it holds infinite or huge values"
NAMED = "a position table, by its name"
COLUMNS = "a position table: its columns are sines and cosines"
ANGLES = "a position table: only its sines and cosines are used"
SCALE, SHIFT = "y = Mul(x, @)", "y = Add(x, @)"
ATTENTION = "t = Transpose<perm = [0, 2, 1]>(x); s = MatMul(x, t); m = Add(s, @); p = Softmax(m); y = MatMul(p, x)"
EMBEDDED = "e = Gather(@, ids); y = Add(x, e)"
TURNED = "c = Gather(@, ids); n = Neg(x); z = Mul(n, c); y = Add(x, z)"
TURN = "c = Cos(f); s = Sin(f); y = Concat<axis = 2>(c, s)"
PAIR = "p = Cast<to = 1>(ids); q = Unsqueeze(p, last); f = {product}(q, @); " + TURN
ROTARY = "y = com.microsoft.RotaryEmbedding<num_heads = 1, rotary_embedding_dim = 8>(x, ids, {caches})"
HIDING = "a mask: it holds zeros and values that hide positions"
CUT = {"a": np.array([0]), "b": np.array([6]), "c": np.array([1])}
NORM = "n = InstanceNormalization(x, b, b); y = {}(n, @)"
TANH = "t = Tanh(x); y = {}(t, @)"
FEW = "t = Tanh(x); a = Mul(t, @); b = Neg(t); c = Mul(b, slice_2); y = Add(a, c)"
RECURRENT = "t = Tanh(x); y = GRU<hidden_size = 8>(t, w, w, , , @)"
TWO = {"b": RNG.normal(size=5)}
SQUARE = {"w": RNG.normal(size=(8, 8))}
COLUMN = {"w": RNG.normal(size=(8, 1))}
LAST = {"last": np.array([2], np.int64)}
CAUSAL = np.triu(np.ones((6, 6)), 1)

CASES = {
    # Angles: without other inputs, one of the two functions is enough.
    "cosines alone": Case("val_5", RNG.normal(size=(6, 8)), "c = Cos(@); y = Mul(x, c)", False, ANGLES),
    "sines of positions": Case(
        "val_6",
        RNG.normal(size=(1, 8)),
        "p = Cast<to = 1>(ids); q = Unsqueeze(p, last); f = Mul(q, @); c = Sin(f); y = Mul(x, c)",
        False,
        ANGLES,
        LAST,
    ),
    "sines of data": Case("frequencies", RNG.normal(size=(1, 8)), "f = Mul(x, @); y = Sin(f)", True),
    "sines of data without a name": Case("val_7", RNG.normal(size=(1, 8)), "f = Mul(x, @); y = Sin(f)", False, OPEN),
    # Scalars that are learned.
    "logit scale": Case("logit_scale", 2.6592, "e = Exp(@); y = Mul(x, e)", True),
    "logit scale without a name": Case("onnx::Exp_12", 2.6592, "e = Exp(@); y = Mul(x, e)", True),
    "logit scale behind Clip": Case(
        "val_3", 2.6592, "c = Clip(@, , top); e = Exp(c); y = Mul(x, e)", True, "", {"top": 4.6}
    ),
    "logit bias": Case("logit_bias", -10.0, SHIFT, True),
    "temperature of one": Case("temperature", [1.0], "y = Div(x, @)", True),
    "temperature of a module": Case("text.head.temp", 0.5, "y = Div(x, @)", True),
    "logarithm of a deviation": Case("policy.log_std", [-0.5], SHIFT, True),
    "gate that starts at zero": Case("blocks.0.resweight", 0.0, SCALE, True),
    "scale of a module": Case("blocks.0.layer_scale", [1.0], SCALE, True),
    "power of a pooling": Case("pool.p", 3.0, "a = Abs(x); y = Pow(a, @)", False, EXPONENT),
    "variable of TensorFlow": Case("StatefulPartitionedCall/net/scale/ReadVariableOp:0", 1.0, SCALE, True),
    "folded exponential": Case("exp", 14.2857, SCALE, True),
    "word with an odd value": Case("kappa", 0.713249, SCALE, True),
    "slope of PRelu": Case("onnx::PRelu_7", [0.25], "y = PRelu(x, @)", True),
    "slope of PRelu of rank 0": Case("val_9", 0.25, "y = PRelu(x, @)", True),
    "slopes of PRelu": Case(
        "val_10",
        np.full((8, 1, 1), 0.25),
        "u = Unsqueeze(x, last); y = PRelu(u, @)",
        True,
        "",
        LAST,
    ),
    "bias of one output": Case("Ad_Addcst", [0.0], "h = MatMul(x, w); y = Add(h, @)", True, "", COLUMN),
    "bias of rank 0": Case("bias", 0.0, "h = MatMul(x, w); y = Add(h, @)", True, "", COLUMN),
    # Scalars of the computation.
    "scale of attention, TorchScript": Case("/attn/Constant_output_0", 1 / math.sqrt(64), SCALE, False, SCALAR),
    "scale of attention, folded": Case("onnx::Mul_123", 1 / math.sqrt(80), SCALE, False, SCALAR),
    "scale of attention, dynamo": Case("_val_12", 0.5, SCALE, False, SCALAR),
    "literal of dynamo": Case("c_lifted_tensor_0", 0.3337, SCALE, False, SCALAR),
    "tf2onnx": Case("const_fold_opt__12", 0.3337, SCALE, False, SCALAR),
    "TensorFlow's operand": Case("model/gelu/mul/y:0", 0.3337, SCALE, False, SCALAR),
    "skl2onnx": Case("Mu_Mulcst", [2.7131], SCALE, False, SCALAR),
    "onnxruntime-genai": Case("/model/constants/FLOAT/0D/2", 11.3137, SCALE, False, SCALAR),
    "Paddle": Case("fill_constant_1.tmp_0", 0.3337, SCALE, False, SCALAR),
    "number": Case("217", 0.3337, SCALE, False, SCALAR),
    "half": Case("half", 0.5, SCALE, False, SCALAR),
    "root": Case("root_two", math.sqrt(2), "y = Div(x, @)", False, SCALAR),
    "constant of Gelu": Case("factor", 0.044715, SCALE, False, SCALAR),
    "exponent": Case("two", 2.0, "a = Abs(x); y = Pow(a, @)", False, EXPONENT),
    "epsilon of a module": Case("norm.eps", 1e-5, "q = Mul(x, x); e = Add(q, @); y = Sqrt(e)", False, SCALAR),
    "norm factor of GPT-NeoX": Case("layers.0.attention.norm_factor", 8.0, "y = Div(x, @)", False, SCALAR),
    "fill of GPT-2": Case(
        "h.0.attn.masked_bias", -1e4, "c = Greater(x, zero); y = Where(c, x, @)", False, SCALAR, {"zero": 0.0}
    ),
    "ratio of Dropout": Case("val_11", 0.1, "y = Dropout(x, @)", False, "ratio of Dropout"),
    # Tables.
    "cosines by name": Case("cos_cache", RNG.normal(size=(POSITIONS, 8)), TURNED, False, NAMED),
    "cosines of a module": Case("model.rotary_emb.cos_cached", np.cos(angles(width=16)), TURNED, False, NAMED),
    "sines by name": Case("sin_cache", RNG.normal(size=(POSITIONS, 8)), TURNED, False, NAMED),
    "cosines by value": Case("val_30", np.cos(angles(width=16)), TURNED, False, COLUMNS),
    "sines by value": Case("onnx::Gather_44", 1.2 * np.sin(angles(width=16)), TURNED, False, COLUMNS),
    "cosines that are sliced": Case(
        "val_31", np.cos(angles(width=16))[None], "z = Slice(@, a, b, c); y = Mul(x, z)", False, COLUMNS, CUT
    ),
    "fixed sinusoids": Case(
        "pos_encoder.pe", sinusoids()[None], "z = Slice(@, a, b, c); y = Add(x, z)", False, COLUMNS, CUT
    ),
    "fixed sinusoids that are looked up": Case("embed_positions.weights", sinusoids(), EMBEDDED, False, COLUMNS),
    "inverse frequencies by name": Case("inv_freq", angles()[1], PAIR.format(product="Mul"), False, NAMED, LAST),
    "inverse frequencies by use": Case(
        "onnx::MatMul_5", angles()[1:2], PAIR.format(product="MatMul"), False, ANGLES, LAST
    ),
    "frequencies of a time": Case("val_4", angles()[1].repeat(2), "f = Mul(x, @); " + TURN, False, ANGLES),
    "slopes of ALiBi": Case("alibi_slopes", RNG.normal(size=8), SCALE, False, NAMED),
    "mean of images": Case(
        "/Constant_3_output_0",
        RNG.normal(size=8),
        "y = Sub(x, @)",
        False,
        "a tensor written in the model's code, by its name",
    ),
    "cosines of RotaryEmbedding": Case(
        "val_60",
        RNG.normal(size=(POSITIONS, 4)),
        ROTARY.format(caches="@, sines"),
        False,
        "a position table: cosines of RotaryEmbedding",
        {"sines": RNG.normal(size=(POSITIONS, 4))},
    ),
    "sines of RotaryEmbedding": Case(
        "val_61",
        RNG.normal(size=(POSITIONS, 4)),
        ROTARY.format(caches="cosines, @"),
        False,
        "a position table: sines of RotaryEmbedding",
        {"cosines": RNG.normal(size=(POSITIONS, 4))},
    ),
    # Constants by their use, whatever they are called.
    "operand of Less that is added": Case(
        "net.threshold",
        0.3337,
        "l = Less(x, @); c = Cast<to = 1>(l); g = Add(c, @); y = Mul(x, g)",
        False,
        "operand of Less",
    ),
    "operand of Equal that is added": Case(
        "const_fold_opt__2079",
        0.0,
        "e = Equal(x, @); f = Cast<to = 1>(e); g = Add(f, @); y = Mul(x, g)",
        False,
        "operand of Equal",
    ),
    "fill of Expand": Case("val_2", 0.0, "s = Shape(x); e = Expand(@, s); y = Add(x, e)", False, SCALAR),
    "zeros of Keras": Case(
        "gru/zeros/Const:0", 0.0, "s = Shape(x); e = Expand(@, s); y = MatMul(e, w)", False, SCALAR, SQUARE
    ),
    "exponent of Paddle": Case("helper.constant.12", 2.0, "a = Abs(x); y = Pow(a, @)", False, EXPONENT),
    "scale of attention by Paddle": Case("auto.cast.4", [0.3337], SCALE, False, SCALAR),
    "fill of an initial state by Paddle": Case(
        "p2o.pd_op.full.2.0",
        [0.0],
        "i = Identity(@); s = Shape(x); e = Expand(i, s); y = Add(x, e)",
        False,
        SCALAR,
    ),
    "bias of a convolution by Paddle": Case(
        "p2o.pd_op.reshape.0.0", np.zeros((1, 1, 8)), "h = MatMul(x, w); y = Add(h, @)", True, "", SQUARE
    ),
    "missing bias of jax2onnx": Case(
        "dot_bias_0", 0.0, "f = Flatten<axis = 2>(x); h = Gemm(f, w, @); y = Tanh(h)", False, NUMBERS, SQUARE
    ),
    "bias of a Gemm with one output": Case(
        "out.bias", [0.0], "f = Flatten<axis = 2>(x); h = Gemm(f, w, @); y = Tanh(h)", True, "", COLUMN
    ),
    "root of Paddle": Case("helper.constant.3", math.sqrt(2), "y = Div(x, @)", False, SCALAR),
    "odd number of Paddle": Case("helper.constant.4", 0.7133, SCALE, False, SCALAR),
    "guard of a logarithm": Case(
        "log_zero_guard_value", 2**-24, "a = Abs(x); e = Add(a, @); y = Log(e)", False, SCALAR
    ),
    "epsilon by use": Case("tiny", 3.3e-7, "a = Abs(x); e = Add(a, @); y = Div(x, e)", False, SCALAR),
    "zeros of an initial state": Case(
        "val_10", np.zeros((1, 1, 8)), RECURRENT, False, FILL, {"w": RNG.normal(size=(1, 24, 8))}
    ),
    "initial state by its name": Case(
        "encoder.h0", np.zeros((1, 1, 8)), RECURRENT, True, "", {"w": RNG.normal(size=(1, 24, 8))}
    ),
    "initial state by its values": Case(
        "val_10", RNG.normal(size=(1, 1, 8)), RECURRENT, True, "", {"w": RNG.normal(size=(1, 24, 8))}
    ),
    "zeros of a fixed batch": Case(
        "initial_h", np.zeros((1, 4, 8)), RECURRENT, False, FILL, {"w": RNG.normal(size=(1, 24, 8))}
    ),
    "zeros of TensorFlow": Case(
        "model/lstm/zeros:0", np.zeros((1, 1, 8)), RECURRENT, False, FILL, {"w": RNG.normal(size=(1, 24, 8))}
    ),
    "shift of one element by Paddle": Case(
        "helper.constant.9", [3.0], "h = MatMul(x, w); y = Add(h, @)", False, SCALAR, SQUARE
    ),
    "root of a module": Case("blocks.0.act.root_two", math.sqrt(2), "y = Div(x, @)", False, SCALAR),
    "factor of a module": Case("blocks.0.act.factor", 0.044715, SCALE, False, SCALAR),
    "initial state that an exporter repeated": Case(
        "expand", RNG.normal(size=(1, 1, 8)).repeat(2, 1), RECURRENT, False, OPEN, {"w": RNG.normal(size=(1, 24, 8))}
    ),
    "ones of a decomposed norm": Case(
        "val_8", np.ones(5), "n = InstanceNormalization(x, @, b); y = Mul(n, x)", False, FILL, {"b": RNG.normal(size=5)}
    ),
    "zeros of a decomposed norm": Case("val_28", np.zeros((5, 1)), NORM.format("Add"), False, FILL, TWO),
    "scale of a decomposed norm": Case("val_26", RNG.normal(size=(5, 1)), NORM.format("Mul"), True, "", TWO),
    "one of a decomposed norm of one group": Case(
        "val_8",
        [1.0],
        "v = Unsqueeze(x, one); n = InstanceNormalization(v, @, b); y = Mul(n, v)",
        False,
        SCALAR,
        {"b": [0.3], "one": np.array([1])},
    ),
    "fresh scale of a layer, folded": Case("unsqueeze_1", np.full((6, 1), 1e-5), TANH.format("Mul"), False, OPEN),
    "sinusoids that are projected": Case(
        "unsqueeze_2",
        np.concatenate([np.sin(angles()), np.cos(angles())], 1),
        "p = MatMul(@, w); q = Transpose<perm = [1, 0]>(p); y = MatMul(x, q)",
        False,
        COLUMNS,
        SQUARE,
    ),
    "fresh scale of TorchScript": Case("onnx::Mul_16", np.ones((5, 1)), NORM.format("Mul"), True, "", TWO),
    "fresh scale of a module": Case("1.weight", np.ones((5, 1)), NORM.format("Mul"), True, "", TWO),
    "ones without affine": Case("val_2", np.ones(8), "y = LayerNormalization(x, @)", False, FILL),
    "fresh scale of LayerNorm": Case("norm.weight", np.ones(8), "y = LayerNormalization(x, @)", True),
    "running variance that is a scale": Case(
        "1.running_var",
        np.ones(5),
        "y = BatchNormalization(x, @, b, b, @)",
        False,
        "a running statistic, by its name",
        {"b": RNG.normal(size=5)},
    ),
    "branch of Where": Case(
        "val_5", RNG.normal(size=8), "c = Greater(x, zero); y = Where(c, x, @)", False, OPEN, {"zero": 0.0}
    ),
    "learned branch of Where": Case(
        "mask_token", RNG.normal(size=8), "c = Greater(x, zero); y = Where(c, x, @)", True, "", {"zero": 0.0}
    ),
    # Preprocessing.
    "mean": Case(
        "mean", RNG.normal(size=8), "s = Sub(x, @); y = Div(s, d)", False, PREPROCESSING, {"d": RNG.random(8) + 1}
    ),
    "deviation": Case(
        "std", RNG.random(8), "s = Sub(x, m); y = Div(s, @)", False, PREPROCESSING, {"m": RNG.normal(size=8)}
    ),
    "mean without a name": Case(
        "val_4", RNG.normal(size=8), "s = Sub(x, @); y = Mul(s, d)", False, PREPROCESSING, {"d": RNG.random(8) + 1}
    ),
    "scale of skl2onnx": Case(
        "Scaler.scale",
        RNG.random(8),
        "s = Sub(x, my_offset); y = Mul(s, @)",
        False,
        PREPROCESSING,
        {"my_offset": RNG.normal(size=8)},
    ),
    "centres": Case("rbf.centers", RNG.normal(size=8), "s = Sub(x, @); q = Mul(s, s); n = Neg(q); y = Exp(n)", True),
    "shift of a layer that normalizes": Case(
        "actnorm.loc", RNG.normal(size=8), "s = Sub(x, @); y = Mul(s, d)", True, "", {"d": RNG.random(8) + 1}
    ),
    "scale and shift of skl2onnx": Case(
        "Mu_Mulcst",
        RNG.random(8),
        "s = Mul(x, @); y = Add(s, Ad_Addcst)",
        False,
        PREPROCESSING,
        {"Ad_Addcst": RNG.normal(size=8)},
    ),
    "literal of TensorFlow": Case(
        "model/mul/y:0",
        RNG.normal(size=8),
        TANH.format("Mul"),
        False,
        "a tensor written in the model's code, by its name",
    ),
    "few sinusoids": Case("pe.table", sinusoids()[:4], EMBEDDED, False, COLUMNS),
    "few sinusoids that are added": Case(
        "pe.table", sinusoids()[None, :4], "c = Concat<axis = 1>(x, @); y = Tanh(c)", False, COLUMNS
    ),
    "few learned positions": Case("pe.table", RNG.normal(size=(4, 8)), EMBEDDED, True),
    # Tables.
    "anchors that are scaled": Case("val_91", np.arange(8) + 0.5, TANH.format("Mul"), False, EVEN),
    "strides": Case("val_92", np.repeat([8.0, 16.0, 32.0], [4, 2, 2]), TANH.format("Mul"), False, EVEN),
    "anchors by name": Case("head.anchor_points", RNG.normal(size=8), TANH.format("Add"), False, NAMED),
    "slopes of ALiBi by value": Case("val_93", 2.0 ** -np.arange(1, 9), TANH.format("Mul"), False, EVEN),
    "distances of ALiBi": Case("val_94", np.arange(-5, 1) / 8 * np.ones((6, 1)), ATTENTION, False, OPEN),
    "few turned positions": Case(
        "slice_1",
        np.cos(angles(4, 8)).repeat(2, 1),
        FEW,
        False,
        "a position table: cosines and sines",
        {"slice_2": np.sin(angles(4, 8)).repeat(2, 1)},
    ),
    "matrix that an exporter multiplies by": Case("val_95", RNG.normal(size=(6, 8)), TANH.format("Mul"), False, OPEN),
    "vector that an exporter multiplies by": Case("val_96", RNG.normal(size=8), TANH.format("Mul"), True),
    "positions that an exporter looked up": Case("embedding_1", RNG.normal(size=(1, 6, 8)), TANH.format("Add"), True),
    "token types that an exporter looked up": Case(
        "embedding_2", RNG.normal(size=(1, 1, 8)).repeat(6, 1), TANH.format("Add"), False, OPEN
    ),
    # Masks.
    "causal mask": Case("onnx::Add_196", np.where(CAUSAL, -np.inf, 0), ATTENTION, False, HUGE),
    "causal mask of smallest floats": Case("val_70", np.where(CAUSAL, LOWEST, 0), ATTENTION, False, HUGE),
    "causal mask of -10000": Case("val_71", np.where(CAUSAL, -1e4, 0), ATTENTION, False, HIDING),
    "mask of windows": Case("val_72", np.where(CAUSAL, -100.0, 0), ATTENTION, False, HIDING),
    "mask with a bias": Case("val_73", np.where(CAUSAL, -np.inf, RNG.normal(size=(6, 6))), ATTENTION, False, HUGE),
    "mask by name": Case("layers.0.attn_mask", -CAUSAL, ATTENTION, False, "a mask, by its name"),
    "mask of weights": Case(
        "conv.weight_mask",
        (RNG.random((8, 8)) > 0.5) * 1.0,
        "w = Mul(v, @); y = MatMul(x, w)",
        False,
        "a mask, by its name",
        {"v": RNG.normal(size=(8, 8))},
    ),
    "mask of weights without a name": Case(
        "onnx::Mul_8",
        (RNG.random((8, 8)) > 0.5) * 1.0,
        "w = Mul(v, @); y = MatMul(x, w)",
        False,
        "a mask: it multiplies by zeros and ones",
        {"v": RNG.normal(size=(8, 8))},
    ),
    # Tensors that are trained, though they look like tables or masks.
    "embedding with huge values": Case("wte.weight", np.where(RNG.random((20, 8)) > 0.9, 1e10, 0.1), EMBEDDED, True),
    "embedding that holds what masks hold": Case(
        "val_80", np.where(RNG.random((20, 8)) > 0.9, LOWEST, 0.0), EMBEDDED, True
    ),
    "weight with huge values": Case(
        "onnx::MatMul_9", np.where(RNG.random((8, 8)) > 0.9, 1e10, 0.1), "y = MatMul(x, @)", True
    ),
    "bias with huge values": Case("out.bias", np.full(8, 2e9), "h = MatMul(x, w); y = Add(h, @)", True, "", SQUARE),
    "learned positions": Case("wpe.weight", RNG.normal(size=(POSITIONS, 8)), EMBEDDED, True),
    "learned positions of BERT": Case(
        "embeddings.position_embeddings.weight",
        RNG.normal(size=(6, 8)),
        "e = Gather(@, fixed); y = Add(x, e)",
        True,
        "",
        {"fixed": np.arange(6)[None]},
    ),
    "positions learned from sinusoids": Case(
        "wpe.weight", sinusoids() + 0.05 * RNG.normal(size=(POSITIONS, 8)), EMBEDDED, True
    ),
    "fresh embedding of zeros": Case("wpe.weight", np.zeros((POSITIONS, 8)), EMBEDDED, True),
    "learned bias of attention": Case("onnx::Add_77", 3 * RNG.normal(size=(6, 6)), ATTENTION, True),
    "fresh bias of attention": Case("relative_bias", np.zeros((6, 6)), ATTENTION, True),
    "token for masked positions": Case("mask_token", RNG.normal(size=(1, 1, 8)), SHIFT, True),
    "sinusoidal layer": Case("net.0.weight", RNG.normal(size=(8, 4)), "f = MatMul(x, @); " + TURN, True),
    "scale before an angle": Case(
        "gain", RNG.normal(size=8), "h = MatMul(x, w); f = Mul(h, @); " + TURN, True, "", SQUARE
    ),
    "scale that is fresh": Case("norm.weight", np.ones((1, 6, 1)), SCALE, True),
    "weight of cosines": Case("cos.weight", RNG.normal(size=(8, 8)), "y = MatMul(x, @)", True),
}


@pytest.mark.parametrize("case", CASES)
def test_trainable_parameters(case):
    case = CASES[case]
    rows = {row.name: row for row in onnxtrain.inspect(case.model()).initializers}
    row = rows[case.name]
    assert (row.trainable, row.reason) == (case.trained, case.reason)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].reason not in ("", HUGE)])
def test_named_tensors_are_trained_in_any_case(case):
    case = CASES[case]
    rows = {row.name: row for row in onnxtrain.inspect(case.model(), train=case.name).initializers}
    assert rows[case.name].trainable
    rows = {row.name: row for row in onnxtrain.inspect(case.model(), train="*").initializers}
    assert rows[case.name].reason == case.reason


def test_many_cases_of_both_kinds():
    assert min(sum(case.trained for case in CASES.values()), sum(not case.trained for case in CASES.values())) > 25


def normalized(first: str) -> onnx.ModelProto:
    """Return a normalization with an untrained scale, behind a weight of this name."""
    nodes = "h = MatMul(x, w); m = ReduceMean <axes = [-1]> (h); c = Sub(h, m); y = Mul(c, @)"
    model = Case("const_2", np.ones(8), nodes, False, FILL, SQUARE).model()
    model.graph.node[0].input[1] = first
    next(tensor for tensor in model.graph.initializer if tensor.name == "w").name = first
    return model


@pytest.mark.parametrize(("first", "is_hinted"), [("const_0", True), ("layer.weight", False)])
def test_a_fresh_scale_is_hinted_where_no_tensor_has_a_module_s_name(first, is_hinted):
    hints = [hint for hint in onnxtrain.inspect(normalized(first)).hints if "neither use nor name" in hint]
    assert bool(hints) is is_hinted
    assert all('train=["*", "const_2"]' in hint for hint in hints)


def test_a_weight_that_is_used_in_training_but_not_by_rank():
    """Constants of the computation stay bit for bit, learned scalars change."""
    case = CASES["logit scale"].model()
    case.graph.node.append(helper.make_node("Mul", ["y", "/Constant_output_0"], ["z"]))
    case.graph.initializer.append(numpy_helper.from_array(np.float32(0.3), "/Constant_output_0"))
    case.graph.output[0].name = "z"
    trainer = onnxtrain.Trainer(case, loss="mean_squared_error", optimizer=onnxtrain.Momentum(0.01))
    assert list(trainer.parameters) == ["logit_scale"]
    x = RNG.normal(size=(2, 3, 8)).astype(np.float32)
    trainer.train_step({"x": x, "ids": np.zeros((2, 3), np.int64)}, x)
    assert trainer.parameters["logit_scale"] != np.float32(2.6592)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def language_model(torch):
    nn = torch.nn

    class Model(nn.Module):
        """A small language model with tensors that are easily mistaken for parameters, and the reverse."""

        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(20, 16), nn.Embedding(32, 16)
            inverse = torch.tensor(10000.0 ** (-np.arange(0, 8, 2) / 8), dtype=torch.float32)
            self.register_buffer("inv_freq", inverse)
            turned = torch.cat([torch.outer(torch.arange(32.0), inverse)] * 2, -1)
            self.register_buffer("cos_cached", turned.cos())
            self.register_buffer("sin_cached", turned.sin())
            self.register_buffer("causal", torch.triu(torch.full((32, 32), float("-inf")), 1))
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
            self.norm, self.act = nn.LayerNorm(16), nn.PReLU()
            self.logit_scale = nn.Parameter(torch.tensor(2.6592))
            self.block = nn.Module()
            self.block.gate = nn.Parameter(torch.tensor(0.5))
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, ids, positions):
            h = self.wte(ids) + self.wpe(positions)
            q, k, v = (
                linear(self.norm(h)).view(*ids.shape, 2, 8).transpose(1, 2) for linear in (self.q, self.k, self.v)
            )
            q = rotated(torch, q, self.cos_cached[positions][:, None], self.sin_cached[positions][:, None])
            turned = torch.cat([positions[:, :, None].float() * self.inv_freq] * 2, -1)[:, None]
            k = rotated(torch, k, turned.cos(), turned.sin())
            length = ids.shape[1]
            scores = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + self.causal[:length, :length], -1)
            out = (scores @ v).transpose(1, 2).reshape(h.shape) * self.block.gate
            return self.head(h + self.act(out)) * self.logit_scale.exp()

    return Model()


def rotated(torch, x, cosines, sines):
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat([-second, first], -1) * sines


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("dynamo", [True, False])
def test_a_language_model_of_both_exporters(torch, dynamo, folded, tmp_path):
    torch.manual_seed(0)
    net = language_model(torch).eval()
    ids, positions = torch.randint(0, 20, (2, 6)), torch.arange(6)[None].repeat(2, 1)
    how = {"optimize": folded, "external_data": False} if dynamo else {"do_constant_folding": folded}
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        net, (ids, positions), str(path), input_names=["ids", "positions"], dynamo=dynamo, verbose=False, **how
    )
    found = onnxtrain.inspect(path)
    trained = sum(parameter.numel() for parameter in net.parameters())
    copies = [hint for hint in found.hints if "holds the same values as" in hint]
    assert len(copies) == folded
    assert found.trainable_size == trained + folded * 20 * 16
    trainer = onnxtrain.Trainer(path, loss="softmax_cross_entropy", tie=folded)
    assert sum(array.size for array in trainer.parameters.values()) == trained
    feeds = {"ids": ids.numpy(), "positions": positions.numpy()}
    losses = [trainer.train_step(feeds, ids.numpy()) for _ in range(3)]
    assert losses[-1] < losses[0]
