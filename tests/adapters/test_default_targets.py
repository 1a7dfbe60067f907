"""Default targets of ``Lora()`` on models of several architectures."""

import numpy as np
import pytest

import onnxtrain
from onnxtrain.adapters import adaptable_layers
from onnxtrain.errors import OptionError
from sentences import raises_sentence


def adapted(model):
    """The layers that get adapters."""
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", lora=onnxtrain.Lora(rank=2))
    return sorted({name.split(".lora_")[0] for name in trainer.parameters})


def test_a_perceptron_adapts_all_but_the_last_layer():
    model = onnxtrain.examples.mlp((4, 8, 8, 3))
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", lora=onnxtrain.Lora(rank=2), optimizer="adam(lr=0.05)")
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    losses = [trainer.train_step(x, np.arange(16) % 3) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert len(adapted(model)) == len(adaptable_layers(model)) - 1


def test_a_convolutional_network_adapts_its_convolutions():
    model = onnxtrain.examples.small_resnet()
    convolutions = [row.name for row in adaptable_layers(model) if row.kind == "Conv"]
    assert adapted(model) == sorted(convolutions)


def test_a_model_with_a_single_layer_lists_its_candidates():
    with raises_sentence("no_default_targets", what="targets"):
        onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="cross_entropy", lora=onnxtrain.Lora())


def test_auto_stands_alone():
    with pytest.raises(OptionError, match="'auto' beside other patterns"):
        onnxtrain.Trainer(
            onnxtrain.examples.mlp((4, 8, 3)), loss="cross_entropy", lora=onnxtrain.Lora(targets=["auto", "x"])
        )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("exported")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    makers = {
        "bert": (transformers.BertConfig(**small, vocab_size=40), transformers.BertForSequenceClassification),
        "vit": (transformers.ViTConfig(**small, image_size=8, patch_size=4), transformers.ViTForImageClassification),
        "distilbert": (
            transformers.DistilBertConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=24),
            transformers.DistilBertForSequenceClassification,
        ),
        "gpt2": (
            transformers.GPT2Config(
                vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, n_inner=24, use_cache=False
            ),
            transformers.GPT2LMHeadModel,
        ),
    }

    class Logits(torch.nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, x):
            return self.network(x).logits

    def export(name, dynamo):
        path = folder / f"{name}-{dynamo}.onnx"
        if not path.exists():
            config, maker = makers[name]
            config._attn_implementation = "eager"
            torch.manual_seed(0)
            x = torch.zeros(2, 3, 8, 8) if name == "vit" else torch.zeros(2, 6, dtype=torch.int64)
            options = {"dynamic_shapes": None} if dynamo else {}
            torch.onnx.export(
                Logits(maker(config).eval()), (x,), path, dynamo=dynamo, external_data=False, verbose=False, **options
            )
        return path

    return export


@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", ["bert", "vit", "distilbert"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_adapt_the_projections_of_attention(exported, name, dynamo):
    names = adapted(exported(name, dynamo))
    assert len(names) == 2 * 4  # query, key, value and output projections in each of two layers
    assert all("ttention" in layer for layer in names)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_gpt2_adapts_the_fused_projections_of_attention(exported):
    names = adapted(exported("gpt2", True))  # the older exporter has no aten::diff, which its mask needs
    assert len(names) == 2 * 2  # c_attn and c_proj of attention, which are Conv1D, in each of two layers
    assert all("attn" in layer for layer in names)
