"""Hard cases for the removal of structures: models by name, and what each is fed."""

import numpy as np
from masked_models import build

HEAD = '<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]> f ({inputs}) => ({outputs}) {{ {nodes} }}'

IMAGE = "float[2, 3, 6, 6] x"
X = {"x": np.random.default_rng(1).normal(size=(2, 3, 6, 6)).astype(np.float32)}


def text(nodes, inputs=IMAGE, outputs="float[2, 5] y", opset=18):
    return HEAD.format(opset=opset, inputs=inputs, outputs=outputs, nodes=nodes)


def ints(*numbers):
    return np.array(numbers, np.int64)


TAIL = "g = GlobalAveragePool(h) v = Flatten(g) y = Gemm<transB = 1>(v, head, bias)"


def image(nodes, width, outputs="float[2, 5] y", **weights):
    return build(text(f"{nodes} {TAIL}", outputs=outputs), head=(5, width), bias=(5,), **weights)


def sequence(nodes, width=8, length=5, opset=18, **weights):
    model = build(
        text(nodes, f"float[2, {length}, {width}] x", f"float[2, {length}, {width}] y", opset=opset), **weights
    )
    return model, {"x": np.random.default_rng(2).normal(size=(2, length, width)).astype(np.float32)}


CASES = {
    "batch normalization, residual sum and flattening of an image": build(
        text(
            "a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1) n = BatchNormalization(a, s, t, m, v) r = Relu(n)"
            " c = Conv<pads = [1, 1, 1, 1]>(r, w2) d = Add(r, c)"
            " p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(d)"
            " f = Flatten(p) y = Gemm<transB = 1>(f, head, bias)"
        ),
        **{"w1": (8, 3, 3, 3), "b1": (8,), "s": (8,), "t": (8,), "m": (8,), "v": np.ones(8, np.float32)},
        **{"w2": (8, 8, 3, 3), "head": (5, 72), "bias": (5,)},
    ),
    "depthwise convolution": image(
        "a = Conv(x, w1) r = Relu(a) b = Conv<group = 8>(r, w2, b2) h = Conv(b, w3)",
        6,
        w1=(8, 3, 1, 1),
        w2=(8, 1, 3, 3),
        b2=(8,),
        w3=(6, 8, 1, 1),
    ),
    "grouped convolution": image(
        "a = Conv(x, w1) b = Conv<group = 4>(a, w2, b2) h = Conv(b, w3)",
        6,
        w1=(16, 3, 1, 1),
        w2=(16, 4, 3, 3),
        b2=(16,),
        w3=(6, 16, 1, 1),
    ),
    "grouped convolutions behind an input of the model": image(
        "a = Conv<group = 3>(x, w1, b1) r = Relu(a) h = Conv<group = 3>(r, w2)",
        6,
        w1=(12, 1, 3, 3),
        b1=(12,),
        w2=(6, 4, 1, 1),
    ),
    "grouped transposed convolution behind an input of the model": image(
        "a = ConvTranspose<group = 3>(x, w1) r = Relu(a) h = Conv(r, w2)", 6, w1=(3, 4, 2, 2), w2=(6, 12, 1, 1)
    ),
    "biases that are computed, and weights in another form": image(
        "one = Constant<value = float {0.5}>() like = CastLike(one, x) s = Shape<start = 0, end = 1>(w1)"
        " b1 = Expand(like, s) a = Conv(x, w1, b1) r = Relu(a) k = Identity(w2) b2 = Squeeze(given) h = Conv(r, k, b2)",
        6,
        w1=(8, 3, 3, 3),
        w2=(6, 8, 1, 1),
        given=(1, 6),
    ),
    "channel shuffle between grouped convolutions": image(
        "a = Conv(x, w1) b = Conv<group = 2>(a, w2) c = Reshape(b, apart) d = Transpose<perm = [0, 2, 1, 3, 4]>(c)"
        " e = Reshape(d, merged) h = Conv<group = 2>(e, w3)",
        12,
        w1=(12, 3, 1, 1),
        w2=(12, 6, 1, 1),
        w3=(12, 6, 1, 1),
        apart=ints(2, 2, 6, 6, 6),
        merged=ints(2, 12, 6, 6),
    ),
    "concatenation and splits": image(
        "a = Conv(x, w1) b = Conv(x, w2) c = Concat<axis = 1>(a, b) p, q = Split<axis = 1>(c, sizes)"
        " e = Relu(p) f = Concat<axis = 1>(q, e, a) h = Conv(f, w3)",
        6,
        w1=(6, 3, 1, 1),
        w2=(4, 3, 1, 1),
        sizes=ints(3, 7),
        w3=(6, 16, 1, 1),
    ),
    "slices and lookups of channels": image(
        "a = Conv(x, w1) b = Slice(a, start, end, axis) c = Gather<axis = 1>(a, places) d = Concat<axis = 1>(b, c)"
        " h = Conv(d, w2)",
        6,
        w1=(8, 3, 1, 1),
        start=ints(2),
        end=ints(7),
        axis=ints(1),
        places=ints(7, 0, 5, -2),
        w2=(6, 9, 1, 1),
    ),
    "padding and resizing": image(
        'a = Conv(x, w1) b = Pad(a, pads) c = Resize<mode = "nearest">(b, , , sizes) h = Conv(c, w2)',
        6,
        w1=(8, 3, 1, 1),
        pads=ints(0, 1, 1, 1, 0, 2, 1, 1),
        sizes=ints(2, 11, 16, 16),
        w2=(6, 11, 1, 1),
    ),
    "transposed convolution": image(
        "a = Conv(x, w1) b = ConvTranspose<strides = [2, 2]>(a, w2, b2) c = Relu(b) h = Conv(c, w3)",
        6,
        w1=(8, 3, 1, 1),
        w2=(8, 7, 2, 2),
        b2=(7,),
        w3=(6, 7, 1, 1),
    ),
    "grouped transposed convolution": image(
        "a = Conv(x, w1) h = ConvTranspose<group = 4>(a, w2, b2)", 12, w1=(8, 3, 1, 1), w2=(8, 3, 2, 2), b2=(12,)
    ),
    "depth to space": image(
        "a = Conv(x, w1) b = DepthToSpace<blocksize = 2>(a) c = SpaceToDepth<blocksize = 3>(b) h = Conv(c, w2)",
        6,
        w1=(16, 3, 1, 1),
        w2=(6, 36, 1, 1),
    ),
    "squeeze and excitation": image(
        "a = Conv(x, w1) g1 = GlobalAveragePool(a) g2 = Conv(g1, w2, b2) g3 = Relu(g2) g4 = Conv(g3, w3, b3)"
        " g5 = Sigmoid(g4) h = Mul(a, g5)",
        8,
        w1=(8, 3, 1, 1),
        w2=(4, 8, 1, 1),
        b2=(4,),
        w3=(8, 4, 1, 1),
        b3=(8,),
    ),
    "group norm of opset 21": build(
        text(
            "a = Conv(x, w1, b1) n = GroupNormalization<num_groups = 4>(a, s, t) r = Relu(n) h = Conv(r, w2) " + TAIL,
            opset=21,
        ),
        **{"w1": (8, 3, 1, 1), "b1": (8,), "s": (8,), "t": (8,), "w2": (6, 8, 1, 1), "head": (5, 6), "bias": (5,)},
    ),
    "group norm as a reshape and an instance norm": image(
        "a = Conv(x, w1, b1) c = Reshape(a, groups) n = InstanceNormalization(c, ones, zeros) d = Reshape(n, back)"
        " e = Mul(d, s) f = Add(e, t) r = Relu(f) h = Conv(r, w2)",
        6,
        w1=(8, 3, 1, 1),
        b1=(8,),
        groups=ints(0, 4, -1),
        ones=np.ones(4, np.float32),
        zeros=np.zeros(4, np.float32),
        back=ints(2, 8, 6, 6),
        s=(8, 1, 1),
        t=(8, 1, 1),
        w2=(6, 8, 1, 1),
    ),
    "quantized weights, per channel": image(
        "w = DequantizeLinear<axis = 0>(q1, s1, z1) a = Conv(x, w, b1) r = Relu(a) aq = QuantizeLinear(r, s, z)"
        " ad = DequantizeLinear(aq, s, z) u = DequantizeLinear(q2, s2, z2) h = Conv(ad, u)",
        6,
        q1=np.random.default_rng(3).integers(-90, 90, (8, 3, 1, 1)).astype(np.int8),
        s1=np.linspace(0.01, 0.02, 8).astype(np.float32),
        z1=np.zeros(8, np.int8),
        b1=(8,),
        s=np.array(0.05, np.float32),
        z=np.array(3, np.uint8),
        q2=np.random.default_rng(4).integers(40, 220, (6, 8, 1, 1)).astype(np.uint8),
        s2=np.array(0.02, np.float32),
        z2=np.array(128, np.uint8),
    ),
    "dynamically quantized": build(
        text(
            "a = MatMul(x, w1) r = Relu(a) q, s, z = DynamicQuantizeLinear(r) m = MatMulInteger(q, w2, z, z2)"
            " c = Cast<to = 1>(m) y = Mul(c, s)",
            "float[2, 4] x",
        ),
        w1=(4, 16),
        w2=np.random.default_rng(5).integers(-90, 90, (16, 5)).astype(np.int8),
        z2=np.array(0, np.int8),
    ),
    "tied weights": build(
        text(
            "a = MatMul(x, w) r = Relu(a) b = MatMul(r, u) s = Relu(b) t = Transpose<perm = [1, 0]>(u) c = MatMul(s, t)"
            " d = Add(c, shift) y = MatMul(d, head)",
            "float[2, 4] x",
        ),
        w=(4, 12),
        u=(12, 10),
        shift=(12,),
        head=(12, 5),
    ),
    "einsum": build(
        text(
            'q = Einsum<equation = "blc,chd->blhd">(x, wq) k = Einsum<equation = "blc,chd->blhd">(x, wk)'
            ' s = Einsum<equation = "blhd,bmhd->bhlm">(q, k) p = Softmax<axis = -1>(s)'
            ' v = Einsum<equation = "blc,chd->blhd">(x, wv) o = Einsum<equation = "bhlm,bmhd->blhd">(p, v)'
            ' y = Einsum<equation = "blhd,hdc->blc">(o, wo)',
            "float[2, 5, 8] x",
            "float[2, 5, 8] y",
        ),
        **{"wq": (8, 4, 3), "wk": (8, 4, 3), "wv": (8, 4, 3), "wo": (4, 3, 8)},
    ),
    "padding by a number": image(
        "a = Conv(x, w1) p = Pad(a, pads, one) s = ReduceSum(p, axis) m = Mul(s, k) h = Conv(m, w2)",
        6,
        w1=(8, 3, 1, 1),
        pads=ints(0, 0, 1, 1, 0, 0, 1, 1),
        one=np.array(1, np.float32),
        axis=ints(1),
        k=(7, 1, 1),
        w2=(6, 7, 1, 1),
    ),
    "padding of quantized images": image(
        "a = Conv(x, w1) q = QuantizeLinear(a, s, z) p = Pad(q, pads) d = DequantizeLinear(p, s, z)"
        " e = ReduceSum(d, axis) m = Mul(e, k) h = Conv(m, w2)",
        6,
        w1=(8, 3, 1, 1),
        s=np.array(0.05, np.float32),
        z=np.array(128, np.uint8),
        pads=ints(0, 0, 1, 1, 0, 0, 1, 1),
        axis=ints(1),
        k=(7, 1, 1),
        w2=(6, 7, 1, 1),
    ),
    "resizing beyond the image": image(
        'a = Conv(x, w1) p = Resize<mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize",'
        " extrapolation_value = 2.0>(a, roi, , sizes) s = ReduceSum(p, axis) m = Mul(s, k) h = Conv(m, w2)",
        6,
        w1=(8, 3, 1, 1),
        roi=np.array([0, 0, -0.5, -0.5, 1, 1, 1.5, 1.5], np.float32),
        sizes=ints(2, 8, 7, 7),
        axis=ints(1),
        k=(7, 1, 1),
        w2=(6, 7, 1, 1),
    ),
    "quantized weights with zero points of their own": image(
        "w = DequantizeLinear<axis = 0>(q1, s1, z1) a = Conv(x, w) r = Relu(a) h = Conv(r, w2)",
        6,
        q1=np.random.default_rng(7).integers(0, 255, (8, 3, 1, 1)).astype(np.uint8),
        s1=np.linspace(0.01, 0.02, 8).astype(np.float32),
        z1=np.arange(100, 108).astype(np.uint8),
        w2=(6, 8, 1, 1),
    ),
    "dynamically quantized, with zero points of their own": build(
        text(
            "a = MatMul(x, w1) r = Relu(a) q, s, z = DynamicQuantizeLinear(r) m = MatMulInteger(q, w2, z, z2)"
            " c = Cast<to = 1>(m) d = Mul(c, s) f = Relu(d) y = MatMul(f, w3)",
            "float[2, 4] x",
        ),
        w1=(4, 16),
        w2=np.random.default_rng(5).integers(-90, 90, (16, 12)).astype(np.int8),
        z2=np.arange(-6, 6).astype(np.int8),
        w3=(12, 5),
    ),
    "quantized entries as numbers": build(
        text(
            "a = MatMul(x, w1) q = QuantizeLinear(a, s, z) c = Cast<to = 1>(q) e = ReduceSum(c, axis) m = Mul(e, k)"
            " b = MatMul(m, w2) r = Relu(b) y = MatMul(r, w3)",
            "float[2, 4] x",
        ),
        w1=(4, 16),
        s=np.array(0.05, np.float32),
        z=np.array(128, np.uint8),
        axis=ints(1),
        k=np.full((1, 7), 0.01, np.float32),
        w2=(7, 12),
        w3=(12, 5),
    ),
    "weights divided by their norm": build(
        text(
            "n = ReduceL2(v, axis) d = Div(v, n) w = Mul(d, g) a = MatMul(x, w) r = Relu(a) y = MatMul(r, w2)",
            "float[2, 4] x",
        ),
        v=(4, 12),
        axis=ints(0),
        g=(1, 12),
        w2=(12, 5),
    ),
    "a part of the channels without weights of its own": image(
        "a = Conv(x, w1) p, q = Split<axis = 1>(a, sizes) b = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(q)"
        " c = Concat<axis = 1>(p, b) h = Conv(c, w2)",
        6,
        w1=(8, 3, 1, 1),
        sizes=ints(6, 2),
        w2=(6, 8, 1, 1),
    ),
    "initializers that are inputs, too": build(
        text("a = MatMul(x, w) r = Tanh(a) y = MatMul(r, w2)", "float[2, 4] x, float[4, 12] w, float[12, 5] w2"),
        w=(4, 12),
        w2=(12, 5),
    ),
}

ROWS = {"x": X["x"].reshape(-1)[:8].reshape(2, 4)}
FEEDS = {
    "dynamically quantized": ROWS,
    "dynamically quantized, with zero points of their own": ROWS,
    "quantized entries as numbers": ROWS,
    "weights divided by their norm": ROWS,
    "initializers that are inputs, too": ROWS,
    "tied weights": ROWS,
    "einsum": {"x": X["x"].reshape(-1)[:80].reshape(2, 5, 8)},
}
