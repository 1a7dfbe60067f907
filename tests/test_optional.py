"""A missing optional package ends in one sentence that says how to install it."""

import pytest

import onnxtrain.flower.messages
import onnxtrain.ray.collective
from onnxtrain.errors import OptionError


@pytest.mark.parametrize(
    ("load", "extra"), [(onnxtrain.flower.messages.flower, "flower"), (onnxtrain.ray.collective.ray, "ray")]
)
def test_a_missing_package_is_named_with_its_extra(load, extra):
    message = (
        rf"^onnxtrain\.{extra} needs \w+ [\d.]+ or newer \(No module named '_missing_'\); .*'onnxtrain\[{extra}\]'"
    )
    with pytest.raises(OptionError, match=message):
        load("_missing_")
