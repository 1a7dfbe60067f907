"""Models of onnxruntime-genai: slots in its builder's models, and generation with adapters."""

import json
import subprocess
import sys

import numpy as np
import pytest

import onnxtrain
from onnxtrain import Lora
from onnxtrain.adapters import add_slots, convert_adapter, merge_adapter
from onnxtrain.adapters.layers import find_layers
from onnxtrain.adapters.values import matrix
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model_file.file import ModelFile
from sentences import raises_sentence

torch = pytest.importorskip("torch")
genai = pytest.importorskip("onnxruntime_genai")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from adapters.test_peft import adapted, llama, losses_of_peft  # noqa: E402 - it needs them, too

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

TOKENS = np.arange(3, 12, dtype=np.int32)


@pytest.fixture(scope="module", params=["fp32", pytest.param("int4", marks=pytest.mark.thorough)])
def folder(request, tmp_path_factory):
    """Files that the builder writes for a small Llama."""
    parent = tmp_path_factory.mktemp("genai")
    model = llama()
    model.config.bos_token_id, model.config.eos_token_id = 1, 2
    model.save_pretrained(parent / "checkpoint")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(97)}, unk_token="t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t0"
    )
    fast.save_pretrained(parent / "checkpoint")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", "checkpoint", "-o", request.param]
    command += ["-p", request.param, "-e", "cpu", "-c", "cache"]
    subprocess.run(command, cwd=parent, check=True, capture_output=True)
    return parent / request.param


def logits(folder, adapter=None):
    """Logits of onnxruntime-genai for the tokens."""
    model = genai.Model(str(folder))
    generator = genai.Generator(model, genai.GeneratorParams(model))
    loaded = genai.Adapters(model)  # as long as the generator
    if adapter is not None:
        loaded.load(str(adapter), "tuned")
        generator.set_active_adapter(loaded, "tuned")
    generator.append_tokens(TOKENS[None])
    return np.array(generator.get_output("logits"))


def with_model(folder, copy):
    """The folder of a generative model with another model in it."""
    copy.mkdir()
    for path in folder.iterdir():
        if not path.name.startswith("model.onnx"):
            (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_it_generates_with_an_adapter_of_peft(folder, tmp_path):
    tuned, first = adapted(tmp_path)
    convert_adapter(folder / "model.onnx", first, tmp_path / "tuned.onnx_adapter")
    copy = with_model(folder, tmp_path / "slots")
    names = add_slots(folder / "model.onnx", copy / "model.onnx")
    assert "model.layers.1.self_attn.o_proj" in names
    base, slots = logits(folder), logits(copy)
    assert slots.tobytes() == base.tobytes()
    got = logits(copy, tmp_path / "tuned.onnx_adapter")
    assert np.abs(got - base).max() > 0.01
    if folder.name == "fp32":
        with torch.no_grad():
            expected = tuned(input_ids=torch.from_numpy(TOKENS[None].astype(np.int64)), use_cache=False).logits.numpy()
        np.testing.assert_allclose(got, expected[:, -got.shape[1] :], atol=1e-5)


SONG = [11, 42, 7, 90, 23, 64]
"""Words that a tuned model sings, again and again."""


def sung(folder, adapter=None):
    """The tokens generated after the first two."""
    model = genai.Model(str(folder))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=12, do_sample=False)
    generator = genai.Generator(model, settings)
    loaded = genai.Adapters(model)
    if adapter is not None:
        loaded.load(str(adapter), "tuned")
        generator.set_active_adapter(loaded, "tuned")
    generator.append_tokens(np.array([SONG[:2]], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(word) for word in generator.get_sequence(0)][2:]


@pytest.mark.parametrize("form", ["adapter", "merged", "whole"])
def test_from_a_folder_to_a_tuned_folder_that_generates(folder, tmp_path, form):
    """Run the commands of docs/genai.md."""
    ids = np.stack([np.roll(SONG * 4, -row)[:20] for row in range(8)])
    mask = np.ones_like(ids)
    mask[:2, 15:] = 0
    words = {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask == 1, ids, -100)}
    whole = form == "whole"
    if whole and folder.name == "int4":
        pytest.skip("weights of 4 bits are not trained themselves")
    trainer = onnxtrain.Trainer(
        folder / "model.onnx",
        loss="next_token(chunk=64)",
        output="logits",
        optimizer="adamw(lr=1e-2)",
        lora=None if whole else Lora(rank=8, alpha=16, targets="*"),
        seed=0,
    )
    history = trainer.fit(words, epochs=40, batch_size=4, progress=False)
    assert history.rows[-1]["loss"] < 0.5
    copy = with_model(folder, tmp_path / "tuned")
    if form == "adapter":
        trainer.save(copy / "song.onnx_adapter")
        add_slots(folder / "model.onnx", copy / "model.onnx", adapter=copy / "song.onnx_adapter")
    elif whole or folder.name == "fp32":
        trainer.save(copy / "model.onnx")
    else:
        trainer.save(copy / "song.onnx_adapter")
        merge_adapter(folder / "model.onnx", copy / "song.onnx_adapter", copy / "model.onnx", requantize=True)
    got = sung(copy, copy / "song.onnx_adapter" if form == "adapter" else None)
    assert len(got) == 10
    if form == "adapter" or folder.name == "fp32":
        assert got == (SONG * 3)[2:12]
        assert sung(folder)[:3] != got[:3]
    else:  # requantization loses half of the adapter, and the text is not generated any more
        assert loss_of(copy, words) < 0.85 * loss_of(folder, words)
    if form == "adapter":
        assert sung(copy) == sung(folder)


def loss_of(folder, words):
    settings = {"loss": "next_token(chunk=64)", "output": "logits", "lora": Lora(rank=1, alpha=1, targets="*")}
    return onnxtrain.Trainer(folder / "model.onnx", **settings).evaluate(words, batch_size=4)["loss"]


def test_the_command_of_the_page(folder, tmp_path):
    ids = np.stack([np.roll(SONG * 4, -row)[:20] for row in range(4)])
    np.savez(tmp_path / "train.npz", input_ids=ids, attention_mask=np.ones_like(ids), labels=ids)
    command = [sys.executable, "-m", "onnxtrain", "fit", str(folder / "model.onnx"), "--data", "train.npz"]
    command += ["--loss", "next_token", "--chunk", "16", "--prediction", "logits", "--optimizer", "adamw"]
    command += ["--learning-rate", "1e-2", "--lora", "8", "--lora-alpha", "16", "--epochs", "3", "--batch-size", "2"]
    command += ["--output", "tuned.onnx_adapter"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    copy = with_model(folder, tmp_path / "tuned")
    add_slots(folder / "model.onnx", copy / "model.onnx")
    assert np.abs(logits(copy, tmp_path / "tuned.onnx_adapter") - logits(folder)).max() > 1e-3


@pytest.mark.plugins
def test_from_a_text_file_to_an_adapter_that_generates(folder, tmp_path):
    words = [f"t{word}" for word in SONG * 4]
    rows = [
        {"prompt": " ".join(words[at : at + 2]), "completion": " " + " ".join(words[at + 2 : at + 14])}
        for at in range(6)
    ]
    (tmp_path / "song.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    copy = with_model(folder, tmp_path / "tuned")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(97)}, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # the folder's reads t11 as its special token t1
    tokenizer.save(str(tmp_path / "words.json"))
    command = [
        sys.executable,
        "-m",
        "onnxtrain",
        "fit",
        str(folder),
        "--tokenizer",
        "words.json",
        "--data",
        "song.jsonl",
        "--loss",
        "next_token",
    ]
    command += ["--optimizer", "adamw(lr=1e-2)", "--lora", "8", "--lora-alpha", "16", "--lora-targets", "*"]
    command += ["--epochs", "40", "--batch-size", "4", "--validation", "0.1", "-o", "tuned/song.onnx_adapter"]
    shown = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "validation perplexity" in shown
    assert "tokens/s" in shown
    add_slots(folder / "model.onnx", copy / "model.onnx", adapter=copy / "song.onnx_adapter")
    assert sung(copy, copy / "song.onnx_adapter") == (SONG * 3)[2:12]


def test_merging(folder, tmp_path):
    tuned, first = adapted(tmp_path)
    copy = with_model(folder, tmp_path / "merged")
    if folder.name == "fp32":
        merge_adapter(folder / "model.onnx", first, copy / "model.onnx")
        with torch.no_grad():
            expected = tuned(input_ids=torch.from_numpy(TOKENS[None].astype(np.int64)), use_cache=False).logits.numpy()
        got = logits(copy)
        np.testing.assert_allclose(got, expected[:, -got.shape[1] :], atol=1e-5)
        return
    with raises_sentence("adapter_does_not_fit_bits", what="model.layers.0.attn.qkv_proj.MatMul.weight_Q4", got=4):
        merge_adapter(folder / "model.onnx", first, copy / "model.onnx")
    costs = merge_adapter(folder / "model.onnx", first, copy / "model.onnx", requantize=True)
    assert costs
    assert all(cost.lost > 0 for cost in costs)
    assert np.abs(logits(copy) - logits(folder)).max() > 0.01


def dequantized(folder):
    """The checkpoint with the weights that the model of the builder has."""
    model = llama()
    modules = dict(model.named_modules())
    for layer in find_layers(infer_shapes(ModelFile.load(folder / "model.onnx").training_model())):
        if layer.kind != "MatMulNBits":
            continue
        weight = matrix(layer)
        for part in layer.parts or (None,):
            columns = slice(None) if part is None else slice(part.start, part.start + part.size)
            name = layer.name if part is None else part.name
            with torch.no_grad():
                modules[name].weight.copy_(torch.from_numpy(weight[:, columns].T.copy()))
    return model


def test_losses_are_those_of_peft(folder, tmp_path):
    drawn = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    data = drawn[:, :-1], drawn[:, 1:]
    inner = dequantized(folder)
    tuned, first = adapted(tmp_path, inner=inner)
    expected = losses_of_peft(tuned, data, lambda values: torch.optim.SGD(values, lr=0.1))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    learner = onnxtrain.Trainer(
        folder / "model.onnx", loss="softmax_cross_entropy", optimizer=onnxtrain.SGD(0.1), lora=Lora(adapter=first)
    )
    feeds = {"input_ids": data[0].numpy(), "attention_mask": np.ones((2, 12), np.int64)}
    got = [learner.train_step(feeds, data[1].numpy()) for _ in expected]
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 2e-5
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
