"""Texts with a tokenizer: ids, masks and type ids as the tokenizer gives them."""

import json
import logging

import numpy as np
import pytest

import onnxtrain
from onnxtrain.data import TensorSpec, TextFile, open_dataset
from onnxtrain.data.tokenizer import Encoded, cut_text
from onnxtrain.errors import DataError, OptionError
from sentences import raises_sentence

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers are not installed")

TEXTS = ["the cat sat", "a dog", "the dog sat on the cat", "unknown words"]
VOCABULARY = {word: index for index, word in enumerate(("[PAD]", "[UNK]", "the", "cat", "sat", "a", "dog", "on"))}


def spec(name, length=None, dtype=np.int64):
    return TensorSpec(name, np.dtype(dtype), ("N", length))


@pytest.fixture
def tokenizer(tmp_path):
    model = tokenizers.models.WordLevel(VOCABULARY, unk_token="[UNK]")
    found = tokenizers.Tokenizer(model)
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.enable_truncation(2)  # not used
    found.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def table(tmp_path):
    rows = "\n".join(f'"{text}",{label}' for text, label in zip(TEXTS, "abab", strict=True))
    (tmp_path / "d.csv").write_text(f"text,kind\n{rows}\n")
    return tmp_path / "d.csv"


def read(source, *specs, **options):
    (batch,) = open_dataset(source, specs, **options).batches(10)
    return batch


IDS = [[2, 3, 4, 0, 0, 0], [5, 6, 0, 0, 0, 0], [2, 6, 4, 7, 2, 3], [1, 1, 0, 0, 0, 0]]


def test_inputs_of_a_language_model(table, tokenizer):
    specs = [spec("input_ids"), spec("attention_mask"), spec("token_type_ids"), spec("position_ids", dtype=np.int32)]
    batch = read(TextFile(table, tokenizer), *specs, target="kind")
    assert batch.inputs["input_ids"].tolist() == IDS
    assert batch.inputs["input_ids"].dtype == np.int64
    assert batch.inputs["attention_mask"].tolist() == (np.array(IDS) > 0).astype(int).tolist()
    assert not batch.inputs["token_type_ids"].any()
    assert batch.inputs["position_ids"].tolist() == [list(range(6))] * 4
    assert batch.targets.tolist() == [*"abab"]


LEFT = [[0, 0, 0, 2, 3, 4], [0, 0, 0, 0, 5, 6], [2, 6, 4, 7, 2, 3], [0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize("told_by", ["tokenizer_config.json", "tokenizer.json", "object"])
def test_texts_are_padded_and_cut_where_the_author_did(table, tokenizer, told_by, caplog):
    """A model that reads the last position reads padding otherwise."""
    given = tokenizer
    if told_by == "tokenizer_config.json":
        settings = {"padding_side": "left", "truncation_side": "left", "pad_token": {"content": "on"}}
        (tokenizer.parent / told_by).write_text(json.dumps(settings))
    else:
        own = tokenizers.Tokenizer.from_file(str(tokenizer))
        own.enable_padding(direction="left", pad_id=7)
        own.enable_truncation(2, direction="left")
        own.save(str(tokenizer))
        given = own if told_by == "object" else tokenizer
    specs = [spec("input_ids"), spec("attention_mask"), spec("position_ids")]
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        found = read(TextFile(table, given), *specs, target="kind").inputs
    assert "Texts are padded and cut on the left, as the tokenizer's settings say." in caplog.text
    mask = (np.array(LEFT) > 0).astype(int)
    assert found["input_ids"].tolist() == np.where(mask, LEFT, 7).tolist()
    assert found["attention_mask"].tolist() == mask.tolist()
    assert found["position_ids"].tolist() == np.maximum(mask.cumsum(1) - 1, 0).tolist()
    short = read(TextFile(table, given, length=2), spec("input_ids"), target="kind").inputs["input_ids"]
    assert short.tolist() == [[3, 4], [5, 6], [2, 3], [1, 1]]


def test_a_cut_on_the_left_keeps_added_tokens():
    ids = np.array([101, 7, 8, 9, 102])
    starts, ends = np.array([0, 0, 2, 4, 0]), np.array([0, 1, 3, 5, 0])
    text = Encoded(ids, np.zeros(5, int), starts, ends)
    for limit, expected in ((5, ids.tolist()), (4, [101, 8, 9, 102]), (3, [101, 9, 102]), (2, [101, 102])):
        assert cut_text(text, limit, left=True).ids.tolist() == expected


@pytest.mark.parametrize("settings", ["[]", "{", '{"padding_side": 3, "pad_token": "none of the vocabulary"}'])
def test_other_settings_change_nothing(table, tokenizer, settings):
    (tokenizer.parent / "tokenizer_config.json").write_text(settings)
    assert read(TextFile(table, tokenizer), spec("tokens"), target="kind").inputs["tokens"].tolist() == IDS


@pytest.mark.parametrize(("length", "fixed"), [(4, None), (None, 4), (4, 4)])
def test_lengths(table, tokenizer, length, fixed):
    found = tokenizers.Tokenizer.from_file(str(tokenizer))
    batch = read(TextFile(table, found, length=length), spec("tokens", fixed), target="kind")
    assert batch.inputs["tokens"].tolist() == [row[:4] for row in IDS]
    assert found.truncation is not None  # it is the caller's


@pytest.mark.parametrize("template", ["$A", "$A [END]", "[START] $A [END]", "[START] $A [END] [START]"])
def test_texts_are_cut_as_the_tokenizer_cuts_them(table, tokenizer, template):
    """The tokens that the tokenizer adds at the end of a text stay, as in truncation=True of transformers."""
    found = tokenizers.Tokenizer.from_file(str(tokenizer))
    found.add_special_tokens(["[START]", "[END]"])
    added = [(name, found.token_to_id(name)) for name in ("[START]", "[END]")]
    found.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=added)
    found.no_truncation()
    found.save(str(tokenizer))
    for length in range(template.count("[") + 1, 10):
        found.enable_truncation(length)
        expected = [each.ids + [0] * (length - len(each.ids)) for each in found.encode_batch(TEXTS)]
        for given in (found, tokenizer):
            batch = read(TextFile(table, given, length=length), spec("ids"), spec("mask"), target="kind")
            assert batch.inputs["ids"].tolist() == expected
            assert batch.inputs["mask"].tolist() == (np.array(expected) > 0).astype(int).tolist()
    shortest = read(TextFile(table, tokenizer, length=1), spec("ids"), target="kind").inputs["ids"]
    assert shortest.tolist() == [[found.encode(text).ids[0]] for text in TEXTS]


def test_lines_of_a_file(tmp_path, tokenizer):
    (tmp_path / "d.txt").write_text("\n".join(TEXTS))
    assert read(TextFile(tmp_path / "d.txt", tokenizer), spec("ids"), need_target=False).inputs["ids"].tolist() == IDS
    with raises_sentence("text_without_targets", what=f"'{tmp_path}/d.txt'"):
        read(TextFile(tmp_path / "d.txt", tokenizer), spec("ids"))


def test_a_model_learns_from_texts(table, tokenizer):
    onnx = pytest.importorskip("onnx")
    rng = np.random.default_rng(0)
    table_of, head = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 5), (5, 2)))
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> f (int64[N, T] input_ids) => (float[N, 2] logits) '
        "{ e = Gather(table, input_ids) axis = Constant<value_ints = [1]>() m = ReduceMean<keepdims = 0>(e, axis) "
        "logits = MatMul(m, head) }"
    )
    model.graph.initializer.extend(
        [onnx.numpy_helper.from_array(table_of, "table"), onnx.numpy_helper.from_array(head, "head")]
    )
    trainer = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(0.05))
    trainer.fit(TextFile(table, tokenizer), target="kind", epochs=40)
    assert trainer.labels == ("a", "b")
    assert trainer.evaluate(TextFile(table, tokenizer), target="kind", metrics="accuracy")["accuracy"] == 1


def test_mismatches(table, tokenizer, tmp_path):
    with raises_sentence("text_inputs", inputs="'a', 'b'"):
        read(TextFile(table, tokenizer), spec("a"), spec("b"), target="kind")
    with pytest.raises(DataError, match=r"'image' is float32 \(batch, 4\)"):
        read(TextFile(table, tokenizer), spec("image", 4, np.float32), target="kind")
    with raises_sentence("no_column_of_rank", what="words", wanted=(None,)):
        read(TextFile(table, tokenizer, text="words"), spec("ids"), target="kind")
    with raises_sentence("no_tokenizer_file", what=f"'{tmp_path}/no.json'"):
        read(TextFile(table, tmp_path / "no.json"), spec("ids"), target="kind")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json' is not a tokenizer\.json"):
        read(TextFile(table, tmp_path / "bad.json"), spec("ids"), target="kind")
    with pytest.raises(OptionError, match="tokenizer is a int; it needs the path"):
        read(TextFile(table, 3), spec("ids"), target="kind")
    with pytest.raises(OptionError, match="length is 0"):
        TextFile(table, tokenizer, length=0)
    with raises_sentence("text_length", what="length", got=3, wanted=4):
        read(TextFile(table, tokenizer, length=3), spec("ids", 4), target="kind")


def test_blank_texts_are_told_and_texts_without_tokens_refused(tmp_path, tokenizer, caplog):
    rows = ["the cat", " ", "", "a dog"]
    lines = [f'"{text}",{label}' for text, label in zip(rows, "abab", strict=True)]
    (tmp_path / "blank.csv").write_text("\n".join(["text,kind", *lines]))
    with raises_sentence("text_without_tokens", what=f"'{tmp_path}/blank.csv'", got=" ", example=1):
        read(TextFile(tmp_path / "blank.csv", tokenizer), spec("tokens"), target="kind")
    found = tokenizers.Tokenizer.from_file(str(tokenizer))
    found.post_processor = tokenizers.processors.TemplateProcessing(single="a $A", special_tokens=[("a", 5)])
    with caplog.at_level("WARNING", "onnxtrain"):
        batch = read(TextFile(tmp_path / "blank.csv", found), spec("tokens"), target="kind")
    assert batch.inputs["tokens"].tolist() == [[5, 2, 3], [5, 0, 0], [5, 0, 0], [5, 5, 6]]
    assert "2 of 4 texts in" in caplog.text
    assert "are blank, the first at example 1." in caplog.text


def test_only_line_breaks_end_the_texts_of_a_file(tmp_path, tokenizer):
    (tmp_path / "d.txt").write_bytes("the\u2028cat\r\na\x0cdog\nthe\x85dog\n".encode())
    batch = read(TextFile(tmp_path / "d.txt", tokenizer), spec("tokens"), need_target=False)
    assert batch.inputs["tokens"].tolist() == [[2, 3], [5, 6], [2, 6]]
