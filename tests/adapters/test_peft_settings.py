"""PEFT's PiSSA, LoRA+, LoftQ and patterns of ranks: the same losses and the same folders."""

import json

import numpy as np
import pytest

import onnxtrain
from onnxtrain import Lora
from sentences import raises_sentence

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from adapters.test_peft import Logits, adapted, llama, losses_of_peft, trainer  # noqa: E402 - it needs them, too

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

STEPS = 5
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def data():
    drawn = torch.randint(0, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("llama") / "model.onnx"
    torch.onnx.export(
        Logits(llama()), (data[0],), str(path), input_names=["input_ids"], output_names=["logits"], dynamo=False,
        opset_version=18,
    )  # fmt: skip
    return path


def logits_of(folder, data):
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(Logits(llama()), folder).eval()(data[0]).numpy()


@pytest.mark.parametrize("rslora", [False, True])
def test_pissa_has_the_losses_of_peft(exported, data, tmp_path, rslora):
    """Twenty steps of PEFT's PiSSA, and PEFT on the adapter of twice the rank beside the unchanged model."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights="pissa", lora_dropout=0.0, use_rslora=rslora
    )
    model = peft.get_peft_model(llama(), config)
    expected = losses_of_peft(model, data, lambda values: torch.optim.AdamW(values, lr=1e-2, weight_decay=0.1))
    lora = Lora(rank=4, alpha=8, targets=TARGETS, init="pissa", rslora=rslora)
    optimizer = onnxtrain.AdamW(1e-2, weight_decay=0.1)
    learner = onnxtrain.Trainer(exported, loss="softmax_cross_entropy", optimizer=optimizer, lora=lora)
    got = [learner.train_step(data[0].numpy(), data[1].numpy()) for _ in expected]
    assert expected[-1] < 0.95 * expected[0]
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 5e-5
    learner.save(tmp_path / "tuned")
    np.testing.assert_allclose(logits_of(tmp_path / "tuned", data), learner.predict(data[0].numpy()), atol=1e-5)


def test_steps_of_lora_plus_are_those_of_peft(exported, data, tmp_path):
    from peft.optimizers import create_loraplus_optimizer

    model, folder = adapted(tmp_path)
    expected = losses_of_peft(
        model,
        data,
        lambda _: create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.1
        ),
    )[:STEPS]
    learner = trainer(exported, folder, onnxtrain.AdamW(1e-3, weight_decay=0.1), lr_ratio=16)
    got = [learner.train_step(data[0].numpy(), data[1].numpy()) for _ in range(STEPS)]
    assert expected[-1] < expected[0] - 0.1
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 1e-5
    plain = trainer(exported, folder, onnxtrain.AdamW(1e-3, weight_decay=0.1))
    assert abs([plain.train_step(data[0].numpy(), data[1].numpy()) for _ in range(STEPS)][-1] - expected[-1]) > 0.05


def test_peft_reads_ranks_and_alphas_by_pattern_and_writes_its_own(exported, data, tmp_path):
    patterns = {"rank_pattern": {"*.0.*.q_proj": 2, "v_proj": 6}, "alpha_pattern": {"q_proj": 3}}
    lora = Lora(rank=4, alpha=8, targets=["q_proj", "v_proj"], **patterns)
    learner = onnxtrain.Trainer(exported, loss="softmax_cross_entropy", optimizer=onnxtrain.AdamW(1e-2), lora=lora)
    for _ in range(STEPS):
        learner.train_step(data[0].numpy(), data[1].numpy())
    learner.save(tmp_path / "tuned")
    np.testing.assert_allclose(logits_of(tmp_path / "tuned", data), learner.predict(data[0].numpy()), atol=1e-5)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        rank_pattern={r"layers\.0\..*q_proj": 2, "v_proj": 6},
        alpha_pattern={"^model.layers.[01].self_attn.q_proj": 3},
        init_lora_weights=False,  # B is not zero
    )
    model = peft.get_peft_model(llama(), config).eval()
    model.save_pretrained(tmp_path / "theirs")
    assert (
        r"layers\.0\..*q_proj" in json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())["rank_pattern"]
    )
    with torch.no_grad():
        expected = Logits(model)(data[0]).numpy()
    got = trainer(exported, tmp_path / "theirs", onnxtrain.SGD(0.1)).predict(data[0].numpy())
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_an_adapter_of_peft_beside_changed_weights_is_refused(exported, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    peft.get_peft_model(llama(), config).save_pretrained(tmp_path / "pissa")
    with raises_sentence("peft_changed_base", what=tmp_path / "pissa/adapter_config.json", got="pissa"):
        trainer(exported, tmp_path / "pissa", onnxtrain.SGD(0.1))


def test_the_adapter_of_loftq_is_that_of_peft():
    """PEFT's decomposition of a residual; it leaves the scale out, which is 1 here."""
    from peft.utils.loftq_utils import _low_rank_decomposition

    from onnxtrain.adapters.initial import principal

    residual = np.random.default_rng(0).standard_normal((12, 20)).astype(np.float32)
    found = _low_rank_decomposition(torch.from_numpy(residual.T), 3)
    a, b = principal(residual, 3)
    np.testing.assert_allclose((found["L"] @ found["R"]).numpy().T, a @ b, atol=1e-5)
    for ours, theirs in ((a.T, found["R"]), (b.T, found["L"])):  # up to the signs of singular vectors
        np.testing.assert_allclose(np.abs(ours), np.abs(theirs.numpy()), atol=1e-4)
