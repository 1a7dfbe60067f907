"""`export --web` writes a folder that is a page, or says in one sentence why not."""

from __future__ import annotations

import json

import onnx
import pytest
from mistakes import Mistake

import onnxtrain
from onnxtrain.cli.web_page import RUNTIME, WEB_FILES

EXPORT = ("export", "model.onnx", "--loss", "softmax_cross_entropy")


def test_the_folder(files, success):
    out = success(*EXPORT, "--web", "page", "--learning-rate", "0.5").out
    assert "python -m http.server" in out
    assert {path.name for path in (files / "page").iterdir()} == set(WEB_FILES)
    assert (files / "page" / "model.onnx").read_bytes() == (files / "model.onnx").read_bytes()
    settings = json.loads((files / "page" / "training.json").read_text())
    assert settings["runtime"] == RUNTIME
    assert settings["learningRate"] == 0.5
    assert "image" not in settings
    success(*EXPORT, "--web", "page")  # over itself


def test_gray_images_are_drawn(files, success):
    onnx.save(onnxtrain.examples.digits_cnn(), files / "model.onnx")
    success(*EXPORT, "--web", "page")
    settings = json.loads((files / "page" / "training.json").read_text())
    assert settings["image"] == {"height": 8, "width": 8}
    assert (settings["input"], settings["target"], settings["classes"]) == ("image", "target", 10)
    (files / "model.labels.json").write_text('{"mean": [0.5], "std": [0.25]}')
    success(*EXPORT, "--web", "page")
    settings = json.loads((files / "page" / "training.json").read_text())
    assert settings["image"] == {"height": 8, "width": 8, "mean": 0.5, "std": 0.25}


@pytest.mark.parametrize(
    "mistake",
    [
        Mistake("kernels", "--web needs a step graph of standard operators", (*EXPORT, "--web", "p", "--kernels")),
        Mistake("tied copies", "--tie leaves copies out; export the step graph", (*EXPORT, "--web", "p", "--tie")),
        Mistake(
            "states",
            "--web keeps states in float32, not in bfloat16; leave it out of --precision",
            (*EXPORT, "--web", "p", "--precision", "states=bfloat16"),
        ),
        Mistake(
            "weights",
            "--web keeps weights in float32, not in bfloat16; leave it out of --precision",
            (*EXPORT, "--web", "p", "--precision", "master_weights=false"),
        ),
        Mistake("a file", "'train.npz' cannot be written: .*exists", (*EXPORT, "--web", "train.npz")),
        Mistake(
            "onto the model", "MODEL and the file 'model.onnx' of --web are the same file", (*EXPORT, "--web", ".")
        ),
    ],
    ids=str,
)
def test_mistakes(mistake, ends_in_one_sentence):
    ends_in_one_sentence(mistake)
