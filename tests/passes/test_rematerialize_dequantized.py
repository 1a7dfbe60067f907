"""Frozen low-bit weights are in float only while a node reads them, and never all at once."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.runtime.options import RuntimeOptions

SIZE = 160  # enough elements to be dequantized at each use


def model(kind, layers=3):
    """Return matmuls with frozen weights, dequantized or cast at the beginning; and a head.

    The kernel of MatMul would read float16 itself.
    """
    random = np.random.default_rng(0)
    product = "MatMul" if kind == "int8" else 'Einsum<equation="...i,ij->...j">'
    first, then, weights = [], [], []
    for index in range(layers):
        array = random.integers(-127, 128, (SIZE, SIZE))
        if kind == "int8":
            first.append(f"w{index} = DequantizeLinear(q{index}, scale)")
            weights.append(numpy_helper.from_array(array.astype(np.int8), f"q{index}"))
        else:
            first.append(f"w{index} = Cast<to=1>(q{index})")
            weights.append(numpy_helper.from_array((array / 1270).astype(np.float16), f"q{index}"))
        then.append(f"m{index} = {product}(x{index}, w{index}) x{index + 1} = Tanh(m{index})")
    made = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n,{SIZE}] x) => (float[n,2] y) <float scale = {{0.001}}> {{
        {" ".join(first)} x0 = Mul(x, gain) {" ".join(then)} y = MatMul(x{layers}, head) }}""")
    weights.append(numpy_helper.from_array(np.ones(SIZE, np.float32), "gain"))
    weights.append(numpy_helper.from_array(random.standard_normal((SIZE, 2)).astype(np.float32), "head"))
    made.graph.initializer.extend(weights)
    return made


@pytest.mark.parametrize("kind", ["int8", "float16"])
def test_each_reader_has_its_own_node_that_waits_for_the_others(kind):
    learner = onnxtrain.Trainer(model(kind), loss="mean_squared_error", train="gain")
    graph = learner.executor.session._steps[0].step.model.graph
    nodes = list(graph)
    unpacking = [node for node in nodes if node.outputs[0].name.partition("/")[0] in ("w0", "w1", "w2")]
    assert {node.op_type for node in unpacking} == {"DequantizeLinear" if kind == "int8" else "Cast"}
    assert len(unpacking) == 6  # forward, and for the gradient of the other operand
    for node in unpacking:
        ((reader, _),) = node.outputs[0].uses()
        assert nodes.index(reader) - nodes.index(node) == 1
        if kind == "int8":
            scale, nothing = node.inputs[1].producer().inputs
            assert scale.name == "scale"
            nothing = nothing.producer().inputs[0]
        else:
            view = node.inputs[0].producer()
            assert view.op_type == "Reshape"
            assert view.inputs[0].name[0] == "q"
            _, nothing = view.inputs[1].producer().inputs
        size = nothing.producer().inputs[0].producer()
        assert size.op_type == "Size"
        assert size.inputs[0] in reader.inputs


@pytest.mark.parametrize("kind", ["int8", "float16"])
def test_the_numbers_are_those_of_the_standard_operators(kind):
    random = np.random.default_rng(1)
    x, y = random.standard_normal((4, SIZE)).astype(np.float32), random.standard_normal((4, 2)).astype(np.float32)
    losses = []
    for kernels in (True, False):
        learner = onnxtrain.Trainer(
            model(kind),
            loss="mean_squared_error",
            train="gain",
            optimizer=onnxtrain.SGD(0.1),
            runtime=RuntimeOptions(kernels=kernels),
        )
        losses.append([learner.train_step(x, y) for _ in range(4)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
