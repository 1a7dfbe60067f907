"""Patterns of what to recompute that name nothing are refused, before names are lost to fusion."""

import pytest
from onnx import parser

import onnxtrain
from onnxtrain.errors import GradientError


def model(name):
    """Two nodes, the second without a name, and their sum."""
    return parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[4] x) => (float y)'
        f'{{ ["{name}"] wave = Tanh(x) square = Mul(wave, wave) y = ReduceSum<keepdims=0>(square) }}'
    )


@pytest.mark.parametrize("patterns", ["only/*", ["only/product", "*/prod*"], ["?nly/product"], ()])
def test_patterns_that_name_a_node_are_taken(patterns):
    onnxtrain.gradient(model("only/product"), xs="x", recompute=patterns)


@pytest.mark.parametrize("name", ["/model/layers.3/mlp", "layer0.norm1", "h.11", "transformer/block_2/product"])
def test_numbered_layers_are_seen(name):
    onnxtrain.gradient(model(name), xs="x", recompute="layers")


@pytest.mark.parametrize("patterns", ["layer*", ["only/*", "layer*"]])
def test_a_pattern_that_matches_no_node_is_refused(patterns):
    with pytest.raises(GradientError, match=r"recompute='layer\*' matches no named node; the model has .*only/product"):
        onnxtrain.gradient(model("only/product"), xs="x", recompute=patterns)


@pytest.mark.parametrize("name", ["only/product", "players3", "layered"])
def test_layers_without_a_number_are_refused(name):
    with pytest.raises(GradientError, match=rf"no node has a name with a numbered layer.*'{name}'"):
        onnxtrain.gradient(model(name), xs="x", recompute="layers")


def test_a_model_without_names():
    with pytest.raises(GradientError, match=r"matches no named node; the model has none\.$"):
        onnxtrain.gradient(model(""), xs="x", recompute="*")
