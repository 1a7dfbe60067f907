"""shrink removes what masks, or the zeros of a file, cover entirely."""

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.errors import OptionError
from sentences import raises_sentence, warns_sentence

X = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)


def arrays(model):
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def run(model):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: X})[0]


def with_zeros(indices, *, bias=True):
    """A network of which some hidden units are zero."""
    model = onnxtrain.examples.mlp((4, 8, 3))
    rng = np.random.default_rng(1)
    for tensor in model.graph.initializer:
        array = rng.normal(size=tensor.dims).astype(np.float32)
        if tensor.name == "layer1.weight":
            array[indices] = 0
        if tensor.name == "layer1.bias" and bias:
            array[indices] = 0
        if tensor.name == "layer2.weight":
            array[:, indices] = 0
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


def test_zeros_of_the_file_go_and_the_outputs_stay():
    model = with_zeros([1, 4, 6])
    small = onnxtrain.shrink(model)
    assert arrays(small)["layer1.weight"].shape == (5, 4)
    assert arrays(small)["layer2.weight"].shape == (3, 5)
    np.testing.assert_allclose(run(small), run(model), atol=1e-6)


def test_a_unit_with_a_bias_stays():
    with raises_sentence("no_structure_to_remove", kept="zero"):
        onnxtrain.shrink(with_zeros([1, 4], bias=False))


def test_masks_choose_units():
    model = with_zeros([])
    mask = np.ones((8, 4), bool)
    mask[:3] = False
    small = onnxtrain.shrink(model, {"layer1.weight": mask})
    np.testing.assert_array_equal(arrays(small)["layer1.weight"], arrays(model)["layer1.weight"][3:])
    np.testing.assert_array_equal(arrays(small)["layer1.bias"], arrays(model)["layer1.bias"][3:])
    other = {"layer1.weight": mask, "layer2.weight": np.ones((3, 8), bool)}
    with pytest.raises(OptionError, match="No structure can be removed"):
        onnxtrain.shrink(model, other)


def test_outputs_change_only_on_request():
    model = with_zeros([])
    mask = np.ones((3, 8), bool)
    mask[1] = False
    with raises_sentence("masked_structure_stays", reason="is an output of the model, whose shape"):
        onnxtrain.shrink(model, {"layer2.weight": mask})
    small = onnxtrain.shrink(model, {"layer2.weight": mask}, change_outputs=True)
    np.testing.assert_allclose(run(small), run(model)[:, [0, 2]], atol=1e-6)


def test_zeros_of_a_vector_that_two_layers_share():
    """The mask of the stored vector counts for both, and the file shares it again."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[n, 4] x) => (float[n, 3] y)'
        " { a = MatMul(x, w1) b = Add(a, v) c = Relu(b) d = MatMul(c, w2) e = Add(d, v) f = Relu(e) y = MatMul(f, w3) }"
    )
    rng = np.random.default_rng(2)
    given = {name: rng.normal(size=shape) for name, shape in {"w1": (4, 8), "w2": (8, 8), "w3": (8, 3), "v": 8}.items()}
    gone = [1, 4]
    given["w1"][:, gone] = given["w2"][gone] = given["v"][gone] = 0
    given["w2"][:, gone] = given["w3"][gone] = 0
    for name, array in given.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    small = onnxtrain.shrink(model)
    assert {name: array.shape for name, array in arrays(small).items()} == {
        "w1": (4, 6),
        "w2": (6, 6),
        "w3": (6, 3),
        "v": (6,),
    }
    np.testing.assert_allclose(run(small), run(model), atol=1e-6)


def test_a_whole_layer_is_refused():
    with raises_sentence("nothing_would_remain", what="layer1.weight", got=0):
        onnxtrain.shrink(with_zeros([]), {"layer1.weight": np.zeros((8, 4), bool)})


def test_masked_inputs_stay_with_a_warning():
    mask = np.ones((8, 4), bool)
    mask[0], mask[:, 2] = False, False
    with warns_sentence("masked_structures_stay", count=1, name="'input'"):
        small = onnxtrain.shrink(with_zeros([]), {"layer1.weight": mask})
    assert arrays(small)["layer1.weight"].shape == (7, 4)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([np.ones(3, bool)], "masks is a list; it needs a mapping"),
        ({"nothing": np.ones(3, bool)}, "There is a mask for 'nothing', which is not an initializer of the model"),
        (
            {"layer1.bias": np.ones(3, bool)},
            r"The mask of 'layer1.bias' is bool of shape \(3,\); it needs to be bool of",
        ),
        ({"layer1.bias": np.ones(8)}, r"The mask of 'layer1.bias' is float64 of shape \(8,\)"),
    ],
)
def test_masks_that_fit_nothing(masks, message):
    with pytest.raises(OptionError, match=message):
        onnxtrain.shrink(with_zeros([]), masks)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(with_zeros([1, 4, 6]), "model.onnx")
    assert main(["shrink", "model.onnx", "-o", "small.onnx"]) == 0
    assert arrays(onnx.load("small.onnx"))["layer1.weight"].shape == (5, 4)
    assert "written" in capsys.readouterr().out
    onnx.save(onnxtrain.examples.mlp((4, 8, 3)), "dense.onnx")
    assert main(["shrink", "dense.onnx", "-o", "none.onnx"]) == 2
    assert "No structure can be removed" in capsys.readouterr().err


def test_zeros_of_quantized_weights_are_their_own_zero_points():
    quantized = np.array([[7, 7, 7, 7], [9, 9, 9, 9], [7, 1, 2, 3], [4, 5, 6, 8]], np.uint8)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> f (float[n, 4] x) => (float[n, 3] y)'
        " { w = DequantizeLinear<axis = 0>(q, scale, zero) t = Transpose(w) h = MatMul(x, t) r = Relu(h)"
        " y = MatMul(r, head) }"
    )
    head = np.random.default_rng(2).normal(size=(4, 3)).astype(np.float32)
    head[:2] = 0
    scale, zero = np.full(4, 0.1, np.float32), np.array([9, 9, 7, 5], np.uint8)
    for name, array in {"q": quantized, "scale": scale, "zero": zero, "head": head}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    small = onnxtrain.shrink(model)
    assert arrays(small)["q"].tolist() == quantized[[0, 2, 3]].tolist()  # the row of 7s has the zero point 9
    np.testing.assert_allclose(run(small), run(model), atol=1e-6)
