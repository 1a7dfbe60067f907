"""Convolutions: dimensions, strides, dilations, paddings; channel counts that select every form.

Groups and output_shape are checked against PyTorch in test_conv_torch.py: ONNX's reference evaluator has
transposed convolutions of groups of one channel only, and ignores the padding that output_shape implies.
"""

from collections.abc import Iterator

import numpy as np
from onnx import helper, numpy_helper

from autodiff.case import Case, case, normal


def convolution(label: str, x: tuple[int, ...], w: tuple[int, ...], **options) -> Iterator[Case]:
    """Give the weights a static shape, as exporters do, beside inputs of any size."""
    return _cases("Conv", label, x, w, w[0], options)


def transposed(label: str, x: tuple[int, ...], w: tuple[int, ...], **options) -> Iterator[Case]:
    return _cases("ConvTranspose", label, x, w, w[1] * options.get("group", 1), options)


def _cases(operator: str, label: str, x: tuple, w: tuple, outputs: int, options: dict) -> Iterator[Case]:
    inputs = [normal(*x), normal(*w, seed=1), *([normal(outputs, seed=2)] if options.pop("bias", 0) else [])]
    options = {"kernel_shape": list(w[2:]), **options}
    yield case(operator, *inputs, label=label, shapes=("static",), **options)
    yield with_known_weights(case(operator, *inputs, label=f"{label}-weights-known", **options))


def with_known_weights(plain: Case) -> Case:
    """Give the weights a static shape beside inputs of unknown rank."""
    given = plain.node
    shape = numpy_helper.from_array(np.asarray(plain.inputs[1].shape), "shape")
    reshape = helper.make_node("Reshape", ["b", "shape"], ["weights"])
    node = helper.make_node(given.op_type, ["a", "weights", *given.input[2:]], ["y0"])
    node.attribute.extend(given.attribute)
    names = "abc"[: len(plain.inputs)]
    infos = [helper.make_tensor_value_info(name, 11, a.shape) for name, a in zip(names, plain.inputs, strict=True)]
    output = helper.make_tensor_value_info("y0", 11, None)
    graph = helper.make_graph([reshape, node], "weights", infos, [output], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", plain.opset)], ir_version=10)
    return Case(plain.name, model, plain.inputs, plain.opset, shapes=("dynamic", "unknown"))


CASES = [
    *convolution("columns", (2, 3, 5, 4), (2, 3, 3, 2), bias=True),
    *convolution("columns-pads", (2, 2, 4, 5), (3, 2, 3, 3), pads=[1, 0, 2, 1]),
    *convolution("one-channel", (2, 1, 4, 4), (2, 1, 2, 3), pads=[0, 1, 1, 1], strides=[2, 1]),
    *convolution("strides", (1, 2, 6, 7), (2, 2, 3, 3), strides=[2, 3], pads=[1, 1, 1, 1]),
    *convolution("remainder", (2, 2, 8, 6), (2, 2, 2, 2), strides=[3, 5]),
    *convolution("dilations", (2, 2, 7, 6), (2, 2, 3, 2), dilations=[2, 3], pads=[1, 2, 0, 1]),
    *convolution("dilations-strides", (1, 2, 9, 8), (2, 2, 3, 2), dilations=[2, 3], strides=[2, 2]),
    *convolution("per-position", (2, 9, 4, 5), (3, 9, 3, 2), pads=[1, 1, 1, 0], strides=[2, 1]),
    *convolution("per-position-dilations", (1, 9, 6, 5), (2, 9, 2, 2), dilations=[3, 2], strides=[1, 2]),
    *convolution("flipped", (1, 2, 29, 28), (16, 2, 2, 3), pads=[0, 1, 0, 1], bias=True),
    *convolution("wide-pads", (1, 1, 3, 3), (2, 1, 2, 2), pads=[2, 3, 2, 2]),
    *convolution("wide-pads-stride", (1, 2, 3, 4), (2, 2, 2, 1), pads=[3, 0, 2, 2], strides=[2, 3]),
    *convolution("as-convolution", (2, 2, 7, 7), (2, 2, 5, 5), pads=[2, 2, 2, 2]),
    *convolution("as-convolution-strides", (2, 3, 10, 9), (2, 3, 5, 5), pads=[2, 1, 2, 0], strides=[2, 3]),
    *convolution("patches", (2, 2, 6, 9), (3, 2, 2, 3), strides=[2, 3], bias=True),
    *convolution("patches-remainder", (2, 2, 5, 7), (3, 2, 2, 3), strides=[2, 3]),
    *convolution("1x1", (2, 3, 4, 3), (2, 3, 1, 1), bias=True),
    *convolution("1x1-strides", (2, 3, 4, 5), (2, 3, 1, 1), strides=[2, 2]),
    *convolution("1x1-pads", (2, 2, 2, 3), (2, 2, 1, 1), pads=[1, 0, 0, 1]),
    *convolution("depthwise", (2, 3, 17, 17), (3, 1, 3, 2), group=3, pads=[1, 1, 1, 0], bias=True),
    *convolution("depthwise-small", (2, 3, 4, 5), (3, 1, 3, 2), group=3, pads=[1, 1, 1, 0]),
    *convolution("depthwise-strides", (2, 3, 6, 5), (3, 1, 3, 3), group=3, pads=[1, 1, 1, 1], strides=[2, 2]),
    *convolution("depthwise-5x5", (2, 2, 6, 6), (2, 1, 5, 5), group=2, pads=[2, 2, 2, 2], strides=[1, 2]),
    *convolution("depthwise-1x1", (2, 3, 3, 2), (3, 1, 1, 1), group=3),
    *convolution("1d", (2, 3, 7), (2, 3, 3), pads=[1, 2], strides=[2], bias=True),
    *convolution("1d-dilated", (2, 9, 9), (2, 9, 3), dilations=[3], pads=[6, 0]),
    *convolution("3d", (1, 2, 4, 3, 4), (2, 2, 2, 2, 3), pads=[0, 1, 1, 1, 0, 1], strides=[2, 1, 1]),
    *convolution("same-upper", (1, 2, 5, 6), (2, 2, 2, 4), auto_pad="SAME_UPPER"),
    *convolution("same-lower", (1, 2, 5, 6), (2, 2, 2, 4), auto_pad="SAME_LOWER"),
    *convolution("same-upper-strides", (1, 2, 5, 7), (2, 2, 4, 3), auto_pad="SAME_UPPER", strides=[2, 3]),
    *convolution("same-lower-strides", (1, 2, 6, 7), (2, 2, 3, 4), auto_pad="SAME_LOWER", strides=[3, 2]),
    *convolution("same-wide-strides", (1, 2, 6, 7), (2, 2, 2, 2), auto_pad="SAME_UPPER", strides=[3, 4]),
    *convolution("valid", (1, 2, 5, 6), (2, 2, 2, 4), auto_pad="VALID", strides=[2, 1]),
    case("Conv", normal(2, 2, 5, 4), normal(3, 2, 2, 3, seed=1), label="22", opset=22, pads=[1, 1, 0, 0]),
    # Weights of which only the rank is known, and where not even that is, attributes that tell it.
    case("Conv", normal(2, 2, 5, 4), normal(3, 2, 2, 3, seed=1), label="bare", shapes=("static", "dynamic")),
    *[
        case("Conv", normal(1, 2, 5, 7), normal(2, 2, 4, 3, seed=1), label=f"weights-unknown-{mode}", **options)
        for mode, options in {
            "pads": {"pads": [1, 0, 2, 1]},
            "strides": {"strides": [2, 3], "pads": [0, 1, 1, 0]},
            "dilations": {"dilations": [1, 2]},
            "same": {"auto_pad": "SAME_UPPER", "strides": [2, 3]},
            "same-lower": {"auto_pad": "SAME_LOWER", "strides": [1, 2]},
        }.items()
    ],
    case("ConvTranspose", normal(1, 2, 3, 4), normal(2, 2, 3, 4, seed=1), label="weights-unknown", strides=[2, 2]),
    case(
        "ConvTranspose",
        normal(1, 2, 3, 4),
        normal(2, 2, 3, 4, seed=1),
        label="weights-unknown-same",
        strides=[2, 2],
        auto_pad="SAME_UPPER",
    ),
    *transposed("plain", (2, 3, 3, 2), (3, 2, 2, 3), bias=True),
    *transposed("strides", (2, 2, 3, 2), (2, 3, 2, 3), strides=[2, 3], pads=[1, 0, 0, 1]),
    *transposed("patches", (2, 3, 3, 2), (3, 2, 2, 2), strides=[2, 2], bias=True),
    *transposed("output-padding", (1, 2, 3, 2), (2, 2, 3, 3), strides=[2, 3], output_padding=[1, 2]),
    *transposed(
        "output-padding-pads", (1, 2, 3, 2), (2, 2, 3, 3), strides=[2, 3], output_padding=[1, 1], pads=[1, 1, 2, 0]
    ),
    *transposed("dilations", (1, 2, 3, 4), (2, 2, 3, 2), dilations=[2, 3], strides=[2, 1]),
    *transposed("depthwise", (2, 3, 3, 2), (3, 1, 3, 2), group=3, strides=[2, 1], pads=[1, 0, 1, 0]),
    *transposed("many-channels", (1, 2, 3, 3), (2, 9, 2, 2), strides=[2, 2]),
    *transposed("1d", (2, 2, 5), (2, 2, 4), strides=[2], pads=[1, 1]),
    *transposed("3d", (1, 2, 2, 3, 2), (2, 2, 2, 2, 3), strides=[2, 1, 2]),
    *transposed("same-upper", (1, 2, 3, 4), (2, 2, 3, 4), strides=[2, 2], auto_pad="SAME_UPPER"),
    *transposed("same-lower", (1, 2, 3, 4), (2, 2, 4, 3), strides=[2, 2], auto_pad="SAME_LOWER"),
    *transposed("valid", (1, 2, 3, 4), (2, 2, 4, 3), strides=[2, 2], auto_pad="VALID"),
    *transposed("1x1", (2, 3, 3, 4), (3, 2, 1, 1)),
]
