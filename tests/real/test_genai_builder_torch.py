"""Models that onnxruntime-genai's builder writes for each of its architectures: training, evaluation and padding."""

import copy
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors import numpy as safetensors_numpy

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.errors import DataError, GradientError, ModelError, TrainingHint
from onnxtrain.plugins.text.samples import continued, text_generator
from sentences import raises_sentence

torch = pytest.importorskip("torch")
genai = pytest.importorskip("onnxruntime_genai")
pytest.importorskip("transformers")

from zoo import genai_models  # noqa: E402 - it needs them, too

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

REFUSED = {
    "GptOssForCausalLM": "MoE",
    "Lfm2ForCausalLM": "CausalConvWithState",
    "Lfm2MoeForCausalLM": "CausalConvWithState|MoE",
    "Lfm2VlForConditionalGeneration": "CausalConvWithState",
    "Qwen2_5_VLForConditionalGeneration": "MRotaryEmbedding",
    "Qwen3VLForConditionalGeneration": "MRotaryEmbedding",
    "Qwen3_5ForConditionalGeneration": "CausalConvWithState",
    "Qwen3_5MoeForConditionalGeneration": "CausalConvWithState",
}
"""Architectures that do not train, and an operator without a gradient."""

TRAINED = [name for name in genai_models.MODELS if name not in REFUSED]

FORMS = [
    ("fp32", "cpu"),
    ("fp16", "cpu"),
    ("fp16", "cuda"),
    ("fp16", "webgpu"),
    ("bf16", "cpu"),
    ("bf16", "cuda"),
    ("int4", "cpu"),
    ("int4", "cuda"),
    ("int8", "cpu"),
]
"""Precisions, and the providers for which the builder writes the model."""

IDS = np.random.default_rng(0).integers(3, genai_models.WORDS, (2, 12))
MASK = np.array([[1] * 12, [1] * 9 + [0] * 3])
LABELS = np.where(MASK == 1, IDS, -100)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that builds a model once: the path, and the model of transformers."""
    root, found = tmp_path_factory.mktemp("genai"), {}

    def make(name, precision="fp32", device="cpu"):
        source = root / name.replace(" ", "_")
        if name not in found:
            found[name] = genai_models.checkpoint(name, source)
        path = source / f"{precision}-{device}" / "model.onnx"
        if not path.exists():
            genai_models.build(source, path.parent, precision, device=device)
        return path, found[name]

    return make


def feeds_of(path, mask=MASK):
    """Tokens and mask, and positions where the model has an input for them."""
    inputs = {value.name for value in onnx.load(path, load_external_data=False).graph.input}
    feeds = {"input_ids": IDS, "attention_mask": mask}
    if "position_ids" in inputs:
        feeds["position_ids"] = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return feeds


def trainer_of(path, **options):
    low_bit = any(node.op_type == "MatMulNBits" for node in onnx.load(path, load_external_data=False).graph.node)
    lora = onnxtrain.Lora(rank=4, targets="*") if low_bit else None
    options = {"loss": "next_token", "output": "logits", "optimizer": "adam(lr=3e-3)", "lora": lora} | options
    return onnxtrain.Trainer(path, **options)


def loss_of(logits, labels=LABELS):
    """Mean cross-entropy of the next tokens."""
    logits, labels = torch.from_numpy(logits.astype(np.float32))[:, :-1], torch.from_numpy(labels)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)).item()


def agree(path, tolerance):
    """Train a few steps; compare the losses of training, evaluation and predictions."""
    feeds, trainer = feeds_of(path), trainer_of(path)
    evaluated = trainer.evaluate((feeds, LABELS))["loss"]
    predicted = loss_of(trainer.predict(feeds)["logits"])
    of_file = loss_of(onnxtrain.predict(path, feeds)["logits"])
    losses = [trainer.train_step(feeds, LABELS) for _ in range(5)]
    assert evaluated == pytest.approx(losses[0], rel=1e-5)
    assert predicted == pytest.approx(losses[0], rel=1e-5)
    assert of_file == pytest.approx(losses[0], rel=tolerance)
    assert losses[-1] < losses[0] - 0.2
    assert trainer.evaluate((feeds, LABELS))["loss"] < losses[-1]


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_models_with_sliding_windows_are_evaluated(name, made):
    path, _ = made(name)
    nodes = [node for node in onnx.load(path, load_external_data=False).graph.node if "GroupQuery" in node.op_type]
    attributes = [{item.name: item.i for item in node.attribute} for node in nodes]
    assert [each["local_window_size"] for each in attributes] == [genai_models.WINDOW, -1]
    agree(path, 1e-5)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("name", TRAINED)
def test_training_evaluation_and_predictions_agree(name, form, made):
    path, _ = made(name, *form)
    # ONNX Runtime computes files in their own types, and int4 weights with activations of 8 bits.
    agree(path, {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-5}.get(form[0], 5e-3))


OTHERS = ["OlmoForCausalLM"]
"""Architectures whose files differ from transformers: of OLMo's layer norms the builder writes root mean squares."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", TRAINED)
def test_losses_are_those_of_transformers(name, made):
    path, model = made(name)
    with torch.no_grad():
        tensors = {"input_ids": torch.from_numpy(IDS), "attention_mask": torch.from_numpy(MASK)}
        expected = loss_of(model(**tensors).logits.numpy())
    found = trainer_of(path).evaluate((feeds_of(path), LABELS))["loss"]
    assert (found == pytest.approx(expected, rel=1e-4)) == (name not in OTHERS)


def written(folder, prompt, tokens, adapter):
    """Return the tokens that onnxruntime-genai writes greedily after others, up to the one that ends a text."""
    model = genai.Model(str(folder))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=len(prompt) + tokens, do_sample=False)
    generator, adapters = genai.Generator(model, settings), genai.Adapters(model)
    adapters.load(str(adapter), "tuned")
    generator.set_active_adapter(adapters, "tuned")
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    found = [int(token) for token in generator.get_sequence(0)][len(prompt) :]
    return found[: found.index(END)] if END in found else found


END = genai_models.SIZES["eos_token_id"]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("name", TRAINED)
def test_samples_are_what_genai_writes(name, precision, made, tmp_path):
    """Adapters of all layers, embeddings and tied heads too; prompts longer and shorter than a sliding window."""
    path, _ = made(name, precision)
    trainer = trainer_of(
        path,
        lora=onnxtrain.Lora(rank=4, targets="*"),
        runtime=onnxtrain.RuntimeOptions(accuracy_level=None),  # as genai computes int4 weights
    )
    for _ in range(15):
        trainer.train_step(feeds_of(path), LABELS)
    folder, adapter = tmp_path / "tuned", tmp_path / "tuned.onnx_adapter"
    folder.mkdir()
    for file in path.parent.iterdir():
        if file.is_file() and not file.name.startswith("model.onnx"):
            (folder / file.name).write_bytes(file.read_bytes())
    trainer.save(adapter)
    onnxtrain.adapters.add_slots(path, folder / "model.onnx", adapter=adapter)
    model = text_generator(trainer, path.parent)._model
    for prompt in ([5, 6, 7], [40], [3, 9, 27, 81, 12, 36]):
        model.begin()
        own = continued(prompt, model, 16, {END}, None)
        assert own == written(folder, prompt, 16, adapter)


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", pytest.param("Gemma3ForCausalLM", marks=pytest.mark.thorough)])
def test_norms_inside_of_attention_are_computed(name, made):
    path, model = made(name, "fp16", "cuda")
    model = copy.deepcopy(model)
    nodes = [node for node in onnx.load(path, load_external_data=False).graph.node if "GroupQuery" in node.op_type]
    assert all(node.input[14] and node.input[15] for node in nodes)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "q_norm" in parameter_name or "k_norm" in parameter_name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
        expected = loss_of(model(torch.from_numpy(IDS), torch.from_numpy(MASK)).logits.numpy())
    changed = path.parent.parent / "changed"
    model.save_pretrained(changed)
    for file in path.parent.parent.glob("tokenizer*"):
        (changed / file.name).write_bytes(file.read_bytes())
    path = genai_models.build(changed, changed / "built", "fp16", device="cuda")
    feeds, trainer = feeds_of(path), trainer_of(path)
    assert trainer.evaluate((feeds, LABELS))["loss"] == pytest.approx(expected, rel=1e-3)
    assert loss_of(onnxtrain.predict(path, feeds)["logits"]) == pytest.approx(expected, rel=1e-3)
    assert trainer.train_step(feeds, LABELS) == pytest.approx(expected, rel=1e-3)
    assert "model.layers.0.attn.q_norm.layernorm.weight" in trainer.parameters
    trainer.save(changed / "tuned.onnx")
    saved = [list(node.input) for node in onnx.load(changed / "tuned.onnx").graph.node if "GroupQuery" in node.op_type]
    assert saved == [list(node.input) for node in nodes]


ROUNDED = {"GraniteMoeHybridForCausalLM": 0.05, "OlmoForCausalLM": 0.3, "PhiForCausalLM": 0.02}
"""Architectures whose files differ by more than rounding from transformers; how much logits move further apart."""


def logits_of(model, folder=None):
    """Return the logits of transformers, with an adapter of PEFT."""
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(model)
    tuned = model if folder is None else peft.PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        return tuned.eval()(input_ids=torch.from_numpy(IDS)).logits.numpy()


def logits_with(path, adapter):
    feeds = feeds_of(path, np.ones_like(IDS))
    return onnxtrain.predict(path, feeds, lora=onnxtrain.Lora(adapter=adapter))["logits"]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_peft_computes_with_every_layer_of_a_folder(name, dora, made, tmp_path):
    """The checkpoint packs, splits or renames some layers, and PEFT leaves out adapters of layers that it lacks."""
    path, model = made(name)
    lora = onnxtrain.Lora(rank=3, targets="all-linear" if dora else "*", dora=dora)
    trainer = trainer_of(path, lora=lora)
    for _ in range(5):
        trainer.train_step(feeds_of(path), LABELS)
    trainer.save(tmp_path / "tuned.onnx_adapter")
    trainer.save(tmp_path / "tuned")
    ours, before = logits_with(path, tmp_path / "tuned.onnx_adapter"), logits_of(model)
    theirs = logits_of(model, tmp_path / "tuned")
    assert np.abs(ours - before).max() > 0.2
    np.testing.assert_allclose(ours, theirs, atol=ROUNDED.get(name, 1e-4))
    np.testing.assert_allclose(logits_with(path, tmp_path / "tuned"), ours, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TRAINED)
def test_peft_finds_the_norms_of_a_folder(name, made, tmp_path):
    """The checkpoint names norms otherwise, and that of Gemma and Nemotron holds them without the 1 that is added."""
    path, model = made(name)
    trainer = trainer_of(path, lora=onnxtrain.Lora(rank=2, targets="*o_proj"), train="*norm*")
    norms = {name for name in trainer.parameters if "norm" in name}
    assert any("final_norm" in name for name in norms)
    assert any("PEFT folder" in hint for hint in trainer.hints) == (name in OTHERS)
    for _ in range(3):
        trainer.train_step(feeds_of(path), LABELS)
    if name in OTHERS:
        with pytest.raises(ModelError, match="no parameters of norms"):
            trainer.save(tmp_path / "tuned")
        return
    trainer.save(tmp_path / "tuned")
    tensors = safetensors_numpy.load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    assert sum("norm" in name for name in tensors) == len(norms)
    with torch.no_grad():
        known = {f"base_model.model.{name}": parameter for name, parameter in model.named_parameters()}
    for key, array in tensors.items():
        if "lora_" not in key:  # PEFT leaves out what it does not find
            assert np.abs(known[key].numpy(force=True) - array).max() < 0.02
    np.testing.assert_allclose(
        trainer.predict(feeds_of(path, np.ones_like(IDS)))["logits"],
        logits_of(model, tmp_path / "tuned"),
        atol=ROUNDED.get(name, 1e-5),
    )
    again = trainer_of(path, lora=onnxtrain.Lora(adapter=tmp_path / "tuned"))
    assert again.parameters.keys() == trainer.parameters.keys()
    for name in norms:
        np.testing.assert_allclose(again.parameters[name], trainer.parameters[name], rtol=1e-6)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("name", TRAINED)
def test_transformers_loads_the_merged_checkpoint(name, precision, made, tmp_path):
    """Packed and renamed layers, offsets of norms, tied heads; int4 weights become float32, with the exact sum."""
    path, model = made(name, precision)
    lora = onnxtrain.Lora(rank=3, targets="all-linear")
    trainer = trainer_of(path, lora=lora, train="*norm*" if name not in OTHERS else None)
    for _ in range(5):
        trainer.train_step(feeds_of(path), LABELS)
    trainer.save(tmp_path / "tuned.onnx_adapter")
    source = path.parent.parent
    command = ["adapter", "merge", path, tmp_path / "tuned.onnx_adapter", "-o", tmp_path / "merged"]
    assert main([*map(str, command), "--base-model", str(source)]) == 0
    loaded, told = type(model).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(told.values())
    assert not (np.abs(logits_of(loaded) - logits_of(model)).max() < 0.05)
    ours = trainer.predict(feeds_of(path, np.ones_like(IDS)))["logits"]
    np.testing.assert_allclose(logits_of(loaded), ours, atol=ROUNDED.get(name, 1e-4))


def test_layers_that_the_checkpoint_packs_are_refused_in_full(made):
    path, _ = made("Phi3ForCausalLM")
    lora = onnxtrain.Lora(rank=2, targets="*o_proj")
    with pytest.warns(TrainingHint, match="PEFT folder.*gate_proj"):
        trainer_of(path, lora=lora, train="*.gate_proj.*")


def test_a_folder_for_an_unknown_architecture_is_refused_before_the_training(made, tmp_path, capsys):
    path, _ = made("LlamaForCausalLM")
    for file in path.parent.glob("model.onnx*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    np.savez(tmp_path / "train.npz", **feeds_of(path), labels=LABELS)
    command = ["fit", f"{tmp_path}/model.onnx", "--data", f"{tmp_path}/train.npz", "--loss", "next_token"]
    assert main([*command, "--lora", "2", "--output", str(tmp_path / "tuned")]) != 0
    assert "genai_config.json beside the model" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", pytest.param("int4", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_of_a_packed_layer_keeps_its_rank(precision, dora, made, tmp_path):
    """PEFT's adapters of Phi 3's qkv_proj and gate_up_proj, of which the builder splits the second."""
    peft = pytest.importorskip("peft")
    path, model = made("Phi3ForCausalLM", precision)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["qkv_proj", "gate_up_proj"], use_dora=dora)
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(torch.randn_like(parameter) / 10)
    tuned.save_pretrained(tmp_path / "first")
    if precision == "fp32":
        np.testing.assert_allclose(
            logits_with(path, tmp_path / "first"), logits_of(model, tmp_path / "first"), atol=1e-4
        )
    adapter = tmp_path / "tuned.onnx_adapter"
    onnxtrain.adapters.convert_adapter(path, tmp_path / "first", adapter)
    onnxtrain.adapters.convert_adapter(path, adapter, tmp_path / "again")
    first, again = (
        safetensors_numpy.load_file(tmp_path / each / "adapter_model.safetensors") for each in ("first", "again")
    )
    assert first.keys() == again.keys()
    for name, value in first.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", REFUSED)
def test_other_architectures_are_refused_with_a_sentence(name, made):
    path, _ = made(name)
    with pytest.raises(GradientError, match=rf"^No gradient rule for \d operators? .*com.microsoft::({REFUSED[name]})"):
        trainer_of(path)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"])
def test_an_invalid_file_of_the_builder_is_refused(name, made):
    with pytest.raises(ModelError, match=r"is not valid ONNX: .*past_key_values"):
        trainer_of(made(name, "fp16")[0])


def test_the_page_lists_the_architectures():
    page = (Path(__file__).parents[2] / "docs" / "genai.md").read_text()
    trained, refused = page.partition("## Architectures")[2].split("| refused |")
    names = {name.partition(" with")[0] for name in TRAINED}
    assert set(re.findall(r"`(\w+For\w+)`", trained)) == names
    assert set(re.findall(r"`(\w+For\w+)`", refused)) == set(REFUSED)


LEFT = {
    "left": [0] * 3 + [1] * 9,
    "gap": [1, 0] + [1] * 10,
    "empty": [0] * 12,
    "segments": [1] * 6 + [2] * 6,
}
"""Rows of masks that do not say how many tokens a row has."""


@pytest.mark.parametrize("kernels", [False, None])
@pytest.mark.parametrize("row", LEFT.values(), ids=LEFT)
def test_masks_that_are_not_ones_followed_by_zeros_are_refused(row, kernels, made, tmp_path):
    path, _ = made("LlamaForCausalLM")
    trainer = trainer_of(path, runtime=onnxtrain.RuntimeOptions(kernels=kernels))
    mask = np.array([[1] * 12, row])
    arrays = {"input_ids": IDS, "attention_mask": mask, "labels": LABELS}
    feeds = {name: arrays[name] for name in ("input_ids", "attention_mask")}
    np.savez(tmp_path / "train.npz", **arrays)
    examples = [{name: array[row] for name, array in arrays.items()} for row in range(2)]
    uses = [
        lambda: trainer.train_step(feeds, LABELS),
        lambda: trainer.fit(arrays, epochs=1, progress=False),
        lambda: trainer.fit(tmp_path / "train.npz", epochs=1, progress=False),
        lambda: trainer.fit(lambda: iter([arrays]), epochs=1, progress=False),
        lambda: trainer.fit(torch.utils.data.DataLoader(examples, batch_size=2), epochs=1, progress=False),
        lambda: trainer.evaluate(arrays),
        lambda: trainer.evaluate(tmp_path / "train.npz"),
        lambda: trainer.predict(feeds),
        lambda: onnxtrain.predict(path, feeds),
        lambda: onnxtrain.evaluate(path, arrays, loss="next_token", output="logits"),
    ]
    for dtype in (np.int32, np.uint8, *([bool] if mask.max() == 1 else [])):
        uses.append(lambda dtype=dtype: trainer.train_step(feeds | {"attention_mask": mask.astype(dtype)}, LABELS))
        uses.append(lambda dtype=dtype: trainer.evaluate(arrays | {"attention_mask": mask.astype(dtype)}))
    for use in uses:
        with raises_sentence("padded_on_the_left", example=1):
            use()
    with pytest.raises(DataError, match=r"attention_mask.*float32.*int64"):
        trainer.train_step(feeds | {"attention_mask": mask.astype(np.float32)}, LABELS)


def test_left_padding_is_computed_where_the_model_masks_tokens(made):
    """The builder writes such a model for float16 on CPUs."""
    path, model = made("LlamaForCausalLM", "fp16", "cpu")
    mask = MASK[:, ::-1].copy()
    labels = np.where(mask == 1, IDS, -100)
    labels[1, 3] = -100  # its prediction is at padding
    feeds = feeds_of(path, mask)
    with torch.no_grad():
        positions = torch.from_numpy(feeds["position_ids"])
        expected = loss_of(
            model(torch.from_numpy(IDS), torch.from_numpy(mask), position_ids=positions).logits.numpy(), labels
        )
    for kernels in (False, None):
        trainer = trainer_of(path, runtime=onnxtrain.RuntimeOptions(kernels=kernels))
        assert trainer.evaluate((feeds, labels))["loss"] == pytest.approx(expected, rel=1e-3)
        assert trainer.train_step(feeds, labels) == pytest.approx(expected, rel=1e-3)
