"""Adapter files: loading by ONNX Runtime, reading PEFT folders, and errors for adapters that do not fit."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

import onnxtrain
from onnxtrain import Lora
from onnxtrain.adapters import adaptable_layers, add_slots, convert_adapter, merge_adapter
from onnxtrain.adapters.adapter import Adapter, Entry
from onnxtrain.adapters.files import read_adapter, write_file
from onnxtrain.errors import ModelError
from sentences import raises_sentence
from zoo.decoder import batch, decoder, parsed

Q = "model.layers.0.self_attn.q_proj"


def trained(model, steps=3, **settings):
    lora = Lora(**{"rank": 3, "alpha": 6, "targets": "*.{q,v}_proj", **settings})
    learner = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.AdamW(1e-2), lora=lora)
    for _ in range(steps):
        learner.train_step(*batch())
    return learner


def session(model):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of every initializer that is an input, too
    return onnxruntime.InferenceSession(
        model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model), options
    )


def run(opened, x, *adapters):
    options = onnxruntime.RunOptions()
    loaded = [onnxruntime.LoraAdapter() for _ in adapters]
    for adapter, path in zip(loaded, adapters, strict=True):
        adapter.Load(str(path))
        options.add_active_adapter(adapter)
    return opened.run(None, {"input_ids": x}, options)[0]


@pytest.mark.parametrize(
    "settings",
    [{}, {"dora": True}, {"packed": True}, {"packed": True, "dora": True}, {"targets": ["embed_tokens", "down_proj"]}],
)
def test_onnxruntime_runs_adapters_in_slots(settings, tmp_path):
    settings = dict(settings)
    model, (x, _) = decoder(packed=settings.pop("packed", False)), batch()
    learner = trained(model, **settings)
    learner.save(tmp_path / "tuned.onnx_adapter")
    names = add_slots(model, tmp_path / "slots.onnx", adapter=tmp_path / "tuned.onnx_adapter")
    assert len(names) == len(read_adapter(tmp_path / "tuned.onnx_adapter").entries)
    opened = session(tmp_path / "slots.onnx")
    base = session(model).run(None, {"input_ids": x})[0]
    assert run(opened, x).tobytes() == base.tobytes()
    adapted = run(opened, x, tmp_path / "tuned.onnx_adapter")
    np.testing.assert_allclose(adapted, learner.predict(x), atol=1e-5)
    assert np.abs(adapted - base).max() > 0.01
    assert run(opened, x).tobytes() == base.tobytes()


def tied(weight, *names):
    """A head with the embedding's weight [8, 11], which has a name; the nodes have names, too."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        f (int64[N, T] input_ids, float[8, 11] w) => (float[N, T, 11] logits) {
            t = Transpose <perm = [1, 0]> (w)  e = Gather(t, input_ids)  h = Tanh(e)  logits = MatMul(h, w) }""")
    del model.graph.input[1]
    array = np.random.default_rng(0).standard_normal((8, 11)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(array, weight))
    for node, name in zip(model.graph.node, names or [""] * 4, strict=True):
        node.name = name
        node.input[:] = [weight if each == "w" else each for each in node.input]
    return model


TIED = {
    "of genai's builder": tied(
        "lm_head.MatMul.weight",
        "/model/embed_tokens/Transpose",
        "/model/embed_tokens/Gather",
        "/model/Tanh",
        "/lm_head/MatMul",
    ),
    "nodes without names": tied("wte.weight"),
}
"""Models whose head and embedding share a weight."""


@pytest.mark.parametrize("kind", TIED)
def test_adapters_of_an_embedding_and_its_tied_head(kind, tmp_path):
    names = {"of genai's builder": {"model.embed_tokens", "lm_head"}, "nodes without names": {"wte", "wte.2"}}[kind]
    model, ids = TIED[kind], np.arange(22).reshape(2, 11) % 11
    lora = Lora(rank=2, alpha=4, targets="*")
    learner = onnxtrain.Trainer(model, loss="next_token", optimizer="adam(lr=0.05)", lora=lora)
    for _ in range(3):
        learner.train_step({"input_ids": ids, "labels": ids})
    expected = learner.predict(ids)
    path = tmp_path / "tuned.onnx_adapter"
    learner.save(path)
    entries = read_adapter(path).entries
    assert set(entries) == names
    assert entries[min(names)].inputs == (11 if min(names) == "wte" else 8)
    add_slots(model, tmp_path / "slots.onnx", adapter=path)
    np.testing.assert_allclose(run(session(tmp_path / "slots.onnx"), ids, path), expected, atol=1e-5)
    again = onnxtrain.Trainer(model, loss="next_token", lora=Lora(adapter=path))
    np.testing.assert_allclose(again.predict(ids), expected, atol=1e-6)
    convert_adapter(model, path, tmp_path / "folder")
    convert_adapter(model, tmp_path / "folder", tmp_path / "back.onnx_adapter")
    again = onnxtrain.Trainer(model, loss="next_token", lora=Lora(adapter=tmp_path / "back.onnx_adapter"))
    np.testing.assert_allclose(again.predict(ids), expected, atol=1e-6)


def test_the_head_behind_a_soft_cap_is_the_output_layer():
    """As in Gemma 2, where it is tied to the embedding; the name of one layer is not a target for the other."""
    model = TIED["of genai's builder"]
    capped = onnx.ModelProto.FromString(model.SerializeToString())
    mix = np.eye(8, dtype=np.float32)
    capped.graph.initializer.append(numpy_helper.from_array(mix, "mix"))
    nodes = list(capped.graph.node)
    nodes[2].CopyFrom(onnx.helper.make_node("MatMul", ["e", "mix"], ["h"]))
    nodes[3].output[0] = "scores"
    thirty = numpy_helper.from_array(np.array(30, np.float32))
    nodes += [
        onnx.helper.make_node("Constant", [], ["cap"], value=thirty),
        onnx.helper.make_node("Div", ["scores", "cap"], ["small"]),
        onnx.helper.make_node("Tanh", ["small"], ["squashed"]),
        onnx.helper.make_node("Mul", ["squashed", "cap"], ["logits"]),
    ]
    del capped.graph.node[:]
    capped.graph.node.extend(nodes)
    for targets, wanted in (
        ("all-linear", {"mix"}),
        ("lm_head", {"lm_head"}),
        ("embed_tokens", {"model.embed_tokens"}),
    ):
        learner = onnxtrain.Trainer(capped, loss="next_token", lora=Lora(rank=2, targets=targets))
        assert {name.partition(".lora_")[0] for name in learner.parameters} == wanted


def test_dora_trains_beside_a_column_of_zeros(tmp_path):
    """The weights of a padding token are often zeros, and have no direction."""
    model = decoder()
    (weight,) = (each for each in model.graph.initializer if each.name == f"{Q}.weight")
    array = numpy_helper.to_array(weight).copy()
    array[:, 3], array[3] = 0, 0
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    learner = trained(model, dora=True, steps=1)
    assert np.isfinite(learner.train_step(*batch()))
    x, _ = batch()
    expected = learner.predict(x)
    learner.save(tmp_path / "tuned.onnx_adapter")
    learner.save(tmp_path / "merged.onnx")
    add_slots(model, tmp_path / "slots.onnx", adapter=tmp_path / "tuned.onnx_adapter")
    np.testing.assert_allclose(
        run(session(tmp_path / "slots.onnx"), x, tmp_path / "tuned.onnx_adapter"), expected, atol=1e-5
    )
    np.testing.assert_allclose(onnxtrain.predict(tmp_path / "merged.onnx", x), expected, atol=1e-5)


def test_slots_take_adapters_of_any_rank(tmp_path):
    model, (x, _) = decoder(packed=True), batch()
    assert len(add_slots(model, tmp_path / "slots.onnx")) == 8
    opened = session(tmp_path / "slots.onnx")
    for rank, targets in ((1, "*.q_proj"), (5, "*.{k,o}_proj")):
        learner = trained(model, rank=rank, targets=targets)
        learner.save(tmp_path / f"{rank}.onnx_adapter")
        np.testing.assert_allclose(run(opened, x, tmp_path / f"{rank}.onnx_adapter"), learner.predict(x), atol=1e-5)


def test_an_adapter_file_is_as_olive_writes_it(tmp_path):
    learner = trained(decoder())
    learner.save(tmp_path / "tuned.onnx_adapter")
    values = onnxruntime.AdapterFormat.read_adapter(str(tmp_path / "tuned.onnx_adapter")).get_parameters()
    names = {f"model.layers.{i}.self_attn.{p}_proj.lora_{m}.weight" for i in (0, 1) for p in "qv" for m in "AB"}
    assert set(values) == names
    a, b = (values[f"{Q}.lora_{matrix}.weight"].numpy() for matrix in "AB")
    assert (a.shape, b.shape) == ((16, 3), (3, 16))
    np.testing.assert_array_equal(a, learner.parameters[f"{Q}.lora_A.weight"])
    np.testing.assert_array_equal(b, learner.parameters[f"{Q}.lora_B.weight"] * np.float32(2))


def test_a_folder_is_as_peft_writes_it(tmp_path):
    learner = trained(decoder(), dora=True, rslora=True)
    learner.save(tmp_path / "tuned")
    found = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    prefix = f"base_model.model.{Q}"
    assert found[f"{prefix}.lora_A.weight"].shape == (3, 16)
    np.testing.assert_array_equal(found[f"{prefix}.lora_B.weight"].T, learner.parameters[f"{Q}.lora_B.weight"])
    assert found[f"{prefix}.lora_magnitude_vector"].shape == (16,)
    config = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"], config["use_rslora"]) == (3, 6, True, True)
    assert config["target_modules"] == sorted(f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"packed": True}, {"targets": ["embed_tokens", "up_proj"]}])
def test_there_and_back_again(settings, tmp_path):
    settings = dict(settings)
    model, (x, _) = decoder(packed=settings.pop("packed", False)), batch()
    learner = trained(model, **settings)
    expected = learner.predict(x)
    learner.save(tmp_path / "one.onnx_adapter")
    convert_adapter(model, tmp_path / "one.onnx_adapter", tmp_path / "two")
    convert_adapter(model, tmp_path / "two", tmp_path / "three.onnx_adapter")
    for form in ("one.onnx_adapter", "two", "three.onnx_adapter"):
        again = trained(model, steps=0, **{**settings, "adapter": tmp_path / form})
        np.testing.assert_allclose(again.predict(x), expected, atol=1e-5)
        assert again.train_step(*batch()) == pytest.approx(learner.evaluate(batch())["loss"], abs=1e-5)
        merge_adapter(model, tmp_path / form, tmp_path / "merged.onnx")
        np.testing.assert_allclose(run(session(tmp_path / "merged.onnx"), x), expected, atol=1e-5)


def test_what_olive_wrote_goes_on_with_a_scale_of_its_own(tmp_path):
    model, (x, _) = decoder(), batch()
    learner = trained(model)
    learner.save(tmp_path / "tuned.onnx_adapter")
    (tmp_path / "tuned.onnx_adapter.json").unlink()
    again = trained(model, steps=0, adapter=tmp_path / "tuned.onnx_adapter", rank=1, alpha=5)
    np.testing.assert_allclose(again.predict(x), learner.predict(x), atol=1e-5)
    expected = learner.parameters[f"{Q}.lora_B.weight"] * 2 / 5
    np.testing.assert_allclose(again.parameters[f"{Q}.lora_B.weight"], expected, rtol=1e-6)


def test_external_data_goes_with_the_slots(tmp_path):
    model, (x, _) = decoder(), batch()
    base = session(model).run(None, {"input_ids": x})[0]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    onnx.save(model, tmp_path / "a" / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=100)
    before = (tmp_path / "a" / "m.data").read_bytes()
    add_slots(tmp_path / "a" / "m.onnx", tmp_path / "b" / "slots.onnx")
    assert (tmp_path / "b" / "slots.onnx.data").read_bytes() == before == (tmp_path / "a" / "m.data").read_bytes()
    assert run(session(tmp_path / "b" / "slots.onnx"), x).tobytes() == base.tobytes()


def test_the_names_of_generative_models_are_those_of_checkpoints(tmp_path):
    model = parsed("""g (float[n,4] x) => (float[n,4] y)
        <float[4,4] model__layers__0__attn__q_proj__MatMul__weight = {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}>
        { y = MatMul(x, model__layers__0__attn__q_proj__MatMul__weight) }""")
    (layer,) = adaptable_layers(model)
    assert (layer.name, layer.kind, layer.inputs, layer.outputs, layer.bits) == (Q, "MatMul", 4, 4, 32)
    assert layer.weight == "model.layers.0.attn.q_proj.MatMul.weight"
    for target in ("*.q_proj", "model.layers.0.attn.*", "*self_attn*"):
        lora = Lora(rank=2, targets=target)
        found = onnxtrain.Trainer(model, loss="mean_squared_error", lora=lora).parameters
        assert list(found) == [f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"]


def changed(model, name, change):
    """The same model with another initializer."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    tensor = next(tensor for tensor in other.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), name))
    return other


def test_an_adapter_knows_its_model(tmp_path):
    model = decoder()
    learner = trained(model)
    learner.save(tmp_path / "tuned.onnx_adapter")
    learner.save(tmp_path / "tuned")
    other = changed(model, f"{Q}.weight", lambda array: array + 1)
    renamed = onnx.ModelProto()
    renamed.CopyFrom(model)
    renamed.graph.output[0].name = renamed.graph.node[-1].output[0] = "other"
    for path in (tmp_path / "tuned.onnx_adapter", tmp_path / "tuned"):
        merge_adapter(changed(model, "lm_head.weight", lambda array: array + 1), path, tmp_path / "merged.onnx")
        with pytest.raises(ModelError, match=rf"made for another model: the weight '{Q}.weight' differs; give the"):
            merge_adapter(other, path, tmp_path / "merged.onnx")
        with raises_sentence("adapter_of_another_graph", advice="give the model"):
            trained(renamed, adapter=path)
        with pytest.raises(ModelError, match=r"made for another model"):
            add_slots(other, tmp_path / "slots.onnx", adapter=path)


def test_adapters_that_do_not_fit(tmp_path):
    model = decoder()
    trained(model).save(tmp_path / "tuned")
    (tmp_path / "tuned" / "onnxtrain.json").unlink()
    weights = load_file(tmp_path / "tuned" / "adapter_model.safetensors")

    def with_weights(**changes):
        found = {name: array for name, array in {**weights, **changes}.items() if array is not None}
        save_file(found, tmp_path / "tuned" / "adapter_model.safetensors")
        return trained(model, adapter=tmp_path / "tuned", steps=0)

    with_weights()
    name = f"base_model.model.{Q}.lora_A.weight"
    with raises_sentence("adapter_shape", what="model.layers.0.self_attn.q_proj", got=(7, 16), wanted=(16, 16)):
        with_weights(**{name: np.zeros((3, 7), np.float32)})
    with pytest.raises(ModelError, match=r"has no lora_A for 'model\.layers\.0"):
        with_weights(**{name: None})
    with raises_sentence("adapter_without_layer", what=tmp_path / "tuned", got="strange", layers="model"):
        with_weights(**{f"base_model.model.strange.lora_{m}.weight": np.zeros((3, 3), np.float32) for m in "AB"})
    with raises_sentence("full_tensor_missing", name="'classifier.bias'", missing="no initializer for it; export"):
        with_weights(**{"classifier.bias": np.ones(3, np.float32)})
    with raises_sentence("peft_tensor_unknown", what=tmp_path / "tuned", got="x.lora_B.bias"):
        with_weights(**{"x.lora_B.bias": np.zeros(3, np.float32)})


def test_folders_that_are_not_adapters(tmp_path):
    model, folder = decoder(), tmp_path / "folder"
    folder.mkdir()

    def message(config=None):
        if config is not None:
            (folder / "adapter_config.json").write_text(config)
        with pytest.raises(ModelError) as caught:
            merge_adapter(model, folder, tmp_path / "merged.onnx")
        return str(caught.value)

    assert "has no adapter_config.json, so it is not an adapter that PEFT saved" in message()
    assert "cannot be read" in message("{")
    assert "has 'peft_type' = 'IA3'; it needs 'LORA'" in message('{"peft_type": "IA3"}')
    assert "needs numbers for 'r' and 'lora_alpha'" in message('{"peft_type": "LORA"}')
    assert "has no adapter_model.safetensors" in message('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert "adapter_model.safetensors' cannot be read" in message()
    save_file({}, folder / "adapter_model.safetensors")
    assert "has an adapter for no layer" in message()


def test_files_that_are_not_adapters(tmp_path):
    model = decoder()
    with raises_sentence("no_adapter_file", what=tmp_path / "nowhere.onnx_adapter"):
        merge_adapter(model, tmp_path / "nowhere.onnx_adapter", tmp_path / "merged.onnx")
    (tmp_path / "bad.onnx_adapter").write_bytes(b"nothing")
    with raises_sentence("not_an_adapter_file", what=tmp_path / "bad.onnx_adapter"):
        merge_adapter(model, tmp_path / "bad.onnx_adapter", tmp_path / "merged.onnx")
    trained(model).save(tmp_path / "good.onnx_adapter")
    (tmp_path / "good.onnx_adapter.json").write_text("[")
    with raises_sentence("not_a_manifest"):
        merge_adapter(model, tmp_path / "good.onnx_adapter", tmp_path / "merged.onnx")
    with raises_sentence("adapter_output"):
        convert_adapter(model, tmp_path / "good.onnx_adapter", tmp_path / "other.onnx")


def test_tensors_of_other_kinds(tmp_path):
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((2, 2), np.float32))
    for names, message in (
        (["a"], r"has a tensor 'a'; an adapter has pairs that end in '.lora_A.weight' and '.lora_B.weight'"),
        (["a.lora_A.weight"], r"has 'a.lora_A.weight', but no 'a.lora_B.weight'"),
    ):
        adapter = onnxruntime.AdapterFormat()
        adapter.set_parameters(dict.fromkeys(names, value))
        adapter.export_adapter(str(tmp_path / "odd.onnx_adapter"))
        with pytest.raises(ModelError, match=message):
            read_adapter(tmp_path / "odd.onnx_adapter")


def test_a_model_with_slots_takes_no_more(tmp_path):
    add_slots(decoder(), tmp_path / "slots.onnx")
    with raises_sentence("has_slots", what="model.layers.0.self_attn.q_proj.lora_A.weight"):
        add_slots(tmp_path / "slots.onnx", tmp_path / "more.onnx")
    with raises_sentence("has_adapters_or_slots", what="model.layers.0.self_attn.q_proj.lora_A.weight"):
        trained(tmp_path / "slots.onnx", targets="*.{q,v}_proj")
    trained(decoder(packed=True)).save(tmp_path / "tuned.onnx_adapter")
    add_slots(decoder(packed=True), tmp_path / "slots.onnx")
    with raises_sentence(
        "adapter_for_slots", what=tmp_path / "tuned.onnx_adapter", got="model.layers.1.self_attn.v_proj"
    ):
        add_slots(tmp_path / "slots.onnx", tmp_path / "more.onnx", adapter=tmp_path / "tuned.onnx_adapter")


@pytest.mark.parametrize(("kind", "step"), [("BFLOAT16", 2**-8), ("FLOAT16", 2**-11), ("DOUBLE", 0)])
def test_files_have_the_types_of_their_layers(kind, step, tmp_path):
    random = np.random.default_rng(0)
    a, b = random.uniform(-1, 1, (4, 2)).astype(np.float32), random.uniform(-1, 1, (2, 3)).astype(np.float32)
    path, dtype = tmp_path / "tuned.onnx_adapter", ir.DataType[kind]
    write_file(path, Adapter({"layer": Entry(a, b, 2.0)}, 2, 4), {"layer": dtype})
    values = onnxruntime.AdapterFormat.read_adapter(str(path)).get_parameters()
    assert {value.element_type() for value in values.values()} == {int(dtype)}
    found = read_adapter(path).entries["layer"]
    np.testing.assert_allclose(found.a, a, atol=step)
    np.testing.assert_allclose(found.b, b, atol=step)
