"""The rule book of axes covers operators that the rule book of gradients knows."""

from onnx import defs

from onnxtrain.autodiff import registry as gradients
from onnxtrain.plugins.structures.axes import registry as axes
from sentences import raises_sentence


def _names(entries):
    return {(entry.domain, entry.operator) for entry in entries}


def test_every_operator_with_an_axis_rule_is_known_to_gradients():
    """As a rule, as a body in standard operators, or as a function of ONNX."""
    extra = _names(axes.RULES) - _names(gradients.entries()) - set(gradients.registered_bodies())
    assert {name for name in extra if name[0] or not _is_function(name[1])} == set()


def _is_function(operator):
    schema = defs.get_schema(operator)
    return schema.has_function or schema.has_context_dependent_function


def test_every_operator_without_a_rule_says_why():
    for entry in axes.RULES:
        assert (entry.function is None) == bool(entry.reason), entry.operator


def test_rules_that_overlap_are_refused():
    with raises_sentence("axis_rule_registered", operator="ai.onnx::Relu", versions="1 to the newest"):
        axes.axes_of("Relu", since=13)(lambda node: [])
