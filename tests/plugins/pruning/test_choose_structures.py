"""The structures to remove are chosen so that convolutions keep whole vectors of channels."""

import numpy as np
import onnx
import pytest

from onnxtrain.editing.working import Working
from onnxtrain.plugins.pruning.choose_structures import first_reaching, in_vectors, removal_order
from onnxtrain.plugins.pruning.structures import without
from onnxtrain.plugins.structures.axes import find_structures
from sentences import raises_sentence


def network(*widths):
    """Convolutions of these widths, with a classifier behind them."""
    rng = np.random.default_rng(0)
    arrays, nodes, before = {}, [], 3
    for number, width in enumerate(widths):
        arrays[f"w{number}"] = rng.normal(size=(width, before, 3, 3))
        nodes += [f"c{number} = Conv<pads = [1, 1, 1, 1]>(x{number}, w{number}) x{number + 1} = Relu(c{number})"]
        before = width
    arrays["head"] = rng.normal(size=(5, before))
    nodes += [f"g = GlobalAveragePool(x{len(widths)}) f = Flatten(g) y = Gemm<transB = 1>(f, head)"]
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> m (float[n, 3, 6, 6] x0) => (float[n, 5] y) {{ {" ".join(nodes)} }}'
    )
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()
    )
    return model


def widths(model):
    return [tensor.dims[0] for tensor in model.graph.initializer if tensor.name.startswith("w")]


def removal(model, fraction):
    structures = find_structures(Working(model).model)
    order = removal_order(structures, ["channels"])
    return first_reaching(order, structures, structures.size, (1 - fraction) * structures.size())


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.7])
def test_channels_stay_in_whole_vectors(fraction):
    """Multiples of 16, or of 4 where a layer has less than 32 channels."""
    model = network(64, 48, 20, 96)
    small = without(model, removal(model, fraction))
    left = widths(small)
    assert [width % multiple for width, multiple in zip(left, (16, 16, 4, 16), strict=True)] == [0, 0, 0, 0]
    sizes = [sum(np.prod(tensor.dims) for tensor in of.graph.initializer) for of in (small, model)]
    assert sizes[0] <= (1 - fraction) * sizes[1]


def test_the_most_important_channels_are_those_that_stay():
    structures = find_structures(Working(network(64)).model)
    order = removal_order(structures, ["channels"])
    assert in_vectors(structures, order[:20]) == order[:16]
    assert in_vectors(structures, order[:15]) == []
    assert in_vectors(structures, order[:32]) == order[:32]


def test_a_layer_of_another_width_keeps_what_fits_no_vector():
    """45 of 47 channels are no multiple, and 48 do not exist."""
    structures = find_structures(Working(network(47)).model)
    order = removal_order(structures, ["channels"])
    assert in_vectors(structures, order[:2]) == order[:2]
    assert in_vectors(structures, order[:17]) == order[:15]


def test_a_target_that_whole_vectors_miss_is_reached_without_them():
    model = network(64)
    left = widths(without(model, removal(model, 0.85)))
    assert left[0] < 16


def test_a_target_that_cannot_be_reached():
    with raises_sentence("structure_target_out_of_reach", cost="11%"):
        removal(network(64), 0.95)
