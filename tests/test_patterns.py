"""The glob grammar of names is the same for every option."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain
from onnxtrain.graph.patterns import alternatives, escape, matches, no_match
from sentences import raises_sentence

NAMES = ["q.weight", "k.weight", "v.weight", "q.bias", "w[0]", "a|b", "x{1,2}", "Q.weight"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("q.*", ["q.weight", "q.bias"]),
        ("?.weight", ["q.weight", "k.weight", "v.weight", "Q.weight"]),
        ("[qk].weight", ["q.weight", "k.weight"]),
        ("[!q].weight", ["k.weight", "v.weight", "Q.weight"]),
        ("q.bias|v.*", ["v.weight", "q.bias"]),
        ("{q,v}.weight", ["q.weight", "v.weight"]),
        ("{q,k}.{weight,bias}", ["q.weight", "k.weight", "q.bias"]),
        ("{q|v}.weight", ["q.weight", "v.weight"]),
        ("{k,v}.weight|*.bias", ["k.weight", "v.weight", "q.bias"]),
        ("w[0]", ["w[0]"]),
        ("a|b", ["a|b"]),
        ("x{1,2}", ["x{1,2}"]),
        ("*{1,2}", ["x{1,2}"]),
        ("nothing", []),
        ("q", []),
    ],
)
def test_a_pattern_matches(pattern, matched):
    assert [name for name in NAMES if matches(pattern, name)] == matched


@pytest.mark.parametrize("name", [*NAMES, "*", "a?b|{c}[d]"])
def test_an_escaped_name_matches_that_name_alone(name):
    others = [other for other in [*NAMES, "w0", "a", "b", "x1", "*b"] if other != name]
    assert matches(escape(name), name)
    assert not matches(escape(name), *others)


def test_unclosed_brackets_are_characters():
    assert alternatives("w[0|b{1") == ("w[0", "b{1")
    assert matches("w[0|b{1", "b{1")


def test_the_message_lists_eight_names():
    message = no_match("freeze", "x*", "initializer", [f"w{index}" for index in range(9)], "Look again.")
    assert message == (
        "freeze='x*' matches no initializer; the model has w0, w1, w2, w3, w4, w5, w6, w7, .... Look again."
    )
    assert no_match("tie", "x", "initializer", []) == "tie='x' matches no initializer; the model has none."


def trainer(**options):
    return onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="cross_entropy", **options)


@pytest.mark.parametrize("pattern", ["layer{1,2}.weight", "layer1.weight|layer2.weight", "layer?.weight"])
def test_options_share_the_grammar(pattern):
    both = ["layer1.weight", "layer2.weight"]
    assert list(trainer(train=pattern).parameters) == both
    assert not {*both} & {*trainer(freeze=pattern).parameters}
    groups = [onnxtrain.Group(pattern, lr_scale=0.0)]
    grouped, given = trainer(groups=groups), trainer()
    before = {name: np.array(array) for name, array in grouped.parameters.items()}
    for one in (grouped, given):
        one.train_step(np.ones((2, 4)), np.zeros(2, np.int64))
    changed = {name for name, array in grouped.parameters.items() if not np.array_equal(array, before[name])}
    assert changed == {"layer1.bias", "layer2.bias"}
    assert trainer(optimizer=onnxtrain.SSGD(), sparsify=pattern).parameters.keys() == given.parameters.keys()


def test_recomputation_and_adapters_share_the_grammar():
    assert trainer(recompute="{Gemm_0,Relu_1}") is not None
    with raises_sentence("no_match_of_node", pattern="'{Gemm_1,Relu_0}'"):
        trainer(recompute="{Gemm_1,Relu_0}").train_step(np.ones((2, 4)), np.zeros(2, np.int64))
    for targets in ("layer1|layer2", "layer{1,2}"):
        assert len(trainer(lora=onnxtrain.Lora(rank=2, targets=targets)).parameters) == 4
