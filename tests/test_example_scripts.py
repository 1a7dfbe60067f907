"""The programs in examples/ run and reach their results."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
TESTED_ELSEWHERE = {
    "custom_ops_plain.py": "tests/native/test_native_library.py",
    "server.py": "tests/test_server_example.py",
    "step_in_place.py": "tests/passes/test_in_place_runs.py",
    "train.cpp": "tests/languages/test_cpp.py",
    "run_sparse.cpp": "tests/languages/test_cpp_sparse.py",
}


def above(bound):
    return lambda result: result > bound


def two_outputs(result):
    right, apart = result
    return right > 0.95 and apart < 1


def distillation(result):
    teacher, student = result
    return student > 0.9 and student > teacher - 0.05


def continue_sklearn(result):
    before, after = result
    return after > max(before, 0.9)


# Program: what it needs besides, the model that it writes, whether what it returns is what it promises.
PROGRAMS = {
    "transfer_images.py": ("PIL", "tuned.onnx", above(0.9)),
    "tabular.py": (None, "flowers.onnx", above(0.9)),
    "tabular_pipeline.py": ("pandas", "hires.onnx", above(0.9)),
    "text_classification.py": (None, "reviews.onnx", above(0.95)),
    "language_model.py": (None, "letters.onnx", lambda text: text.startswith("twinkle little star\nhow i wonder")),
    "distillation.py": (None, "student.onnx", distillation),
    "two_outputs.py": (None, "detector.onnx", two_outputs),
    "detection.py": ("PIL", "detector.onnx", lambda found: found["yolo"] > 0.4 and found["detr"] > 0.1),
    "coco.py": ("PIL", "coco_detector.onnx", lambda found: found["before"] < 0.05 and found["after"] > 0.2),
    "continue_sklearn.py": ("skl2onnx", "tuned.onnx", continue_sklearn),
    "face_embeddings.py": (
        "matplotlib",
        "face_embeddings.onnx",
        lambda found: found["after"] > 0.91 and found["after"] > found["before"] + 0.05,
    ),
    "wake_word_audio.py": ("matplotlib", "wake_word_audio.onnx", lambda found: found["after"] > 0.95 > found["before"]),
    "transducer.py": ("matplotlib", "transducer.onnx", lambda found: found["after"] > 0.85 and found["before"] < 0.1),
    "graph_network.py": (None, "graph_network.onnx", above(0.9)),
    "stateful_audio.py": (None, "stateful_audio.onnx", lambda found: found["carried"] > 0.95 and found["reset"] < 0.8),
    "wake_word.py": (None, "wake_word.onnx", lambda found: found["recall"] > 0.9 and found["precision"] > 0.8),
}
QUICK = {"tabular.py", "wake_word.py", "graph_network.py"}
SHORTER = {"detection.py": {"epochs": 4}, "coco.py": {"images": 500, "epochs": 6}}
"""Arguments that make a program shorter than it is by default."""


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in PROGRAMS]
)
def test_an_example_runs(program, tmp_path, monkeypatch):
    needed, written, keeps = PROGRAMS[program]
    if needed:
        pytest.importorskip(needed)
    if program == "continue_sklearn.py":
        monkeypatch.setattr("warnings.filters", [])  # scikit-learn's and skl2onnx's own
    spec = importlib.util.spec_from_file_location(f"example_{Path(program).stem}", FOLDER / program)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # a pipeline pickles functions by the name of their module
    spec.loader.exec_module(module)
    result = module.main(tmp_path, **SHORTER.get(program, {}))
    assert keeps(result), result
    model = onnx.load(tmp_path / written)
    onnx.checker.check_model(model)
    assert all(
        np.isfinite(array).all()
        for array in map(onnx.numpy_helper.to_array, model.graph.initializer)
        if array.dtype.kind == "f"
    )


def test_every_program_is_listed_and_tested():
    programs = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".cpp")} - {"make_data.py"}
    assert set(re.findall(r"^\| `([\w.]+(?:py|cpp))` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)) == programs
    assert programs == PROGRAMS.keys() | TESTED_ELSEWHERE.keys()
    for program, test in TESTED_ELSEWHERE.items():
        assert program in (FOLDER.parent / test).read_text()
