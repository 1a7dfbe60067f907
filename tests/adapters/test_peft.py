"""PEFT: the same initial values, the same losses, and folders in both directions."""

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain import Lora

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.torch,
    # Of PyTorch, its exporters, PEFT and transformers, about themselves.
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 20


def llama(seed=0):
    """A small Llama."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).eval()


class Logits(torch.nn.Module):
    """The logits of tokens, and nothing else."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids):
        mask = torch.ones_like(input_ids)  # without one, masks are built in a way that one exporter does not know
        return self.inner(input_ids=input_ids, attention_mask=mask, use_cache=False).logits


@pytest.fixture(scope="module")
def data():
    drawn = torch.randint(0, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


@pytest.fixture(scope="module", params=["dynamo", "torchscript"])
def exported(request, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("llama") / f"{request.param}.onnx"
    sizes = {"input_ids": {0: "batch", 1: "tokens"}} if request.param == "torchscript" else None
    torch.onnx.export(
        Logits(llama()),
        (data[0],),
        str(path),
        input_names=["input_ids"],
        output_names=["logits"],
        dynamo=request.param == "dynamo",
        dynamic_axes=sizes,
        opset_version=18,
        external_data=False,
    )
    return path


def adapted(tmp_path, *, dora=False, targets=("q_proj", "k_proj", "v_proj", "o_proj"), rslora=False, inner=None):
    """A model of PEFT, and the folder of its adapter before any training."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(targets), use_dora=dora, lora_dropout=0.0, use_rslora=rslora
    )
    model = peft.get_peft_model(inner or llama(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    folder = tmp_path / "first"
    model.save_pretrained(folder, save_embedding_layers=False)
    return model, folder


def losses_of_peft(model, data, rule):
    model.train()
    optimizer = rule([p for p in model.parameters() if p.requires_grad])
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=data[0], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 97), data[1].reshape(-1))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def trainer(path, folder, optimizer, **settings):
    lora = Lora(adapter=folder, **settings)
    return onnxtrain.Trainer(path, loss="softmax_cross_entropy", optimizer=optimizer, lora=lora)


@pytest.mark.parametrize(
    ("settings", "rate", "tolerance"),
    [
        ({}, 0.1, 2e-5),
        ({"rslora": True}, 0.02, 2e-5),  # at higher rates this training is not stable
        ({"dora": True}, 0.1, 5e-5),
        ({"targets": ["embed_tokens", "up_proj"]}, 0.1, 2e-5),
    ],
)
def test_losses_are_those_of_peft(exported, data, tmp_path, settings, rate, tolerance):
    model, folder = adapted(tmp_path, **settings)
    expected = losses_of_peft(model, data, lambda values: torch.optim.SGD(values, lr=rate))
    learner = trainer(exported, folder, onnxtrain.SGD(rate))
    got = [learner.train_step(data[0].numpy(), data[1].numpy()) for _ in range(STEPS)]
    assert expected[-1] < expected[0] - 0.1
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < tolerance


def test_losses_are_those_of_peft_by_adamw(exported, data, tmp_path):
    model, folder = adapted(tmp_path)
    expected = losses_of_peft(model, data, lambda values: torch.optim.AdamW(values, lr=1e-2, weight_decay=0.1))
    learner = trainer(exported, folder, onnxtrain.AdamW(1e-2, weight_decay=0.1))
    got = [learner.train_step(data[0].numpy(), data[1].numpy()) for _ in range(STEPS)]
    assert expected[-1] < 0.95 * expected[0]
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 1e-5


@pytest.mark.parametrize(("dora", "more"), [(False, []), (True, []), (False, ["*.embed_tokens"])])
def test_peft_computes_what_was_trained_here(exported, data, tmp_path, dora, more):
    """The adapted model, PEFT on its folder, and the merged model within 1e-5 of one another."""
    lora = Lora(rank=4, alpha=8, targets=["*.{q,v}_proj", "*.down_proj", *more], dora=dora)
    learner = onnxtrain.Trainer(exported, loss="softmax_cross_entropy", optimizer=onnxtrain.AdamW(1e-2), lora=lora)
    for _ in range(5):
        learner.train_step(data[0].numpy(), data[1].numpy())
    learner.save(tmp_path / "tuned")
    expected = learner.predict(data[0].numpy())
    names = {name.removeprefix("inner.") for name in read(tmp_path / "tuned")}
    assert bool(more) == any(name.endswith(".embed_tokens.lora_embedding_A") for name in names)
    assert "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight" in {
        name.replace("base_model.model.inner.", "base_model.model.") for name in names
    }
    with torch.no_grad():
        model = peft.PeftModel.from_pretrained(Logits(llama()), tmp_path / "tuned").eval()
        got = model(data[0]).numpy()
        plain = Logits(llama())(data[0]).numpy()
    assert np.abs(plain - expected).max() > 0.01
    np.testing.assert_allclose(got, expected, atol=1e-5)
    learner.save(tmp_path / "merged.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "merged.onnx")
    np.testing.assert_allclose(session.run(None, {"input_ids": data[0].numpy()})[0], expected, atol=1e-5)
    assert onnx.load(tmp_path / "merged.onnx").graph.node == onnx.load(exported).graph.node


def read(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")
