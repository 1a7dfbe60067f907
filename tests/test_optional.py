"""A missing package ends in one sentence that says how to install it."""

import os
import subprocess
import sys

import pytest

import onnxtrain.interop.flower.messages
import onnxtrain.interop.ray
from onnxtrain.errors import OptionError


@pytest.mark.parametrize(
    ("load", "name", "packages"),
    [
        (onnxtrain.interop.flower.messages.flower, "flower", "flwr"),
        (onnxtrain.interop.ray.ray, "ray", "'ray"),
    ],
)
def test_a_missing_package_is_named(load, name, packages):
    message = rf"^onnxtrain\.interop\.{name} needs \w+ [\d.]+ or newer .*; install it with pip install {packages}"
    with pytest.raises(OptionError, match=message):
        load("_missing_")


def test_onnxruntime_is_asked_for_in_one_sentence(tmp_path):
    """No dependency installs it, since its builds replace each other."""
    hide = "import sys; sys.modules['onnxruntime'] = None; import importlib.util as u; old = u.find_spec; "
    hide += "u.find_spec = lambda name, *rest: None if name == 'onnxruntime' else old(name, *rest); "
    for start, code in ((hide, 1), (f"{hide}sys.argv[0] = 'onnxtrain'; ", 1)):
        run = subprocess.run(
            [sys.executable, "-c", f"{start}import onnxtrain"], capture_output=True, text=True, env={**os.environ}
        )
        assert run.returncode == code
        lines = run.stderr.splitlines()
        assert "which is not installed: install one of its builds" in lines[-1]
        assert len(lines) == 1 or lines[-1].startswith("ImportError: onnxtrain runs on ONNX Runtime")
