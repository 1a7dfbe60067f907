"""Tensors that are trained in full beside adapters: in every file that claims to hold the training."""

import copy
import json
import pickle

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from safetensors.numpy import load_file

import onnxtrain
from onnxtrain.adapters import add_slots, convert_adapter, describe_adapter, merge_adapter
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.model_file.file import ModelFile
from sentences import raises_sentence
from zoo.decoder import parsed

FORMS = ("tuned.onnx_adapter", "folder")


def data(inputs=6, classes=3, count=60):
    random = np.random.default_rng(0)
    return random.normal(size=(count, inputs)).astype(np.float32), random.integers(0, classes, count)


def trained(model, train="layer3.*", targets=("layer1", "layer2"), epochs=3, **settings):
    lora = settings.pop("lora", None) or onnxtrain.Lora(rank=2, targets=list(targets))
    settings = {"loss": "cross_entropy", "optimizer": "adam(lr=0.05)", **settings}
    trainer = onnxtrain.Trainer(model, lora=lora, train=train, **settings)
    trainer.fit(*data(), epochs=epochs, progress=False)
    return trainer


def outputs(model, x, adapter=None):
    """Outputs of a model in ONNX Runtime, with an adapter in its slots if given."""
    options, run = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    options.log_severity_level = 3  # it warns of every initializer that is an input, too
    session = onnxruntime.InferenceSession(model, options)
    loaded = onnxruntime.LoraAdapter()
    if adapter is not None:
        loaded.Load(str(adapter))
        run.add_active_adapter(loaded)
    return session.run(None, {session.get_inputs()[0].name: x}, run)[0]


def check_forms(model, trainer, x, folder, forms=FORMS, atol=1e-5):
    """All files of a training, and all that is made from them, compute the same."""
    expected = trainer.predict(x)
    trainer.save(folder / "merged.onnx")
    np.testing.assert_allclose(outputs(folder / "merged.onnx", x), expected, atol=atol)
    for form in forms:
        trainer.save(folder / form)
        merge_adapter(model, folder / form, folder / "again.onnx")
        np.testing.assert_allclose(outputs(folder / "again.onnx", x), expected, atol=atol)
        convert_adapter(model, folder / form, folder / "converted.onnx_adapter")
        names = add_slots(model, folder / "slots.onnx", adapter=folder / form)
        assert names
        adapted = outputs(folder / "slots.onnx", x, folder / "converted.onnx_adapter")
        np.testing.assert_allclose(adapted, expected, atol=atol)
        plain = outputs(serialized(model), x)
        np.testing.assert_allclose(outputs(folder / "slots.onnx", x), plain, rtol=1e-5, atol=atol)
        lora = onnxtrain.Lora(adapter=folder / form)
        again = onnxtrain.Trainer(model, loss=trainer.config.loss, lora=lora)
        np.testing.assert_allclose(again.predict(x), expected, atol=atol)
        again.save(folder / "resumed.onnx_adapter")
        merge_adapter(model, folder / "resumed.onnx_adapter", folder / "again.onnx")
        np.testing.assert_allclose(outputs(folder / "again.onnx", x), expected, atol=atol)
    return expected


def serialized(model):
    return model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)


@pytest.mark.parametrize("dora", [False, True])
def test_a_head_is_in_every_form(tmp_path, dora):
    model = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2)
    trainer = trained(model, lora=onnxtrain.Lora(rank=2, targets=["layer1", "layer2"], dora=dora))
    expected = check_forms(model, trainer, data()[0], tmp_path)
    assert np.abs(expected - outputs(serialized(model), data()[0])).max() > 0.1
    for form in FORMS:
        found = describe_adapter(tmp_path / form)["trained_in_full"]
        assert [name.rpartition(".")[2] for name in found] == ["bias", "weight"]
    config = json.loads((tmp_path / "folder" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["layer3"]


def test_the_moving_average_of_a_head_is_saved(tmp_path):
    model, (x, _) = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2), data()
    trainer = trained(model, ema=0.9)
    trainer.save(tmp_path / "tuned.onnx_adapter", ema=True)
    merge_adapter(model, tmp_path / "tuned.onnx_adapter", tmp_path / "merged.onnx")
    np.testing.assert_allclose(outputs(tmp_path / "merged.onnx", x), trainer.predict(x, ema=True), atol=1e-5)
    assert np.abs(trainer.predict(x) - trainer.predict(x, ema=True)).max() > 1e-3


def test_a_bias_of_an_adapted_layer_is_in_every_form(tmp_path):
    model = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2)
    check_forms(model, trained(model, train="layer2.bias"), data()[0], tmp_path)
    config = json.loads((tmp_path / "folder" / "adapter_config.json").read_text())
    assert (config["bias"], config["modules_to_save"]) == ("lora_only", None)


def convolutional(seed=0):
    """Convolution, batch normalization, a convolution with a bias behind it, and a linear layer."""
    random = np.random.default_rng(seed)
    model = parsed("""g (float[n,2,5,5] x) => (float[n,3] logits)
        { a = Conv<pads=[1,1,1,1]>(x, body__conv__weight)
          b = BatchNormalization(a, body__bn__weight, body__bn__bias, body__bn__running_mean, body__bn__running_var)
          c = Relu(b) d = Conv<pads=[1,1,1,1]>(c, body__last__weight, body__last__bias)
          e = GlobalAveragePool(d) f = Flatten(e) logits = Gemm<transB=1>(f, head__weight, head__bias) }""")
    shapes = {
        "body.conv.weight": (4, 2, 3, 3),
        "body.bn.weight": 4,
        "body.bn.bias": 4,
        "body.bn.running_mean": 4,
        "body.bn.running_var": 4,
        "body.last.weight": (4, 4, 3, 3),
        "body.last.bias": 4,
        "head.weight": (3, 4),
        "head.bias": 3,
    }
    for name, shape in shapes.items():
        array = random.normal(size=shape).astype(np.float32)
        array = np.abs(array) + 0.5 if name.endswith("var") else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("train", ["{head,body.bn}.*", "body.last.*", "body.bn.bias"])
def test_running_statistics_and_norms_are_in_every_form(tmp_path, train):
    model, random = convolutional(), np.random.default_rng(1)
    x, y = random.normal(size=(40, 2, 5, 5)).astype(np.float32) + 2, random.integers(0, 3, 40)
    targets = ["body.conv"]
    lora = onnxtrain.Lora(rank=2, targets=targets)
    trainer = onnxtrain.Trainer(
        model, loss="cross_entropy", optimizer="sgd(lr=0.1)", lora=lora, train=train, batch_norm="train"
    )
    before = trainer.predict(x)
    trainer.fit(x, y, epochs=2, progress=False)
    assert np.abs(trainer.predict(x) - before).max() > 0.05
    check_forms(model, trainer, x, tmp_path, atol=1e-4)
    assert "body.bn.running_mean" in describe_adapter(tmp_path / "tuned.onnx_adapter")["trained_in_full"]
    config = json.loads((tmp_path / "folder" / "adapter_config.json").read_text())
    assert "body.bn" in config["modules_to_save"]


@pytest.mark.thorough
def test_statistics_alone_are_saved(tmp_path):
    """No initializer but the statistics changes beside the adapters, and a new training leaves them frozen."""
    model = convolutional()
    x, y = data(2 * 5 * 5, count=40)
    x = x.reshape(40, 2, 5, 5) + 2
    lora = onnxtrain.Lora(rank=2, targets="body.conv")
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", lora=lora, batch_norm="train")
    trainer.fit(x, y, epochs=2, progress=False)
    check_forms(model, trainer, x, tmp_path, atol=1e-4)
    again = onnxtrain.Trainer(
        model,
        loss="cross_entropy",
        lora=onnxtrain.Lora(adapter=tmp_path / "tuned.onnx_adapter"),
        optimizer="sgd(lr=1e-4)",
    )
    again.fit(x, y, epochs=1, progress=False)
    check_forms(model, again, x, tmp_path, atol=1e-4)


@pytest.mark.parametrize("dtype", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE])
def test_heads_of_other_types(tmp_path, dtype):
    """The head is rounded to the file's type, and stays it where it is frozen."""
    model = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = dtype
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(helper.make_tensor(tensor.name, dtype, array.shape, array.reshape(-1)))
    numpy_type = helper.tensor_dtype_to_np_dtype(dtype)
    x, y = data()
    lora = onnxtrain.Lora(rank=2, targets=["layer1", "layer2"])
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.05)", lora=lora, train="layer3.*")
    trainer.fit(x.astype(numpy_type), y, epochs=2, progress=False)
    expected = {name: ModelFile.load(trainer.model()).value(name) for name in ("layer3.weight", "layer3.bias")}
    for form in FORMS:
        trainer.save(tmp_path / form)
        merge_adapter(model, tmp_path / form, tmp_path / "merged.onnx")
        frozen = onnxtrain.Trainer(
            model, loss="cross_entropy", lora=onnxtrain.Lora(adapter=tmp_path / form), freeze="layer3.*"
        )
        assert "layer3.weight" not in frozen.parameters
        frozen.save(tmp_path / "frozen.onnx_adapter")
        merge_adapter(model, tmp_path / "frozen.onnx_adapter", tmp_path / "frozen.onnx")
        inside = frozen.predict(x.astype(numpy_type))
        np.testing.assert_allclose(
            inside.astype(np.float32), trainer.predict(x.astype(numpy_type)).astype(np.float32), atol=0.05
        )
        for path in ("merged.onnx", "frozen.onnx"):
            for name, array in expected.items():
                found = ModelFile.load(tmp_path / path).value(name)
                assert found.dtype == array.dtype
                np.testing.assert_array_equal(found, array)


def test_what_follows_a_saved_head_keeps_it(tmp_path):
    """Copies, pickles, continued and frozen trainings."""
    model, (x, y) = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2), data()
    trained(model).save(tmp_path / "tuned.onnx_adapter")
    lora = onnxtrain.Lora(adapter=tmp_path / "tuned.onnx_adapter")
    for freeze in (None, "layer3.*"):
        trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.05)", lora=lora, freeze=freeze)
        start = onnxtrain.predict(trainer.model(), x)
        np.testing.assert_allclose(start, trainer.predict(x), atol=1e-5)
        trainer.fit(x, y, epochs=1, progress=False)
        assert np.abs(trainer.predict(x) - start).max() > 1e-3
        for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
            np.testing.assert_allclose(other.predict(x), trainer.predict(x), atol=1e-5)
            np.testing.assert_allclose(onnxtrain.predict(other.model(), x), trainer.predict(x), atol=1e-5)
            check_forms(model, other, x, tmp_path / "", ("other.onnx_adapter",))


def test_another_base_of_equal_sizes_is_refused(tmp_path):
    model, other = (onnxtrain.examples.mlp((6, 10, 8, 3), seed=seed) for seed in (2, 3))
    trainer = trained(model)
    for form in FORMS:
        trainer.save(tmp_path / form)
        for call in (
            lambda: merge_adapter(other, tmp_path / form, tmp_path / "m.onnx"),  # noqa: B023
            lambda: convert_adapter(other, tmp_path / form, tmp_path / "c.onnx_adapter"),  # noqa: B023
            lambda: add_slots(other, tmp_path / "s.onnx", adapter=tmp_path / form),  # noqa: B023
            lambda: describe_adapter(tmp_path / form, model=other),  # noqa: B023
            lambda: onnxtrain.Trainer(other, loss="mse", lora=onnxtrain.Lora(adapter=tmp_path / form)),  # noqa: B023
        ):
            with raises_sentence("adapter_of_another_weight", what="layer1.weight"):
                call()
        with raises_sentence("full_tensor_shape"):
            merge_adapter(onnxtrain.examples.mlp((6, 10, 8, 4), seed=2), tmp_path / form, tmp_path / "m.onnx")


def test_a_weight_is_adapted_or_trained(tmp_path):
    with raises_sentence("trained_and_adapted", what="layer1.weight"):
        trained(onnxtrain.examples.mlp((6, 10, 8, 3)), train="layer1.*")


def test_a_tied_tensor_is_in_every_form(tmp_path):
    """An embedding whose values an exporter stored twice, transposed for the output layer."""
    random = np.random.default_rng(0)
    model = parsed("""g (int64[n,t] ids) => (float[n,t,9] logits)
        { a = Gather(embed__weight, ids) b = MatMul(a, body__weight) c = Tanh(b)
          logits = MatMul(c, lm_head__weight) }""")
    table = random.normal(size=(9, 4)).astype(np.float32)
    for name, array in (
        ("embed.weight", table),
        ("body.weight", random.normal(size=(4, 4)).astype(np.float32)),
        ("lm_head.weight", np.ascontiguousarray(table.T)),
    ):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    x = random.integers(0, 9, (8, 5))
    lora = onnxtrain.Lora(rank=2, targets="body")
    trainer = onnxtrain.Trainer(
        model, loss="cross_entropy", optimizer="adam(lr=0.1)", lora=lora, train="embed.weight", tie=True
    )
    trainer.fit(x, x, epochs=3, progress=False)
    expected = check_forms(model, trainer, x, tmp_path)
    assert describe_adapter(tmp_path / "tuned.onnx_adapter")["trained_in_full"] == ["embed.weight", "lm_head.weight"]
    for form in FORMS:
        lora = onnxtrain.Lora(adapter=tmp_path / form)
        again = onnxtrain.Trainer(model, loss="cross_entropy", lora=lora, tie=True)
        assert "embed.weight" in again.parameters
        assert "lm_head.weight" not in again.parameters
        np.testing.assert_allclose(again.predict(x), expected, atol=1e-5)
    untied = onnxtrain.Trainer(
        model, loss="cross_entropy", optimizer="adam(lr=0.1)", lora=onnxtrain.Lora(rank=2, targets="body"),
        train="embed.weight",
    )  # fmt: skip
    untied.fit(x, x, epochs=1, progress=False)
    untied.save(tmp_path / "untied.onnx_adapter")
    with raises_sentence("tie_of_adapter", what="lm_head.weight", got="embed.weight"):
        onnxtrain.Trainer(
            model, loss="cross_entropy", lora=onnxtrain.Lora(adapter=tmp_path / "untied.onnx_adapter"), tie=True
        )


def test_a_shared_table_is_saved_under_both_modules(tmp_path):
    random = np.random.default_rng(0)
    model = parsed("""g (int64[n,t] ids) => (float[n,t,9] logits)
        { a = Gather(embed__weight, ids) b = MatMul(a, body__weight) c = Tanh(b) d = Transpose(embed__weight)
          logits = MatMul(c, d) }""")
    model.graph.node[-1].name = "/lm_head/MatMul"
    for name, shape in (("embed.weight", (9, 4)), ("body.weight", (4, 4))):
        model.graph.initializer.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name))
    x = random.integers(0, 9, (8, 5))
    lora = onnxtrain.Lora(rank=2, targets="body")
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="adam(lr=0.1)", lora=lora, train="embed.weight")
    trainer.fit(x, x, epochs=3, progress=False)
    check_forms(model, trainer, x, tmp_path)
    config = json.loads((tmp_path / "folder" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["embed", "lm_head"]


def test_a_tensor_that_peft_has_no_name_for_is_not_lost_in_silence(tmp_path):
    model = onnxtrain.examples.mlp((6, 10, 3))
    model.graph.node.append(helper.make_node("Mul", ["logits", "temperatures"], ["scaled"]))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 3), np.float32) * 2, "temperatures"))
    model.graph.output[0].name = "scaled"
    trainer = trained(model, train="temperatures", targets=["layer1"])
    check_forms(model, trainer, data()[0], tmp_path, ("tuned.onnx_adapter",))
    with raises_sentence("adapter_cannot_hold", what=tmp_path / "folder", got="temperatures"):
        trainer.save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def normalized(nodes, **arrays):
    """A linear layer "first" that gets an adapter, and other nodes behind it."""
    model = parsed(f"g (float[n,4] x) => (float[n,4] y) {{ a = MatMul(x, first__weight) {nodes} }}")
    random = np.random.default_rng(0)
    for name, array in {"first.weight": (4, 4), **arrays}.items():
        array = random.normal(size=array) if isinstance(array, tuple) else array
        model.graph.initializer.append(numpy_helper.from_array(np.float32(array), name))
    return model


def saved_beside(model, train, folder, targets="first"):
    trainer = onnxtrain.Trainer(model, loss="mse", lora=onnxtrain.Lora(rank=2, targets=targets), train=train)
    trainer.save(folder)
    found = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): array for name, array in found.items() if "lora" not in name}


@pytest.mark.parametrize(
    ("nodes", "arrays"),
    [
        ("b = MatMul(a, last__weight) y = Add(b, last__bias)", {"last.bias": (4,)}),
        ("b = MatMul(a, last__weight) y = Add(b, constant__bias)", {"constant.bias": (1, 4)}),
        ("b = MatMul(a, last__weight) c = Relu(b) d = Add(c, v) y = Add(d, v)", {"v": (4,)}),
        ("y = Gemm<beta=2.0>(a, last__weight, v)", {"v": (4,)}),
    ],
)
def test_a_folder_holds_whole_modules(nodes, arrays, tmp_path):
    """PEFT needs the bias of a weight: its value, by whatever name, and zeros where there is none."""
    model = normalized(nodes, **{"last.weight": (4, 4), **arrays})
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = saved_beside(model, "last.weight", tmp_path / "folder")
    np.testing.assert_array_equal(found["last.weight"], values["last.weight"].T)
    factor = 2 if "Gemm" in nodes else 1
    bias = np.zeros(4) if "Relu" in nodes else values[next(iter(arrays))].reshape(-1) * factor
    np.testing.assert_array_equal(found["last.bias"], bias.astype(np.float32))


def test_a_folder_holds_whole_normalizations(tmp_path):
    """A bias that an exporter merged with another one has no name of its own."""
    model = normalized(
        "b = LayerNormalization(a, n1__weight, n1__bias) y = LayerNormalization(b, n2__weight, n1__bias)",
        **{"n1.weight": (4,), "n1.bias": (4,), "n2.weight": (4,)},
    )
    found = saved_beside(model, "n2.weight", tmp_path / "folder")
    bias = numpy_helper.to_array(model.graph.initializer[2])
    np.testing.assert_array_equal(found["n2.bias"], bias)
    with raises_sentence(
        "adapter_cannot_hold", what=tmp_path / "other", got="n1.bias", reason="does not say which module PEFT would"
    ):
        saved_beside(model, "n1.bias", tmp_path / "other")


def test_modules_that_cannot_be_whole_are_refused(tmp_path):
    model = normalized(
        "b = MatMul(a, body__inner__weight) c = Mul(b, body__scale) y = Mul(c, body__table)",
        **{"body.inner.weight": (4, 4), "body.scale": (4,), "body.table": (1, 4)},
    )
    with raises_sentence(
        "adapter_cannot_hold", what=tmp_path / "folder", got="body.scale", reason="its module whole, with 'body.table'"
    ):
        saved_beside(model, "body.scale", tmp_path / "folder")
    with raises_sentence(
        "adapter_cannot_hold",
        what=tmp_path / "folder",
        got="body.scale",
        reason="whole, and 'body.inner' in it is adapted",
    ):
        saved_beside(model, "body.scale", tmp_path / "folder", targets=["first", "body.inner"])


def test_files_with_tensors_that_do_not_fit(tmp_path):
    model = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2)
    trained(model, epochs=1).save(tmp_path / "tuned.onnx_adapter")
    path = tmp_path / "tuned.onnx_adapter.json"
    manifest = json.loads(path.read_text())

    def message(**changes):
        path.write_text(json.dumps({**manifest, **changes}))
        with pytest.raises((ModelError, OptionError)) as caught:
            merge_adapter(model, tmp_path / "tuned.onnx_adapter", tmp_path / "m.onnx")
        return str(caught.value)

    assert "has 'tensors' = [1]; it needs an object" in message(tensors=[1])
    assert "names that are not a list of texts" in message(tensors={"layer3.weight": 1})
    assert "lacks 'other', which its manifest lists" in message(tensors={"other": []})
    assert "has a tensor 'layer3" in message(tensors={})
    assert "has 'base_model' = 1; it needs a text" in message(base_model=1)
    renamed = onnxtrain.examples.mlp((6, 10, 8, 3), seed=2)
    for tensor in renamed.graph.initializer:
        tensor.name = tensor.name.replace("layer3", "last")
    for node in renamed.graph.node:
        node.input[:] = [name.replace("layer3", "last") for name in node.input]
    path.write_text(json.dumps(manifest))
    with raises_sentence(
        "full_tensor_no_initializer", what=tmp_path / "tuned.onnx_adapter", got="layer3.weight", advice="the model"
    ):
        merge_adapter(renamed, tmp_path / "tuned.onnx_adapter", tmp_path / "m.onnx")
    with raises_sentence("adapter_value_not_initializer", what=tmp_path / "tuned.onnx_adapter", got="layer3.weight"):
        add_slots(renamed, tmp_path / "s.onnx", adapter=tmp_path / "tuned.onnx_adapter")


def test_a_base_model_is_for_adapters(tmp_path):
    trainer = trained(onnxtrain.examples.mlp((6, 10, 8, 3)), epochs=1)
    with raises_sentence("base_model_of_model", path="m.onnx'"):
        trainer.save(tmp_path / "m.onnx", base_model="bert")
    trainer.save(tmp_path / "folder", base_model="some/bert")
    assert config_of(tmp_path / "folder") == ("some/bert", None)


def config_of(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    return config["base_model_name_or_path"], config["task_type"]


def test_the_checkpoint_is_found_beside_the_model(tmp_path):
    model = onnxtrain.examples.mlp((6, 10, 8, 3))
    onnx.save(model, tmp_path / "model.onnx")
    config = {"architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    trainer = trained(tmp_path / "model.onnx", epochs=1)
    trainer.save(tmp_path / "one")
    assert config_of(tmp_path / "one") == (None, "SEQ_CLS")
    (tmp_path / "model.safetensors").write_bytes(b"")
    trainer.save(tmp_path / "two")
    assert config_of(tmp_path / "two") == (str(tmp_path), "SEQ_CLS")
    (tmp_path / "config.json").write_text(json.dumps({**config, "_name_or_path": "some/bert"}))
    trainer.save(tmp_path / "three.onnx_adapter")
    (tmp_path / "config.json").write_text("[")
    convert_adapter(model, tmp_path / "three.onnx_adapter", tmp_path / "four")
    assert config_of(tmp_path / "four") == ("some/bert", "SEQ_CLS")
    convert_adapter(model, tmp_path / "four", tmp_path / "five", base_model="other/bert")
    assert config_of(tmp_path / "five") == ("other/bert", "SEQ_CLS")
    (tmp_path / "four" / "adapter_config.json").write_text(
        (tmp_path / "four" / "adapter_config.json").read_text().replace('"SEQ_CLS"', "7")
    )
    with pytest.raises(ModelError, match=r"has 'task_type' = 7; it needs a text"):
        describe_adapter(tmp_path / "four")
