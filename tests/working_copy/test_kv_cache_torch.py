"""KV-cache inputs of PyTorch's older exporter and of optimum: removed, or reported if they stay."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.editing.working_copy.kv_cache import remove_cache_inputs
from onnxtrain.errors import DataError, OptionError, TrainingHint
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import newest_opset
from sentences import raises_sentence, warns_sentence

NAMES = [f"past_key_values.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]


@pytest.mark.plugins
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_all_pasts_of_an_exported_cache_are_left_out(tmp_path: Path) -> None:
    from onnxtrain.plugins.doctor.diagnosis import diagnose

    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=32, n_embd=8, n_layer=2, n_head=2, attn_implementation="eager"
    )
    network = transformers.GPT2LMHeadModel(config).eval()

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens, mask, *caches):
            cache = transformers.DynamicCache()
            for layer in range(2):
                cache.update(caches[2 * layer], caches[2 * layer + 1], layer)
            found = self.network(tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
            return (found.logits, *(part for one in found.past_key_values.layers for part in (one.keys, one.values)))

    path = tmp_path / "gpt2.onnx"
    past = torch.zeros(1, 2, 3, 4)
    torch.onnx.export(
        Cached(),
        (torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 7, dtype=torch.int64), past, past, past, past),
        path,
        dynamo=False,
        input_names=["input_ids", "attention_mask", *NAMES],
        output_names=["logits", *(name.replace("past_key_values", "present") for name in NAMES)],
        dynamic_axes={"input_ids": {0: "b", 1: "t"}, "attention_mask": {0: "b", 1: "s"}}
        | {name: {0: "b", 2: "p"} for name in NAMES},
    )
    assert remove_cache_inputs(ModelFile.load(path).training_model()) == NAMES
    assert any("Training starts from an empty KV cache: 4 inputs" in finding.what for finding in diagnose(path))
    assert not any("begin at a constant" in finding.what for finding in diagnose(path))
    tokens = np.random.default_rng(0).integers(0, 17, size=(2, 5))
    found = onnxtrain.predict(path, {"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    empty = dict.fromkeys(NAMES, np.zeros((2, 2, 0, 4), np.float32))
    session = onnxruntime.InferenceSession(path)
    (expected,) = session.run(["logits"], {"input_ids": tokens, "attention_mask": np.ones_like(tokens), **empty})
    assert isinstance(found, dict)
    np.testing.assert_allclose(found["logits"], expected, atol=1e-5)
    labels = torch.as_tensor(tokens)
    without_cache = network.eval()(labels).logits  # the export sets the wrapper and its submodules to training mode
    wanted = torch.nn.functional.cross_entropy(without_cache.reshape(-1, 17), labels.reshape(-1)).item()
    trainer = onnxtrain.Trainer(path, loss="cross_entropy", output="logits")
    for caches in ({}, empty):  # with all six inputs of the file, and with the remaining ones
        data = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), **caches}, tokens
        assert trainer.evaluate(data)["loss"] == pytest.approx(wanted, rel=1e-5)
    trainer.fit(data, epochs=1, batch_size=2, progress=False)


def _decoder(second: str, name: str = "past.1.key") -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[b, 2, 3, 4] x, float[b, 2, p, 4] past_0_key, float[b, 2, {second}, 4] other)
        => (float[b, 2, s, 4] y, float z) {{
            c = Concat<axis=2>(past_0_key, x)  y = Mul(c, w)
            z = ReduceSum<keepdims=0>(other)
        }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32) * 2, "w"))
    model.graph.node[-1].input[0] = model.graph.input[2].name = name
    model.graph.node[0].input[0] = model.graph.input[1].name = "past.0.key"
    return model


def test_pasts_of_one_model_go_together_or_stay() -> None:
    def left_out(*given: str) -> list[str]:
        return remove_cache_inputs(ModelFile.load(_decoder(*given)).training_model())

    assert left_out("p") == []
    assert left_out("p2") == []  # a symbol of its own, but a cache of the same model by its name
    assert left_out("p2", "past.1.value") == []
    assert left_out("p", "past.1.encoder.key") == []
    assert left_out("encoder_length", "past.1.encoder.key") == ["past.0.key"]
    assert left_out("16") == ["past.0.key"]


def test_data_may_have_the_inputs_of_a_past_without_rows() -> None:
    model = _decoder("e", "past.1.encoder.key")
    inputs = {"x": np.ones((2, 2, 3, 4), np.float32), "past.1.encoder.key": np.ones((2, 2, 16, 4), np.float32)}
    empty = inputs | {"past.0.key": np.zeros((2, 2, 0, 4), np.float32)}
    filled = inputs | {"past.0.key": np.zeros((2, 2, 5, 4), np.float32)}
    y = np.zeros((2, 2, 3, 4), np.float32)
    trainer = onnxtrain.Trainer(model, loss="mse", output="y")
    expected = trainer.evaluate((inputs, y))["loss"]
    for data in ((empty, y), empty | {"target": y}, [empty | {"target": y}], lambda: iter([(empty, y)])):
        assert trainer.evaluate(data)["loss"] == expected
    trainer.train_step(empty, y)
    trainer.fit((empty, y), progress=False)
    np.testing.assert_array_equal(onnxtrain.predict(model, empty)["y"], 2 * inputs["x"])
    sentence = r"KV cache of shape \(2, 2, 5, 4\) in 'past.0.key'.*start with an empty one.*without rows"
    for use in (
        lambda: trainer.evaluate((filled, y)),
        lambda: trainer.evaluate(lambda: iter([(filled, y)])),
        lambda: trainer.fit(filled | {"target": y}, progress=False),
        lambda: trainer.train_step(filled, y),
        lambda: trainer.predict(filled),
        lambda: onnxtrain.predict(model, filled),
    ):
        with pytest.raises(DataError, match=sentence):
            use()


def _merged() -> onnx.ModelProto:
    """Return a merged decoder like optimum's: large weights outside, small constants and nodes in two branches."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        merged (int64[b, t] input_ids, float[b, 1, p, 4] past_key_values_0_key, bool[1] use_cache_branch)
        => (float[b, s, 4] logits, float[b, 1, s2, 4] present_0_key)
        <float[3, 4] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[4, 4] w, int64[1] axis = {1}> {
            logits, present_0_key = If(use_cache_branch) <
                then_branch = with_past () => (float[b, s, 4] logits, float[b, 1, s2, 4] present_0_key) {
                    x = Gather(table, input_ids)  k = Unsqueeze(x, axis)
                    present_0_key = Concat<axis=2>(past_key_values_0_key, k)
                    all = Squeeze(present_0_key, axis)  logits = MatMul(all, w)
                },
                else_branch = no_past () => (float[b, s, 4] logits, float[b, 1, s2, 4] present_0_key) {
                    x = Gather(table, input_ids)  present_0_key = Unsqueeze(x, axis)
                    scaled = Mul(x, two)  logits = MatMul(scaled, w)
                }>
        }"""
    )
    without = model.graph.node[0].attribute[1].g
    without.initializer.append(onnx.numpy_helper.from_array(np.float32(2), "two"))
    del model.graph.initializer[:]
    for name, array in (
        ("table", np.arange(12, dtype=np.float32).reshape(3, 4) / 12),
        ("w", np.eye(4, dtype=np.float32)),
        ("axis", np.array([1])),
    ):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.plugins
def test_a_merged_decoder_trains_its_branch_without_cache(tmp_path: Path) -> None:
    from onnxtrain.plugins.doctor.diagnosis import diagnose

    model, ids = _merged(), np.array([[0, 1, 2], [2, 1, 0]])
    removed = ["past_key_values_0_key", "use_cache_branch"]
    assert remove_cache_inputs(ModelFile.load(model).training_model()) == removed
    assert any("(past_key_values_0_key, use_cache_branch)" in finding.what for finding in diagnose(model))
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", output="logits")
    assert (trainer.hints, [*trainer.parameters]) == ([], ["table", "w"])
    trainer.fit({"input_ids": ids}, ids, epochs=2, progress=False)
    trainer.save(tmp_path / "saved.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "saved.onnx")
    dummy = {"past_key_values_0_key": np.zeros((2, 1, 1, 4), np.float32), "use_cache_branch": np.array([False])}
    (expected,) = session.run(["logits"], {"input_ids": ids, **dummy})
    found = trainer.predict({"input_ids": ids})
    assert isinstance(found, dict)
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-5)
    with_flag = {"input_ids": ids, "use_cache_branch": np.zeros((2, 1), bool)}
    assert trainer.evaluate(with_flag, ids) == trainer.evaluate({"input_ids": ids}, ids)
    with raises_sentence("kv_cache_in_data", what="use_cache_branch", got=(2, 1)):
        trainer.evaluate({"input_ids": ids, "use_cache_branch": np.ones((2, 1), bool)}, ids)


def test_adapters_of_a_merged_decoder(tmp_path: Path) -> None:
    """They are trained in the branch without a cache, and merged into the weights of both."""
    path, ids = tmp_path / "model.onnx", np.array([[0, 1, 2], [2, 1, 0]])
    onnx.save(_merged(), path)
    assert [layer.name for layer in onnxtrain.adapters.adaptable_layers(path)] == ["table", "w"]
    lora = onnxtrain.Lora(rank=2, targets="*")
    trainer = onnxtrain.Trainer(path, loss="cross_entropy", output="logits", optimizer="adam(lr=0.05)", lora=lora)
    for _ in range(3):
        trainer.train_step({"input_ids": ids}, ids)
    expected = trainer.predict({"input_ids": ids})
    assert isinstance(expected, dict)
    adapter = tmp_path / "tuned.onnx_adapter"
    trainer.save(adapter)
    onnxtrain.adapters.convert_adapter(path, adapter, tmp_path / "peft")
    onnxtrain.adapters.merge_adapter(path, tmp_path / "peft", tmp_path / "merged.onnx")
    found = onnxtrain.predict(tmp_path / "merged.onnx", {"input_ids": ids})
    assert isinstance(found, dict)
    np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-5)
    session = onnxruntime.InferenceSession(tmp_path / "merged.onnx")
    whole = {"input_ids": ids, "past_key_values_0_key": np.zeros((2, 1, 0, 4), np.float32)}
    (cached,) = session.run(["logits"], whole | {"use_cache_branch": np.array([True])})
    before = onnxruntime.InferenceSession(path).run(["logits"], whole | {"use_cache_branch": np.array([True])})[0]
    assert np.abs(cached - before).max() > 0.01
    with pytest.raises(OptionError, match=r"in the branches of an If, where slots cannot be; merge the adapter"):
        onnxtrain.adapters.add_slots(path, tmp_path / "slots.onnx", adapter=adapter)


def test_weights_of_the_cache_branch_alone_are_hinted() -> None:
    model = _merged()
    own = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "v")
    model.graph.initializer.append(own)
    model.graph.node[0].attribute[0].g.node[-1].input[1] = "v"
    with warns_sentence("branch_with_cache", weights="v"):
        onnxtrain.Trainer(model, loss="cross_entropy", output="logits")


@pytest.mark.plugins
def test_a_merged_decoder_whose_other_branch_reads_the_cache_keeps_it() -> None:
    from onnxtrain.plugins.doctor.diagnosis import diagnose

    model = _merged()
    without = model.graph.node[0].attribute[1].g
    without.node[1].CopyFrom(onnx.helper.make_node("Identity", ["past_key_values_0_key"], ["present_0_key"]))
    assert remove_cache_inputs(ModelFile.load(model).training_model()) == []
    sentence = r"KV-cache inputs \(2: past_key_values_0_key, use_cache_branch\) that are read by .*stay inputs"
    assert any(re.search(sentence, finding.what) for finding in diagnose(model))


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("rows", "name", "sentence"),
    [
        ("16", "past.1.key", r"\(1: past.1.key\) that have a length of 16 that the file fixes, and stay inputs"),
        ("p", "past.1.key", r"\(2: past.0.key, past.1.key\) that are read by Concat, ReduceSum in a way"),
        ("encoder_length", "past.1.encoder.key", r"\(1: past.1.encoder.key\) that hold keys and values of an encoder"),
    ],
)
def test_caches_that_stay_are_named_by_doctor_and_trainer(rows: str, name: str, sentence: str) -> None:
    from onnxtrain.plugins.doctor.diagnosis import Severity, diagnose

    model = _decoder(rows, name)
    (finding,) = (finding for finding in diagnose(model) if re.search(sentence, finding.what))
    warned = finding.severity is Severity.CHANGES
    assert warned == ("encoder" not in name)
    with pytest.warns(TrainingHint, match=sentence) if warned else contextlib.nullcontext():
        trainer = onnxtrain.Trainer(model, loss="mse", output="y")
    assert any(re.search(sentence, hint) for hint in trainer.hints)


@pytest.mark.skipif(newest_opset() < 23, reason="this ONNX Runtime has no Attention yet")
def test_caches_of_the_standard_attention_are_removed() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 23]>
        g (float[b, 2, t, 4] x, float[b, 2, p, 4] past_key, float[b, 2, p, 4] past_value)
        => (float[b, 2, t, 4] y, float[b, 2, s, 4] present_key, float[b, 2, s, 4] present_value)
        <float[4, 4] w = {1, 2, 3, 4, -1, 1, 1, 0, 0.5, 0, 1, 1, 2, 0, 0, 1}> {
            q = MatMul(x, w)
            y, present_key, present_value = Attention<is_causal=1>(q, x, x,, past_key, past_value)
        }"""
    )
    x = np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32)
    empty = dict.fromkeys(("past_key", "past_value"), np.zeros((2, 2, 0, 4), np.float32))
    expected, *_ = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, **empty})
    trainer = onnxtrain.Trainer(model, loss="mse", output="y")
    assert trainer.hints == []
    found = trainer.predict({"x": x})
    assert isinstance(found, dict)
    np.testing.assert_allclose(found["y"], expected, rtol=1e-5)
    assert trainer.train_step(x, expected) == pytest.approx(0, abs=1e-10)


def test_a_static_cache_is_named() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[1, 2, 1, 4] x, int64[1, 2, 1, 4] position, float[1, 2, 8, 4] key_cache_0) => (float[1, 2, 8, 4] y)
        <float[4] w = {1, 2, 3, 4}> {
            new = ScatterElements<axis=2>(key_cache_0, position, x)  y = Mul(new, w)
        }"""
    )
    with warns_sentence("cache_of_fixed_length", inputs="1: key_cache_0", length=8):
        onnxtrain.Trainer(model, loss="mse")


CONSTANT_POSITIONS = {
    "range": ("r = Range(three, end, one)  h = Gather(table, r)", 3),
    "range_and_addend": ("r = Range(zero, t, one)  i = Unsqueeze(r, axis)  j = Add(i, three)  h = Gather(table, j)", 3),
    "two_addends": ("r = Range(zero, t, one)  i = Add(two, r)  j = Add(i, three)  h = Gather(table, j)", 5),
    "constant_positions": ("h = Gather(table, positions)", 3),
    "slice": ("h = Slice(table, starts, ends, axis)", 3),
    "triangle": ("s = Concat<axis=0>(shape, shape)  ones = Expand(two, s)  h = Trilu(ones, three)", 2),
    "rotary": ("h = com.microsoft.RotaryEmbedding(k, positions2, table, table)", 3),
    # the length of the cache, an offset of the architecture behind it, and constants that are no positions
    "length": ("r = Range(zero, t, one)  i = Add(r, past)  j = Add(i, two)  h = Gather(table, j)", 0),
    "offset_first": ("r = Range(zero, t, one)  i = Add(r, two)  j = Add(i, past)  h = Gather(table, j)", 0),
    "from_zero": ("r = Range(zero, t, one)  h = Gather(table, r)", 0),
    "from_length": ("both = Add(past, t)  r = Range(past, both, one)  h = Gather(table, r)", 0),
    "strict": ("r = Range(zero, t, one)  j = Add(r, one)  c = Unsqueeze(j, axis)  h = Less(r, c)", 0),
    "shifted_strict": ("r = Range(zero, t, one)  j = Add(r, three)  h = Less(r, j)", 2),
    "one_row": ("h = Gather(table, three)", 0),
    "causal": ("s = Concat<axis=0>(shape, shape)  ones = Expand(two, s)  h = Trilu(ones, one)", 0),
    "backwards": ("h = Slice(table, last, ends, axis, minus)", 0),
    "next_tokens": ("h = Slice(x, starts, ends, axis)", 0),
}


@pytest.mark.plugins
@pytest.mark.parametrize("form", CONSTANT_POSITIONS)
def test_positions_that_do_not_follow_the_cache_are_found(form: str) -> None:
    from onnxtrain.plugins.doctor.diagnosis import diagnose

    nodes, expected = CONSTANT_POSITIONS[form]
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[b, t, 4] x, float[b, 1, p, 4] past_0_key) => (float[b, 1, s, 4] y, float[b, 1, s, 4] k)
        <float[4] w = {{1, 2, 3, 4}}, int64 zero = {{0}}, int64 one = {{1}}, int64 two = {{2}}, int64 three = {{3}},
        int64[1] axis = {{0}}, int64[1] starts = {{3}}, int64[3] positions = {{3, 4, 5}},
        int64[1, 2] positions2 = {{3, 4}}, int64[1] last = {{9223372036854775807}}, int64[1] minus = {{-1}}> {{
            heads = Unsqueeze(x, one)  k = Concat<axis=2>(past_0_key, heads)  y = Mul(k, w)
            shape = Shape<start=1, end=2>(x)  t = Squeeze(shape)  end = Add(t, three)  ends = Unsqueeze(end, axis)
            cached = Shape<start=2, end=3>(past_0_key)  past = Squeeze(cached)
            {nodes}  read = Cast<to=1>(h)
        }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((32, 4), np.float32), "table"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("read", onnx.TensorProto.FLOAT, None))
    hints = [finding.what for finding in diagnose(model, output="y") if "begin at a constant" in finding.what]
    assert [re.search(r"constant \((\d), in \w+\) whatever the length of its KV cache", hint)[1] for hint in hints] == (
        [str(expected)] if expected else []
    )


@pytest.mark.plugins
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("folded", [True, False])
def test_a_constant_cache_length_gets_a_hint(folded: bool, tmp_path: Path) -> None:
    from onnxtrain.plugins.doctor.diagnosis import diagnose

    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        vocab_size=17, hidden_size=8, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=8
    )
    network = transformers.OPTForCausalLM(config).eval()

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens, key, value):
            cache = transformers.DynamicCache()
            cache.update(key, value, 0)
            length = int(key.shape[2]) if folded else key.shape[2]
            positions = torch.arange(length, length + tokens.shape[1])[None]
            return self.network(tokens, past_key_values=cache, position_ids=positions, use_cache=True).logits

    path, past = tmp_path / "opt.onnx", torch.zeros(1, 2, 3, 4)
    torch.onnx.export(
        Cached(),
        (torch.zeros(1, 4, dtype=torch.int64), past, past),
        path,
        dynamo=False,
        input_names=["input_ids", *NAMES[:2]],
        output_names=["logits"],
        dynamic_axes={"input_ids": {0: "b", 1: "t"}} | {name: {0: "b", 2: "p"} for name in NAMES[:2]},
    )
    sentence = (
        r"begin at a constant \(5, in .*most likely the exporter wrote.*Export without a cache"  # 2 are OPT's own
    )
    with pytest.warns(TrainingHint, match=sentence) if folded else contextlib.nullcontext():
        trainer = onnxtrain.Trainer(path, loss="cross_entropy", output="logits")
    assert any(re.search(sentence, hint) for hint in trainer.hints) == folded
    assert any(re.search(sentence, found.what) for found in diagnose(path)) == folded


class _Dataset:
    """Dataset with the interface of Hugging Face datasets."""

    __module__ = "datasets"
    features: ClassVar[dict[str, Any]] = {}

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns

    @property
    def column_names(self) -> list[str]:
        return [*self._columns]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def select_columns(self, names: list[str]) -> _Dataset:
        return _Dataset({name: self._columns[name] for name in names})

    def with_format(self, _: None) -> _Dataset:
        return self

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        return {name: [column[row] for row in key] for name, column in self._columns.items()}


def test_a_hugging_face_dataset_may_have_columns_of_pasts_without_rows() -> None:
    ids = np.array([[0, 1, 2], [2, 1, 0]])
    trainer = onnxtrain.Trainer(_merged(), loss="cross_entropy", output="logits")
    columns = {"input_ids": ids.tolist(), "labels": ids.tolist()}
    empty = columns | {"past_key_values_0_key": [[[]], [[]]]}
    filled = columns | {"past_key_values_0_key": np.zeros((2, 1, 3, 4)).tolist()}
    expected = trainer.evaluate(_Dataset(columns), target="labels")
    assert trainer.evaluate(_Dataset(empty), target="labels") == expected
    with raises_sentence("kv_cache_in_data", what="past_key_values_0_key", got=(2, 1, 3, 4), subject="the dataset"):
        trainer.evaluate(_Dataset(filled), target="labels")


def _t5(transformers: Any) -> Any:
    config = transformers.T5Config(
        vocab_size=17, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_decoder_layers=2, num_heads=2, dropout_rate=0.0
    )
    return transformers.T5ForConditionalGeneration(config)


def _whisper(transformers: Any) -> Any:
    config = transformers.WhisperConfig(
        vocab_size=17, d_model=8, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_ffn_dim=16,
        decoder_attention_heads=2, encoder_ffn_dim=16, max_target_positions=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, dropout=0.0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [_t5, _whisper])
def test_decoders_with_pasts_of_the_encoder_and_merged(build: Any, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    network = build(transformers).eval()
    names = [
        f"past_key_values.{layer}.{side}.{kind}"
        for layer in range(2)
        for side in ("decoder", "encoder")
        for kind in ("key", "value")
    ]

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens, hidden, *caches):
            own, cross = transformers.DynamicCache(), transformers.DynamicCache()
            cache = transformers.EncoderDecoderCache(own, cross)
            for layer in range(2) if caches else ():
                own.update(*caches[4 * layer : 4 * layer + 2], layer)
                cross.update(*caches[4 * layer + 2 : 4 * layer + 4], layer)
                cache.is_updated[layer] = True
            found = self.network(
                decoder_input_ids=tokens, encoder_outputs=(hidden,), past_key_values=cache, use_cache=True
            )
            parts = [part.layers[layer] for layer in range(2) for part in (own, cross)]
            return (found.logits, *(each for part in parts for each in (part.keys, part.values)))

    tokens, hidden = torch.zeros(1, 4, dtype=torch.int64), torch.randn(1, 5, 8)
    caches = [torch.randn(1, 2, 5 if "encoder" in name else 3, 4) for name in names]
    shapes = {name: {0: "b", 2: "e" if "encoder" in name else "p"} for name in names}
    shapes |= {"input_ids": {0: "b", 1: "t"}, "encoder_hidden_states": {0: "b", 1: "e"}, "logits": {0: "b", 1: "t"}}
    for path, given in (("no_past.onnx", []), ("with_past.onnx", names)):
        torch.onnx.export(
            Decoder(),
            (tokens, hidden, *(caches if given else ())),
            tmp_path / path,
            dynamo=False,
            input_names=["input_ids", "encoder_hidden_states", *given],
            output_names=["logits", *(name.replace("past_key_values", "present") for name in names)],
            dynamic_axes=shapes,
        )
    network.eval()
    ids = torch.arange(10).reshape(2, 5) % 17
    states = torch.randn(2, 6, 8)
    with torch.no_grad():
        logits = network(decoder_input_ids=ids, encoder_outputs=(states,)).logits
    wanted = torch.nn.functional.cross_entropy(logits.reshape(-1, 17), ids.reshape(-1)).item()

    no_past, with_past = onnx.load(tmp_path / "no_past.onnx"), onnx.load(tmp_path / "with_past.onnx")
    empty = {name: np.zeros((2, 2, 0, 4), np.float32) for name in names}
    run = onnxruntime.InferenceSession(tmp_path / "no_past.onnx").run
    feeds = {"input_ids": ids.numpy(), "encoder_hidden_states": states.numpy()}
    made = dict(zip([output.name for output in no_past.graph.output], run(None, feeds), strict=True))
    encoder = {name: made[name.replace("past_key_values", "present")] for name in names if "encoder" in name}

    trainer = onnxtrain.Trainer(with_past, loss="cross_entropy", output="logits")
    assert any("4: past_key_values.0.encoder.key, " in hint for hint in trainer.hints)
    assert not any("begin at a constant" in hint for hint in trainer.hints)
    for data in (encoder, empty | encoder):
        found = trainer.evaluate({"input_ids": ids.numpy(), **data}, ids.numpy())
        assert found["loss"] == pytest.approx(wanted, rel=1e-5)

    onnx.save(_merge(no_past, with_past), tmp_path / "merged.onnx")
    removed = remove_cache_inputs(ModelFile.load(tmp_path / "merged.onnx").training_model())
    assert removed == [*names, "use_cache_branch"]
    trainer = onnxtrain.Trainer(tmp_path / "merged.onnx", loss="cross_entropy", output="logits")
    assert trainer.evaluate(feeds, ids.numpy())["loss"] == pytest.approx(wanted, rel=1e-5)
    trainer.fit(feeds, ids.numpy(), epochs=2, progress=False)
    trainer.save(tmp_path / "saved.onnx")
    run = onnxruntime.InferenceSession(tmp_path / "saved.onnx").run
    flag = {"use_cache_branch": np.array([False])}
    outputs = [output.name for output in no_past.graph.output]
    first = dict(zip(outputs, run(None, {**feeds, **empty, **flag, "input_ids": ids.numpy()[:, :4]}), strict=True))
    cache = {name: first[name.replace("past_key_values", "present")] for name in names}
    flag = {"use_cache_branch": np.array([True])}
    (last,) = run(["logits"], {**feeds, **cache, **flag, "input_ids": ids.numpy()[:, 4:]})
    found = trainer.predict(feeds)
    np.testing.assert_allclose(last[:, 0], found["logits"][:, 4], atol=1e-4)


def _merge(without: onnx.ModelProto, with_cache: onnx.ModelProto) -> onnx.ModelProto:
    """Merge two decoders as optimum does: one If on use_cache_branch, and one copy of each large weight."""
    known: dict[bytes, str] = {}
    outside, branches = [], []
    for prefix, model in (("a", without), ("b", with_cache)):
        names, inside = {}, []
        for tensor in model.graph.initializer:
            content = tensor.SerializeToString().replace(tensor.name.encode(), b"")
            if not tensor.dims:
                inside.append(tensor)
                continue
            names[tensor.name] = known.setdefault(content, f"{prefix}/{tensor.name}")
            if names[tensor.name].startswith(prefix):
                tensor.name = names[tensor.name]
                outside.append(tensor)
        for node in model.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
        branches.append(onnx.helper.make_graph(model.graph.node, prefix, [], model.graph.output, inside))
    inputs = {value.name: value for model in (without, with_cache) for value in model.graph.input}
    flag = onnx.helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    outputs = [output.name for output in without.graph.output]
    node = onnx.helper.make_node(
        "If", [flag.name], outputs, "optimum::if", then_branch=branches[1], else_branch=branches[0]
    )
    graph = onnx.helper.make_graph([node], "merged", [*inputs.values(), flag], without.graph.output, outside)
    return onnx.helper.make_model(graph, opset_imports=without.opset_import, ir_version=without.ir_version)


def test_left_padding_is_refused_where_attention_counts_the_tokens_of_a_row() -> None:
    from zoo.language_model import WORDS, language_model

    ids = np.random.default_rng(0).integers(0, WORDS, (3, 5))
    model = language_model()
    trainer = onnxtrain.Trainer(model, loss="next_token", output="logits")
    right = np.array([[1] * 5, [1] * 3 + [0] * 2, [1] + [0] * 4])
    trainer.evaluate({"input_ids": ids, "attention_mask": right}, ids)
    for row in ([0, 0, 1, 1, 1], [1, 1, 0, 1, 0], [0] * 5):
        data = {"input_ids": ids, "attention_mask": np.array([[1] * 5, row, [1] * 5])}
        for use in (
            lambda data=data: trainer.evaluate(data, ids),
            lambda data=data: trainer.train_step(data, ids),
            lambda data=data: trainer.fit(data, ids, progress=False),
            lambda data=data: trainer.predict(data),
            lambda data=data: onnxtrain.predict(model, data),
            lambda data=data: trainer.evaluate(lambda: iter([(data, ids)])),
        ):
            with raises_sentence("padded_on_the_left", example=1):
                use()


@pytest.mark.parametrize("length", [1, 3, 7])
def test_masks_have_the_length_of_the_tokens_where_the_cache_is_empty(length: int) -> None:
    from zoo.language_model import WORDS, language_model

    ids, model = np.random.default_rng(0).integers(0, WORDS, (3, 5)), language_model()
    trainer = onnxtrain.Trainer(model, loss="next_token", output="logits")
    data = {"input_ids": ids, "attention_mask": np.ones((3, length), int)}
    for use in (
        lambda: trainer.evaluate(data, ids),
        lambda: trainer.train_step(data, ids),
        lambda: trainer.fit(data, ids, progress=False),
        lambda: trainer.predict(data),
        lambda: onnxtrain.predict(model, data),
        lambda: trainer.evaluate(lambda: iter([(data, ids)])),
    ):
        with pytest.raises(DataError, match=rf"'attention_mask'.* has {length} for .*'input_ids'.* has 5"):
            use()
