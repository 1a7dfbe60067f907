"""The conformance suite: every operator, loss and optimizer has cases; its runner finds what is wrong."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

import operators_page
from conformance import gradients, losses, oracle, run, scoreboard
from conformance.subject import KINDS
from conformance.write import main, subjects, write_suite
from onnxtrain import backend
from onnxtrain.operators import OPTIMIZERS

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ("hardsigmoid_18", "squared_error", "nesterov", "mlp_momentum")


def covered(kind: str) -> set[str]:
    return {name for subject in subjects() if subject.kind == kind for name in subject.covers}


def test_every_differentiable_operator_has_both_orders() -> None:
    operators = {name for name in operators_page.standard_operators() if operators_page.differentiated_by(name)}
    assert not sorted(operators - covered("gradient"))
    assert not sorted(operators - covered("second_order"))


def test_every_loss_and_every_optimizer_has_cases() -> None:
    assert not losses.NAMES - covered("loss")
    for kind in ("optimizer", "step_graph", "training_info"):
        assert not OPTIMIZERS.keys() - covered(kind), kind


def test_names_are_unique_and_every_kind_is_there() -> None:
    keys = [(subject.kind, subject.name) for subject in subjects()]
    assert len(keys) == len(set(keys))
    assert {kind for kind, _ in keys} == set(KINDS)


def test_rows_that_are_left_out_exist() -> None:
    rows = {row.name for row in (*gradients.all_rows(), *gradients.MORE)}
    assert not gradients.LEFT_OUT.keys() - rows


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample of the suite: one case or two of every kind."""
    parts = [tmp_path_factory.mktemp("part") / name for name in SAMPLE]
    for part, name in zip(parts, SAMPLE, strict=True):
        assert write_suite(part, only=name) == []
    folder = tmp_path_factory.mktemp("suite")
    cases = []
    for part in parts:
        cases += json.loads((part / "index.json").read_text())["cases"]
        shutil.copytree(part, folder, dirs_exist_ok=True)
    (folder / "index.json").write_text(json.dumps({"cases": cases}))
    assert {case["kind"] for case in cases} == set(KINDS)
    return folder


@pytest.mark.parametrize("kind", ["optimizer", pytest.param("loss", marks=pytest.mark.thorough)])
def test_every_case_has_a_file_that_is_right(kind: str, tmp_path: Path) -> None:
    assert write_suite(tmp_path / "suite", kinds=[kind]) == []
    found = outcomes(tmp_path / "suite", run.onnxtrain)
    assert all(texts == {"passed"} for texts in found.values()), found


def outcomes(folder: Path, start: Callable[[Path], run.Run]) -> dict[str, set[str]]:
    """Run all cases in this process; the results by "kind, form"."""
    found: dict[str, set[str]] = {}
    for entry in run.entries(folder):
        text = run.run_case(folder / entry["kind"] / entry["name"], start)
        found.setdefault(f"{entry['kind']}, {entry['form']}", set()).add(text)
    return found


def test_onnxtrain_passes(written: Path) -> None:
    found = outcomes(written, run.onnxtrain)
    assert all(texts == {"passed"} for texts in found.values()), found
    assert "training_info, as written" in found


def test_onnx_runtime_passes_what_is_in_standard_operators(written: Path) -> None:
    found = outcomes(written, run.onnxruntime)
    for key, texts in found.items():
        if key.endswith("expanded"):
            assert texts == {"passed"}, key
        elif not key.startswith("training_info"):
            assert all(text.startswith("refused ") for text in texts), key
    assert all("Gradient" in text for text in found["gradient, as written"])


def test_the_command_writes_results(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--runtime", "onnxruntime", "--only", "squared", "--out", str(tmp_path / "r.json")]
    assert run.main([str(written), *arguments]) == 1  # the form as written is refused
    assert "loss, expanded: 1 of 1 passed" in capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["runtime"], found["version"]) == ("onnxruntime", onnxruntime.__version__)
    assert found["counts"] == {"loss, as written": {"refused": 1}, "loss, expanded": {"passed": 1}}
    assert list(found["failed"]) == ["loss, as written/test_mean_squared_error_values"]
    assert str(tmp_path.parent) not in (tmp_path / "r.json").read_text()  # results name no folder of a machine


def copy_of(written: Path, tmp_path: Path, kind: str) -> Path:
    """The cases of a kind in standard operators, to spoil."""
    folder = tmp_path / "copy"
    shutil.copytree(written, folder)
    cases = json.loads((folder / "index.json").read_text())["cases"]
    kept = [case for case in cases if case["kind"] == kind and case["form"] == "expanded"]
    (folder / "index.json").write_text(json.dumps({"cases": kept}))
    return folder


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "training_info"])
def test_a_wrong_expected_value_fails(kind: str, written: Path, tmp_path: Path) -> None:
    folder = copy_of(written, tmp_path, kind)
    path = sorted((folder / kind).glob("*_expanded/test_data_set_*/output_0.pb"))[-1]
    tensor = onnx.TensorProto.FromString(path.read_bytes())
    array = numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[-1:] += 0.01
    path.write_bytes(numpy_helper.from_array(array, tensor.name).SerializeToString())
    (text,) = outcomes(folder, run.onnxruntime)[f"{kind}, expanded"] - {"passed"}
    assert text.startswith(f"wrong {tensor.name} of data set")
    assert text.endswith("values differ")


def test_states_are_fed_back(written: Path, tmp_path: Path) -> None:
    """Inputs that are states are wrong in all data sets but the first: the runner does not read them."""
    folder = copy_of(written, tmp_path, "optimizer")
    for path in (folder / "optimizer").glob("*/test_data_set_[1-9]/input_*.pb"):
        tensor = onnx.TensorProto.FromString(path.read_bytes())
        if tensor.name.startswith(("X_", "V_", "H_")):
            array = np.full_like(numpy_helper.to_array(tensor), 7)
            path.write_bytes(numpy_helper.from_array(array, tensor.name).SerializeToString())
    assert outcomes(folder, run.onnxruntime) == {"optimizer, expanded": {"passed"}}


@pytest.mark.parametrize(
    ("found", "expected", "sentence"),
    [
        (np.float32([1, 2]), np.float32([1, 2.1]), "is 2 at [1], not 2.1; 1 of 2 values differ"),
        (np.float32([1]), np.float32([[1]]), "has the shape [1], not [1, 1]"),
        (np.float64([1]), np.float32([1]), "is of float64, not of float32"),
        (np.float32([np.nan]), np.float32([0]), "is nan at [0], not 0; 1 of 1 values differ"),
        (np.float32([np.inf]), np.float32([np.inf]), ""),
        (np.float32([np.nan]), np.float32([np.nan]), ""),
        (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32), ""),
    ],
)
def test_comparison(found: np.ndarray, expected: np.ndarray, sentence: str) -> None:
    assert run.compare(found, expected, 1e-3, 1e-4) == sentence


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of ONNX's own tests, which its runner loads
def test_the_runner_of_onnx_reads_it(written: Path) -> None:
    """With ONNX's own loader, tolerances and comparison, through the Backend API."""
    (case, *_) = [
        case for case in load_model_tests(data_dir=str(written), kind="optimizer") if "expanded" not in case.name
    ]
    assert (case.rtol, case.atol) == (1e-3, json.loads((Path(case.model_dir) / "data.json").read_text())["atol"])
    runner = Runner(backend, __name__)
    runner._add_model_test(case, "Conformance")
    (item,) = [item for name, item in runner._test_items["ConformanceModel"].items() if name.endswith("_cpu")]
    item.func(runner.test_cases["OnnxBackendConformanceModelTest"]())


@pytest.mark.thorough
def test_a_class_of_the_backend_api(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that ends the process fails its cases, and the others go on."""
    (tmp_path / "fragile.py").write_text(
        "import os\nfrom onnxtrain.backend import OnnxTrainBackend\n\n\nclass Fragile(OnnxTrainBackend):\n"
        "    @classmethod\n    def prepare(cls, model, device='CPU', **kwargs):\n"
        "        if any(node.op_type == 'HardSigmoid' for node in model.graph.node):\n            os._exit(3)\n"
        "        return super().prepare(model, device, **kwargs)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    assert run.main([str(written), "--runtime", "backend:fragile:Fragile"]) == 1
    text = capsys.readouterr().out
    assert "test_hardsigmoid_18: crashed the process ended with status 3" in text
    assert "loss, as written: 1 of 1 passed" in text


def test_programs_that_end_or_hang(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rest, sentence in (("time.sleep(60)", "late after 0.5 seconds"), ("sys.exit(3)", "crashed the process ended")):
        program = f"import sys, time; print('RUNTIME bad 1', flush=True); input(); {rest}"
        command = shlex.join([sys.executable, "-S", "-c", program])
        assert run.main([str(written), "--command", command, "--timeout", "0.5", "--only", "squared"]) == 1
        assert sentence in capsys.readouterr().out


def test_bad_input_ends_in_a_sentence(written: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no index.json: give the folder of a conformance suite\."):
        run.main([str(tmp_path), "--runtime", "onnxruntime"])
    with pytest.raises(SystemExit, match=r"No case has 'nothing' in its name\."):
        run.main([str(written), "--runtime", "onnxruntime", "--only", "nothing"])
    with pytest.raises(SystemExit, match=r"not_there is not installed in "):
        run.main([str(written), "--runtime", "backend:not_there", "--only", "squared"])
    with pytest.raises(SystemExit, match=r"no_such_program x cannot be started: No such file or directory\."):
        run.main([str(written), "--command", "no_such_program x"])
    with pytest.raises(SystemExit, match="did not name its runtime"):
        run.main([str(written), "--command", "true"])
    with pytest.raises(SystemExit, match="is not empty: give a new folder, or remove it"):
        main([str(written)])
    with pytest.raises(SystemExit, match="No case has 'nothing' in its name and is of the kinds loss"):
        main([str(tmp_path / "new"), "--only", "nothing", "--kind", "loss"])


def test_an_unknown_runtime_is_refused(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main([str(written), "--runtime", "onnxruntim"])
    assert "no runtime is named 'onnxruntim': give onnxruntime, onnxtrain" in capsys.readouterr().err


def test_differences_know_when_they_are_wrong() -> None:
    at = {"x": np.array([0.3, -0.7])}
    found = oracle.gradient(lambda a: float(np.sum(np.sin(a["x"]))), at, "x")
    np.testing.assert_allclose(found, np.cos(at["x"]), rtol=1e-10)
    direction = {"x": np.array([2.0, 1.0])}
    curved = oracle.second(lambda a: float(a["x"][0] ** 2 * a["x"][1]), at, "x", direction)
    np.testing.assert_allclose(curved, [2 * -0.7 * 2 + 2 * 0.3 * 1, 2 * 0.3 * 2], rtol=1e-7)
    with pytest.raises(oracle.UnsureError, match="the inputs are near a kink"):
        oracle.gradient(lambda a: float(np.abs(a["x"]).sum()), {"x": np.array([0.00015])}, "x")


def test_the_page_shows_the_results() -> None:
    text = scoreboard.PAGE.read_text()
    assert text == scoreboard.page(text, scoreboard.results()), "run python -m conformance.scoreboard"
    assert all(f"`{kind}`" in text for kind in KINDS)
    assert all(f"`{name}`" in text for name in run.RUNTIMES)


@pytest.mark.thorough
@pytest.mark.skipif(
    shutil.which("node") is None or not (ROOT / "web" / "node_modules" / "onnxruntime-web").is_dir(),
    reason="there is no Node, or its packages are not installed (npm ci --ignore-scripts in web/)",
)
def test_onnxruntime_web(written: Path, tmp_path: Path) -> None:
    command = f"node {ROOT / 'conformance' / 'run_web.mjs'}"
    run.main([str(written), "--command", command, "--out", str(tmp_path / "r.json")])
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["runtime"] == "onnxruntime-web"
    assert all(set(counts) == {"passed"} for key, counts in found["counts"].items() if "expanded" in key)
    assert_finds_wrong_values(written, tmp_path, command)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_cpp(written: Path, tmp_path: Path) -> None:
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'include'}"]
    linked = ["libonnxruntime.so.1", f"-Wl,-rpath,{tmp_path}", "-o", "run_suite"]
    subprocess.run(["c++", *flags, ROOT / "conformance" / "run.cpp", *linked], cwd=tmp_path, check=True)
    run.main([str(written), "--command", str(tmp_path / "run_suite"), "--out", str(tmp_path / "r.json")])
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["runtime"] == "onnxruntime-c++"
    assert all(set(counts) == {"passed"} for key, counts in found["counts"].items() if "expanded" in key)
    assert_finds_wrong_values(written, tmp_path, str(tmp_path / "run_suite"))


def assert_finds_wrong_values(written: Path, tmp_path: Path, command: str) -> None:
    folder = copy_of(written, tmp_path, "loss")
    for path in (folder / "loss").glob("*/test_data_set_0/output_0.pb"):
        tensor = onnx.TensorProto.FromString(path.read_bytes())
        path.write_bytes(numpy_helper.from_array(numpy_helper.to_array(tensor) + 1, tensor.name).SerializeToString())
    program = run.Program(command.split(), 60)
    assert {found.verdict for found in run.run_suite(folder, program)} == {"wrong"}
