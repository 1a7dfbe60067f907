"""Adapters of float16 and bfloat16 weights, which keep their type while computation is in float32."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

import onnxtrain
from adapters.base_files import tuned_beside
from onnxtrain import Lora
from onnxtrain.adapters import add_slots
from onnxtrain.parameters.stored import WidenedTensor
from zoo.decoder import parsed

WORDS, WIDTH, OUTPUTS = 32, 16, 6
KINDS = {"float16": (onnx.TensorProto.FLOAT16, 2**-11), "bfloat16": (onnx.TensorProto.BFLOAT16, 2**-8)}


def base(kind):
    """Rows of a table, through two layers, in a type; the numbers are the same in all."""
    random = np.random.default_rng(0)
    model = parsed(f"""g (int64[n] x) => ({kind}[n,{OUTPUTS}] y) {{
        h = Gather(embed__weight, x) a = MatMul(h, q_proj__weight) b = Tanh(a) y = MatMul(b, v_proj__weight) }}""")
    sizes = {"embed": (WORDS, WIDTH), "q_proj": (WIDTH, WIDTH), "v_proj": (WIDTH, OUTPUTS)}
    dtype = KINDS[kind][0] if kind in KINDS else onnx.TensorProto.FLOAT
    for name, shape in sizes.items():
        array = np.round(random.standard_normal(shape) * 32) / 64  # a number of any of the types
        model.graph.initializer.append(helper.make_tensor(f"{name}.weight", dtype, shape, array.reshape(-1)))
    return model


def data():
    random = np.random.default_rng(5)
    return random.integers(0, WORDS, 8), random.standard_normal((8, OUTPUTS)).astype(np.float32)


def trainer(model, **settings):
    lora = Lora(**{"rank": 3, "alpha": 6, "targets": ["q_proj", "v_proj"], **settings})
    return onnxtrain.Trainer(model, loss="mean_squared_error", optimizer=onnxtrain.SGD(0.1), lora=lora)


@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"targets": ["embed", "q_proj"]}])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_the_same_weights_in_float(kind, settings):
    x, y = data()
    learner, other = trainer(base(kind), **settings), trainer(base("float"), **settings)
    for _ in range(10):
        assert learner.train_step(x, y) == pytest.approx(other.train_step(x, y), rel=1e-5)
    assert set(learner.parameters) == set(other.parameters)
    for name, array in other.parameters.items():
        assert learner.parameters[name].dtype == np.float32
        np.testing.assert_allclose(learner.parameters[name], array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_stays_as_it_is_and_the_adapter_has_its_type(kind, tmp_path):
    x, y = data()
    learner = tuned_beside(base(kind), trainer, (x, y), tmp_path)
    dtype, step = KINDS[kind]
    values = onnxruntime.AdapterFormat.read_adapter(str(tmp_path / "tuned.onnx_adapter")).get_parameters()
    assert {value.element_type() for value in values.values()} == {dtype}
    add_slots(tmp_path / "base.onnx", tmp_path / "slots.onnx", adapter=tmp_path / "tuned.onnx_adapter")
    if kind == "float16":  # ONNX Runtime multiplies no bfloat16 on processors
        loaded, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        loaded.Load(str(tmp_path / "tuned.onnx_adapter"))
        options.add_active_adapter(loaded)
        (got,) = onnxruntime.InferenceSession(tmp_path / "slots.onnx").run(None, {"x": x}, options)
        np.testing.assert_allclose(got.astype(np.float32), learner.predict(x), atol=20 * step)
    resumed = onnxtrain.Trainer(
        tmp_path / "base.onnx", loss="mean_squared_error", lora=Lora(adapter=tmp_path / "tuned.onnx_adapter")
    )
    np.testing.assert_allclose(resumed.predict(x), learner.predict(x), atol=20 * step)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_have_the_type_of_the_file(kind, tmp_path):
    x, y = data()
    learner = trainer(base(kind))
    for _ in range(5):
        learner.train_step(x, y)
    learner.save(tmp_path / "merged.onnx")
    before, after = (
        {one.name: one for one in model.graph.initializer}
        for model in (base(kind), onnx.load(tmp_path / "merged.onnx"))
    )
    assert {one.data_type for one in after.values()} == {KINDS[kind][0]}
    numbers = [
        {name: np.asarray(ir.from_proto(one).numpy()).astype(np.float32) for name, one in some.items()}
        for some in (before, after)
    ]
    np.testing.assert_array_equal(*(some["embed.weight"] for some in numbers))
    for layer in ("q_proj", "v_proj"):
        a, b = (learner.parameters[f"{layer}.lora_{matrix}.weight"] for matrix in "AB")
        was, now = (some[f"{layer}.weight"] for some in numbers)
        assert np.abs(a @ b).max() > 0.01
        np.testing.assert_allclose(now, was + 2 * a @ b, rtol=KINDS[kind][1])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_table_become_single_and_not_the_table(kind):
    graph = trainer(base(kind)).executor.session._steps[0].step.model.graph
    (gather,) = (node for node in graph if node.op_type == "Gather" and node.inputs[0].is_initializer())
    assert gather.inputs[0].name == "embed.weight"
    assert gather.outputs[0].dtype == KINDS[kind][0]
    made = {tuple(value.shape) for node in graph for value in node.outputs if value.shape is not None}
    assert (WORDS, WIDTH) not in made


@pytest.mark.parametrize("kind", KINDS)
def test_no_table_is_widened_to_look_for_sinusoids_in_it(kind, monkeypatch):
    read, read_one = [], WidenedTensor._read

    def note(tensor):
        read.append(tensor.name)
        return read_one(tensor)

    monkeypatch.setattr(WidenedTensor, "_read", note)
    trainer(base(kind)).train_step(*data())
    assert "embed.weight" not in read
