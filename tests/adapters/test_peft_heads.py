"""PEFT's own classes on folders with heads: AutoPeftModel finds the base model, and the head arrives."""

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain import Lora, replace_head
from onnxtrain.adapters import add_weighted, convert_adapter, merge_adapter
from onnxtrain.errors import OptionError

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.torch,
    # Of PyTorch, its exporters, PEFT and transformers, about themselves.
    pytest.mark.filterwarnings("ignore"),
]

CLASSES = 3

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "attn_implementation": "eager",
}
"""Sizes of the tiny models."""


def bert(classes=CLASSES):
    """A tiny BERT for sequence classification, with biases and scales other than their first values."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, max_position_embeddings=16, num_labels=classes)
    return disturbed(transformers.BertForSequenceClassification(config).eval())


def disturbed(model):
    """Give a new model biases and scales that differ from zero and one: exporters leave out the latter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def export(model, path, *, dynamo, count=50):
    ids = torch.randint(0, count, (2, 6))
    model.config.return_dict = False
    torch.onnx.export(
        model,
        (ids,),
        str(path),
        input_names=["input_ids"],
        output_names=["logits"],
        dynamo=dynamo,
        opset_version=18,
        external_data=False,
    )
    model.config.return_dict = True


@pytest.fixture(scope="module", params=["dynamo", "torchscript"])
def exported(request, tmp_path_factory):
    """A folder with the checkpoint and its config, and ``model.onnx``."""
    folder = tmp_path_factory.mktemp(request.param)
    model = bert()
    model.save_pretrained(folder)
    export(model, folder / "model.onnx", dynamo=request.param == "dynamo")
    return folder


IDS = np.random.default_rng(0).integers(0, 50, (2, 6))


def train(model, targets=("*.{query,value}",), classes=CLASSES, steps=5, **settings):
    lora = settings.pop("lora", None) or Lora(rank=4, alpha=8, targets=list(targets))
    learner = onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer="adam(lr=0.05)", lora=lora, **settings)
    for _ in range(steps):
        learner.train_step(IDS, np.arange(2) % classes)
    return learner


def disturb(learner):
    """Change all tensors that are trained beside the adapters, more than a few steps do."""
    random = np.random.default_rng(1)
    own = {name: array for name, array in learner.get_weights().items() if ".lora_" not in name}
    assert own
    for name, array in own.items():
        step = random.normal(size=array.shape).astype(array.dtype)
        learner.parameters[name] = array + step * (0.3 if array.ndim > 1 else 1.5)


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(torch.from_numpy(IDS)).logits.numpy()


def run(path):
    return onnxruntime.InferenceSession(path).run(None, {"input_ids": IDS})[0]


@pytest.mark.parametrize(
    "trained",
    [
        "classifier.*",
        "{classifier,bert.pooler.dense}.*",
        "*.LayerNorm.*",
        "*.intermediate.dense.*",
        "*.word_embeddings.weight",
        "*.{query,value}.bias",
        "*",
    ],
)
def test_a_head_arrives_in_auto_peft_model(exported, trained, tmp_path):
    settings = {"freeze": "*.{query,value}.weight|*embedding*"} if trained == "*" else {}
    learner = train(exported / "model.onnx", train=trained, **settings)
    adapted = learner.predict(IDS)
    disturb(learner)
    expected = learner.predict(IDS)
    assert np.abs(expected - adapted).max() > 1e-3
    learner.save(tmp_path / "tuned")
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    assert type(model) is peft.PeftModelForSequenceClassification
    model.save_pretrained(tmp_path / "again")  # PEFT's own file has them, too
    merge_adapter(exported / "model.onnx", tmp_path / "again", tmp_path / "merged.onnx")
    np.testing.assert_allclose(run(tmp_path / "merged.onnx"), expected, atol=1e-4)


def test_pissa_with_ranks_by_layer_and_a_head_arrive_in_auto_peft_model(exported, tmp_path):
    lora = Lora(rank=4, alpha=8, targets="*.{query,value}", init="pissa", rank_pattern={"*.query": 2}, lr_ratio=2)
    learner = train(exported / "model.onnx", train="classifier.*", lora=lora)
    disturb(learner)
    learner.save(tmp_path / "tuned")
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    np.testing.assert_allclose(logits(model), learner.predict(IDS), atol=1e-4)


def test_a_sum_with_the_head_of_one_adapter_arrives_in_auto_peft_model(exported, tmp_path):
    """The other folder has the head of the base, since PEFT wants one, which only the model shows to be untrained."""
    learner = train(exported / "model.onnx", train="classifier.*")
    disturb(learner)
    learner.save(tmp_path / "head")
    train(exported / "model.onnx", targets=["*.key"]).save(tmp_path / "plain")
    terms = [(tmp_path / "plain", 0.5), (tmp_path / "head", 2)]
    add_weighted(terms, tmp_path / "sum", model=exported / "model.onnx")
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "sum")
    merge_adapter(exported / "model.onnx", tmp_path / "sum", tmp_path / "merged.onnx")
    np.testing.assert_allclose(run(tmp_path / "merged.onnx"), logits(model), atol=1e-4)
    weights = learner.get_weights()
    head = next(array for name, array in weights.items() if name.endswith("classifier.weight"))
    found = model.base_model.model.classifier.modules_to_save["default"].weight.detach().numpy()
    np.testing.assert_array_equal(found, head)
    with pytest.raises(OptionError, match="or give the model"):
        add_weighted(terms, tmp_path / "without")


def test_adapters_alone_load_with_the_head_of_the_base(exported, tmp_path):
    """PEFT's class of the task wants the classifier in every folder; reading it back changes nothing."""
    learner = train(exported / "model.onnx")
    learner.save(tmp_path / "tuned")
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    np.testing.assert_allclose(logits(model), learner.predict(IDS), atol=1e-5)
    again = train(exported / "model.onnx", lora=Lora(adapter=tmp_path / "tuned"), steps=0)
    assert all(".lora_" in name for name in again.parameters)


def test_a_head_of_two_layers_is_one_module_of_peft(tmp_path):
    torch.manual_seed(2)
    config = transformers.RobertaConfig(**SIZES, max_position_embeddings=20, num_labels=CLASSES)
    model = disturbed(transformers.RobertaForSequenceClassification(config).eval())
    model.save_pretrained(tmp_path)
    export(model, tmp_path / "model.onnx", dynamo=False)
    learner = train(tmp_path / "model.onnx", train="classifier.out_proj.*")
    disturb(learner)
    learner.save(tmp_path / "tuned")
    found = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    np.testing.assert_allclose(logits(found), learner.predict(IDS), atol=1e-4)
    # An adapter inside the head: PEFT cannot save the head whole, so that the folder names no task.
    adapted = train(tmp_path / "model.onnx", targets=["classifier.dense", "*.query"])
    adapted.save(tmp_path / "inside", base_model=tmp_path)
    base = transformers.RobertaForSequenceClassification.from_pretrained(tmp_path)
    found = peft.PeftModel.from_pretrained(base, tmp_path / "inside")
    np.testing.assert_allclose(logits(found), adapted.predict(IDS), atol=1e-4)


class Vision(torch.nn.Module):
    """A convolution, batch normalization and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
        self.depth, self.head = torch.nn.Conv2d(4, 4, 3, groups=4), torch.nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.head(torch.relu(self.depth(self.norm(self.conv(x)))).mean((2, 3)))


@pytest.mark.parametrize("train", ["norm.*", "{head,norm}.*"])
def test_running_statistics_arrive_in_peft(train, tmp_path):
    torch.manual_seed(3)
    model = disturbed(Vision().eval())
    x = torch.randn(8, 2, 7, 7) + 2
    torch.onnx.export(
        model, (x,), str(tmp_path / "model.onnx"), input_names=["x"], output_names=["y"], dynamo=False,
        training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False, dynamic_axes={"x": {0: "n"}},
    )  # fmt: skip
    lora = Lora(rank=2, targets="conv")
    learner = onnxtrain.Trainer(tmp_path / "model.onnx", loss="mse", lora=lora, train=train, batch_norm="train")
    for _ in range(3):
        learner.train_step(x.numpy(), np.zeros((8, 3), np.float32))
    learner.save(tmp_path / "tuned")
    found = peft.PeftModel.from_pretrained(model, tmp_path / "tuned").eval()
    with torch.no_grad():
        got = found(x).numpy()
    np.testing.assert_allclose(got, learner.predict(x.numpy()), atol=1e-4)
    assert sum("running" in name for name in learner_names(tmp_path / "tuned")) == 2


def test_what_peft_trained_is_read(exported, tmp_path):
    """A classifier and biases that PEFT trained: merged, converted, continued, and back in PEFT."""
    torch.manual_seed(5)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], bias="lora_only")
    model = peft.get_peft_model(transformers.BertForSequenceClassification.from_pretrained(exported), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path / "given")
    expected = logits(model)
    path = exported / "model.onnx"
    assert np.abs(expected - run(path)).max() > 0.05
    convert_adapter(path, tmp_path / "given", tmp_path / "a.onnx_adapter")
    convert_adapter(path, tmp_path / "a.onnx_adapter", tmp_path / "back")
    for form in ("given", "a.onnx_adapter", "back"):
        merge_adapter(path, tmp_path / form, tmp_path / "merged.onnx")
        np.testing.assert_allclose(run(tmp_path / "merged.onnx"), expected, atol=1e-4)
        learner = train(path, lora=Lora(adapter=tmp_path / form), steps=0)
        np.testing.assert_allclose(learner.predict(IDS), expected, atol=1e-4)
        assert "classifier.weight" in learner.parameters
    again = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "back")
    np.testing.assert_allclose(logits(again), expected, atol=1e-4)


def test_a_new_head_is_the_classifier_of_peft(exported, tmp_path):
    model = replace_head(exported / "model.onnx", classes=7)
    learner = train(model, train="head.*", classes=7)
    learner.save(tmp_path / "tuned", base_model=exported)
    found = peft.AutoPeftModelForSequenceClassification.from_pretrained(
        tmp_path / "tuned", num_labels=7, ignore_mismatched_sizes=True
    )
    np.testing.assert_allclose(logits(found), learner.predict(IDS), atol=1e-4)


def llama(*, tied):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="eager",
    )
    return disturbed(transformers.LlamaForCausalLM(config).eval())


class Tokens(torch.nn.Module):
    """Logits of tokens, with the names of the checkpoint."""

    def __init__(self, inner):
        super().__init__()
        self.model, self.lm_head = inner.model, inner.lm_head

    def forward(self, input_ids):
        mask = torch.ones_like(input_ids)
        return self.lm_head(self.model(input_ids=input_ids, attention_mask=mask, use_cache=False)[0])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dynamo", [False, True])
def test_auto_peft_model_for_causal_lm(tied, dynamo, tmp_path):
    model = llama(tied=tied)
    model.save_pretrained(tmp_path / "base")
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        Tokens(model),
        (torch.from_numpy(IDS),),
        str(path),
        input_names=["input_ids"],
        output_names=["logits"],
        dynamo=dynamo,
        opset_version=18,
        external_data=False,
    )
    names = [tensor.name for tensor in onnx.load(path).graph.initializer]
    head = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight" if tied else "*lm_head*"
    learner = onnxtrain.Trainer(
        path, loss="softmax_cross_entropy", optimizer="adam(lr=0.05)", train=head, tie=tied,
        lora=Lora(rank=4, targets="*.{q,v}_proj"),
    )  # fmt: skip
    before = learner.predict(IDS)
    for _ in range(3):
        learner.train_step(IDS, IDS)
    expected = learner.predict(IDS)
    assert np.abs(expected - before).max() > 0.05
    learner.save(tmp_path / "tuned", base_model=tmp_path / "base")
    found = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "tuned")
    np.testing.assert_allclose(logits(found), expected, atol=1e-4)
    assert type(found) is peft.PeftModelForCausalLM
    assert any("lm_head" in name or "embed" in name for name in learner_names(tmp_path / "tuned"))


def learner_names(folder):
    from safetensors.numpy import load_file

    return list(load_file(folder / "adapter_model.safetensors"))


def test_modules_to_save_are_trained_on_although_they_equal_the_base(exported, tmp_path):
    """PEFT's folder before any step; the folder of a training of ours names what was trained, and trains no more."""
    config = peft.LoraConfig(r=4, target_modules=["query"], modules_to_save=["classifier", "pooler"])
    peft.get_peft_model(bert(), config).save_pretrained(tmp_path / "fresh")
    learner = train(exported / "model.onnx", lora=Lora(adapter=tmp_path / "fresh"), steps=0)
    full = {name for name in learner.parameters if ".lora_" not in name}
    assert len(full) == 4
    before = learner.get_weights()
    learner.train_step(IDS, np.arange(2))
    assert all(not np.array_equal(before[name], learner.parameters[name]) for name in full)
    ours = train(exported / "model.onnx", train=["*classifier.bias"], steps=2)
    ours.save(tmp_path / "ours")
    again = train(exported / "model.onnx", lora=Lora(adapter=tmp_path / "ours"), steps=0)
    assert again.parameters.keys() == ours.parameters.keys()
