"""Heads of transformers are found as PyTorch's exporters write them, with a dynamic batch and length."""

import io

import numpy as np
import onnx
import pytest
from masked_models import compare, draw_anew, structures_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.torch, pytest.mark.thorough]


class Logits(torch.nn.Module):
    """A network of transformers with one tensor as its output."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids, mask):
        return self.inner(ids, attention_mask=mask).logits


def bert(attention):
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(0)
    network = transformers.BertForSequenceClassification(config)
    network.set_attn_implementation(attention)
    return Logits(network.eval())


def exported(network, *, dynamo):
    inputs = (torch.ones(2, 12, dtype=torch.long), torch.ones(2, 12, dtype=torch.long))
    if dynamo:
        pytest.importorskip("onnxscript")
        free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        options = {"dynamo": True, "dynamic_shapes": (free, free), "external_data": False, "verbose": False}
        return torch.onnx.export(network, inputs, opset_version=18, input_names=["ids", "mask"], **options).model_proto
    file = io.BytesIO()
    axes = {name: {0: "batch", 1: "length"} for name in ("ids", "mask")}
    torch.onnx.export(
        network, inputs, file, opset_version=17, input_names=["ids", "mask"], dynamic_axes=axes, dynamo=False
    )
    return onnx.load_from_string(file.getvalue())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_heads_of_bert(attention, dynamo):
    """All biases are zero and stored once, which ties no layers."""
    model = exported(bert(attention), dynamo=dynamo)
    draw_anew(model)
    structures = structures_of(model)
    heads = structures.tagged(["heads"]).tolist()
    assert len(heads) == 8
    for batch, length in ((2, 12), (3, 7)):
        rng = np.random.default_rng(batch)
        feeds = {"ids": rng.integers(0, 40, (batch, length)), "mask": np.ones((batch, length), np.int64)}
        compare(model, feeds, heads[::2])
