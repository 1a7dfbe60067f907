"""Packed sequences: contents of a row, and the same training as with one sequence per row."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.data import open_dataset, pack
from onnxtrain.data.conversion import TensorSpec
from onnxtrain.errors import DataError, OptionError

WORDS, WIDTH, LONGEST = 17, 8, 7
RNG = np.random.default_rng(0)
SEQUENCES = [RNG.integers(0, WORDS, size) for size in (7, 3, 2, 5, 4, 1, 6, 2)]


def spec(name, dtype=np.int64, shape=("N", "T")):
    return TensorSpec(name, np.dtype(dtype), shape)


def test_what_is_in_a_row():
    packed = pack(SEQUENCES, 10, padding=16, labels=[np.where(s % 5, s, -100) for s in SEQUENCES])
    rows = packed.rows(range(len(packed)))
    found = []
    for ids, positions, segments, mask, labels in zip(*rows.values(), strict=True):
        for number in range(1, segments.max() + 1):
            own = segments == number
            assert positions[own].tolist() == list(range(own.sum()))
            assert labels[own].tolist() == [-100, *np.where(ids[own] % 5, ids[own], -100)[1:]]
            found.append(ids[own].tolist())
        assert (ids[segments == 0] == 16).all()
        assert (labels[segments == 0] == -100).all()
        for place in range(10):
            seen = [other for other in range(place + 1) if segments[other] == segments[place]]
            assert np.flatnonzero(mask[0, place]).tolist() == seen
    wanted = [s.tolist() for s in SEQUENCES if len(s) > 1]
    assert sorted(found) == sorted(wanted)
    assert len(packed) == 3  # 29 tokens
    assert packed.filled == pytest.approx(29 / 30)


def test_rows_are_as_full_as_they_can_be():
    packed = pack([np.ones(size) > 0 for size in ()] + [np.zeros(size, int) for size in (6, 2, 4, 4, 8, 2, 6)], 8)
    assert (len(packed), packed.filled) == (4, 1.0)


def test_long_sequences_are_split_into_rows():
    packed = pack([np.arange(23)], 10)
    assert [row["input_ids"].tolist() for row in packed][:2] == [list(range(10)), list(range(10, 20))]
    assert packed[2]["input_ids"][:3].tolist() == [20, 21, 22]
    assert packed[2]["labels"][:4].tolist() == [-100, 21, 22, -100]


def attention(mask):
    """A causal transformer of one layer that reads tokens, positions and a mask; logits [N, T, WORDS]."""
    bias = {"float": "b = Identity(attention_mask)", "bool": "b = Where(attention_mask, nothing, lowest)"}[mask]
    made = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        f (int64[N, T] input_ids, int64[N, T] position_ids, {mask}[N, 1, T, T] attention_mask)
          => (float[N, T, {WORDS}] logits) {{
            e = Gather(words, input_ids)  p = Gather(places, position_ids)  x = Add(e, p)
            q = MatMul(x, wq)  k = MatMul(x, wk)  v = MatMul(x, wv)
            q4 = Unsqueeze(q, one)  k4 = Unsqueeze(k, one)  v4 = Unsqueeze(v, one)
            kt = Transpose <perm = [0, 1, 3, 2]> (k4)  s = MatMul(q4, kt)  {bias}  t = Add(s, b)
            a = Softmax <axis = -1> (t)  o = MatMul(a, v4)  y = Squeeze(o, one)  z = Add(x, y)
            logits = MatMul(z, head) }}"""
    )
    rng = np.random.default_rng(1)
    shapes = {"words": (WORDS, WIDTH), "places": (LONGEST, WIDTH), "head": (WIDTH, WORDS)}
    shapes |= dict.fromkeys(("wq", "wk", "wv"), (WIDTH, WIDTH))
    arrays = {name: rng.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    arrays |= {"one": np.array([1]), "nothing": np.float32(0), "lowest": np.float32(-1e9)}
    read = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items() if n in read)
    return made


def alone(sequences, mask):
    """Put each sequence in a separate row, with padding behind it."""
    shape = (len(sequences), LONGEST)
    ids, labels = np.zeros(shape, np.int64), np.full(shape, -100)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)] = labels[row, : len(tokens)] = tokens
    causal = np.tril(np.ones((LONGEST, LONGEST), bool))
    causal = causal if mask == "bool" else np.where(causal, 0, -1e9).astype(np.float32)
    masks = np.broadcast_to(causal, (len(sequences), 1, LONGEST, LONGEST))
    positions = np.tile(np.arange(LONGEST), (len(sequences), 1))
    return {"input_ids": ids, "position_ids": positions, "attention_mask": masks, "labels": labels}


@pytest.mark.parametrize("kernels", [False, None])
@pytest.mark.parametrize("mask", ["float", "bool"])
def test_a_step_is_that_of_the_sequences_alone(mask, kernels):
    found = []
    for data in (alone(SEQUENCES, mask), pack(SEQUENCES, 11)):
        options = onnxtrain.RuntimeOptions(kernels=kernels)
        made = onnxtrain.Trainer(attention(mask), loss="next_token", optimizer="sgd(lr=0.5)", runtime=options, seed=0)
        before = made.evaluate(data)["loss"]
        history = made.fit(data, epochs=1, batch_size=100, progress=False)
        found.append(([before, history.rows[-1]["loss"]], made.parameters))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    for name, value in found[0][1].items():
        np.testing.assert_allclose(value, found[1][1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_keeps_sequences_apart_by_positions(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    class Logits(torch.nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, input_ids, position_ids):
            return self.network(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    network = transformers.LlamaForCausalLM(config).eval()
    example = torch.zeros(2, 8, dtype=torch.int64)
    dims = {0: torch.export.Dim("N"), 1: torch.export.Dim("T", max=32)}
    torch.onnx.export(
        Logits(network),
        (example, torch.arange(8).tile(2, 1)),
        tmp_path / "llama.onnx",
        input_names=["input_ids", "position_ids"],
        output_names=["logits"],
        dynamic_shapes=(dims, dims),
        external_data=False,
        verbose=False,
    )
    terms = []
    for tokens in (torch.tensor(sequence)[None] for sequence in SEQUENCES if len(sequence) > 1):
        logits = network(tokens).logits[0, :-1]
        terms.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none"))
    wanted = torch.cat(terms).mean().item()
    found = onnxtrain.evaluate(tmp_path / "llama.onnx", pack(SEQUENCES, 11), loss="next_token", batch_size=2)
    assert found["loss"] == pytest.approx(wanted, rel=1e-5)
    trainer = onnxtrain.Trainer(tmp_path / "llama.onnx", loss="next_token", optimizer="adamw(lr=0.01)")
    history = trainer.fit(pack(SEQUENCES, 11), epochs=5, batch_size=2, progress=False)
    assert history.rows[-1]["loss"] < wanted


def test_inputs_by_name():
    specs = [spec("tokens"), spec("my_segments"), spec("mask", np.int32, ("N", "T", "T"))]
    data = open_dataset(pack(SEQUENCES, 8), specs)
    batch = next(iter(data.batches(2)))
    assert batch.inputs["mask"].shape == (2, 8, 8)
    assert batch.inputs["mask"].dtype == np.int32
    assert set(np.unique(batch.inputs["mask"])) == {0, 1}
    assert batch.inputs["my_segments"].max() >= 1
    assert batch.targets.shape == (2, 8)
    again = open_dataset(pack(SEQUENCES, 8), specs)
    assert data.fingerprint() == again.fingerprint() != open_dataset(pack(SEQUENCES, 9), specs).fingerprint()
    assert next(iter(open_dataset(pack(SEQUENCES, 8), specs, need_target=False).batches(2))).targets is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: pack(SEQUENCES, 1), OptionError, "length is 1; a row needs at least 2 tokens"),
        (lambda: pack(SEQUENCES, 10**12), OptionError, "length is 1,000,000,000,000; a row has at most 16,777,216"),
        (lambda: pack([[1], [2]], 8), DataError, "There is no sequence of two tokens or more to pack"),
        (lambda: pack([[1, 2], [0.5, 1.0]], 8), DataError, "sequence 1 has the type float64 .* integers"),
        (lambda: pack([[[1, 2]]], 8), DataError, r"sequence 0 has the type int64 and the shape \(1, 2\)"),
        (lambda: pack([[1, 2]], 8, labels=[]), DataError, "labels has 0 sequences, but there are 1"),
        (lambda: pack([[1, 2]], 8, labels=[[1]]), DataError, "labels 0 has 1 numbers, but sequence 0 has 2 tokens"),
        (
            lambda: open_dataset(pack([[1, 2]], 8), [spec("input_ids")]),
            DataError,
            "the model reads 'input_ids' only, so that nothing tells its attention where a sequence of a row begins",
        ),
        (
            lambda: open_dataset(pack([[1, 2]], 8), [spec("input_ids"), spec("attention_mask")]),
            DataError,
            "the mask 'attention_mask' has shape .* which marks padding only",
        ),
        (
            lambda: open_dataset(pack([[1, 2]], 8), [spec("a"), spec("b"), spec("position")]),
            DataError,
            "packed sequences need one model input for token ids, but the model's inputs are 'a', 'b', 'position'",
        ),
    ],
)
def test_sequences_that_cannot_be_packed_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
