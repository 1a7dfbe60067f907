"""Layers by the names of nodes."""

import onnx_ir as ir
import pytest
from onnx import parser

from onnxtrain.lowering.memory.recompute import number_layers


def chain(names, scopes=()):
    """Return a graph of nodes that compute v0, v1, ... with these names; ``scopes`` are PyTorch's names of modules."""
    nodes = " ".join(
        f'["{name}"] v{place} = Tanh({f"v{place - 1}" if place else "x"})' for place, name in enumerate(names)
    )
    graph = ir.from_proto(
        parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 18]> g (float[4] x) => (float[4] y) {{ {nodes} y = Neg(v0) }}'
        )
    ).graph
    for node, scope in zip(graph, scopes):  # noqa: B905 -- the last node has none
        node.metadata_props["pkg.torch.onnx.name_scopes"] = scope
    return graph


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("/model/layers.3/mlp/MatMul", "model.layers.3"),
        ("layer0.norm1", "layer0"),
        ("h.11", "h.11"),
        ("transformer/block_2/product", "transformer.block_2"),
    ],
)
def test_names_say_the_layer(name, layer):
    assert number_layers(chain([name]), ["layers"]) == {"v0": layer}


def test_scopes_of_pytorch_say_the_layer():
    scope = "['', 'inner', 'inner.model.layers.0', 'inner.model.layers.0.mlp', 'linear_4']"
    assert number_layers(chain(["node_linear_4"], [scope]), ["layers"]) == {"v0": "inner.model.layers.0"}


@pytest.mark.parametrize("scope", ["['layers.0'", "layers.0", "7", "[7]", "{[]: 1}", "[" * 9999, "-" * 99999 + "1"])
def test_other_text_in_the_scopes_is_passed_over(scope):
    assert number_layers(chain(["node"], [scope]), ["layers"]) == {}


def test_adapters_are_in_the_layer_of_their_module():
    names = ["/transformer/h.0/attn/MatMul", "h.0.attn/lora/MatMul", "/transformer/h.1/attn/MatMul"]
    assert set(number_layers(chain(names), ["layers"]).values()) == {"transformer.h.0", "transformer.h.1"}


def test_a_name_that_fits_several_stays_alone():
    names = ["/encoder/layers.0/a", "/decoder/layers.0/a", "layers.0/b"]
    assert list(number_layers(chain(names), ["layers"]).values()) == [
        "encoder.layers.0",
        "decoder.layers.0",
        "layers.0",
    ]


def test_without_the_pattern_there_are_none():
    assert number_layers(chain(["layers.0/a"]), ["layers.*"]) == {}
