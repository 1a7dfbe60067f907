"""Every benchmark runs in its short form and reports what it promises; the parts that compute are checked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from distributed.processes import needs_mpi

REPOSITORY = Path(__file__).resolve().parent.parent
BENCHMARKS = REPOSITORY / "benchmarks"
sys.path.append(str(BENCHMARKS))

import fused_cases  # noqa: E402
import harness  # noqa: E402
import idx  # noqa: E402
import profile_step  # noqa: E402
import step  # noqa: E402
import timed_operators  # noqa: E402

import report  # noqa: E402
from onnxtrain.autodiff import registry  # noqa: E402
from onnxtrain.autodiff.fused import fused_operators  # noqa: E402
from zoo.mnist_files import write_digits, write_idx  # noqa: E402

pytestmark = pytest.mark.thorough


def run(script: str, *arguments: str, expected: int = 0) -> str:
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert result.returncode == expected, result.stderr
    return result.stdout


def run_refused(script: str, *arguments: str) -> str:
    """The message of a run that is refused for its arguments."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 2
    return result.stderr


def rows(text: str) -> list[list[str]]:
    """The cells of a Markdown table, without its rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if set(row[0]) != {"-"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in which the exported models are kept for all tests."""
    pytest.importorskip("torch")
    return str(tmp_path_factory.mktemp("models"))


@pytest.mark.torch
def test_the_guard_passes_equal_versions_and_fails_slower_ones(models: str) -> None:
    arguments = ("--quick", "--earlier", sys.executable, "--rounds", "3", "--folder", models)
    header, *cases = rows(run("guard.py", *arguments, "--limit", "100"))
    assert header[4] == "new / old"
    assert len(cases) == 2
    assert all(float(case[4]) > 0 for case in cases)
    assert "Slower than 0.01: mlp, lenet5." in run("guard.py", *arguments, "--limit", "0.01", expected=1)


def test_overhead_reports_three_models() -> None:
    header, *models = rows(run("overhead.py", "--quick"))
    assert header[-1] == "added by Python, µs"
    assert len(models) == 3
    for _, whole, bare, added in models:
        assert min(float(whole), float(bare)) > 0
        assert float(added) < float(whole)  # the median of differences: on a busy machine it may be below zero


def test_startup_counts_every_phase(tmp_path: Path) -> None:
    other = f"earlier={sys.executable}"
    arguments = ("--quick", "--peers", "onnxtrain,earlier", "--environment", other, "--folder", str(tmp_path))
    _, *frameworks = rows(run("startup.py", *arguments))
    assert [row[0] for row in frameworks] == ["onnxtrain", "earlier"]
    text = run("startup.py", "--quick", "--peers", "onnxtrain", "--imports", "--folder", str(tmp_path))
    _, (name, imports, build, first, whole), *packages = rows(text)
    assert name == "onnxtrain"
    assert float(imports) + float(build) + float(first) == pytest.approx(float(whole), abs=0.05)
    assert {"onnx_ir", "onnxruntime"} <= {row[0] for row in packages}


@pytest.mark.torch
def test_step_compares_with_pytorch(models: str, tmp_path: Path) -> None:
    output = tmp_path / "step.md"
    arguments = ("--quick", "--models", "mlp", "--batch", "4", "--threads", "1", "--rounds", "2", "--folder", models)
    run("step.py", *arguments, "--peers", "onnxtrain,torch,onnxsim", "--output", str(output))
    text = output.read_text()
    header, measured = rows(text)
    assert header[:2] == ["model", "batch"]
    ours, ratio, our_memory, torch, torch_memory = map(float, measured[2:7])
    assert min(ours, torch, our_memory, torch_memory) > 0
    assert ratio > 0
    assert "onnxsim 0.8.1, mlp, batch 4: no environment: give --environment onnxsim=" in text


@pytest.mark.torch
def test_the_zoo_is_compared_with_pytorch(models: str) -> None:
    arguments = ("--quick", "--models", "tabular_1", "--processor", "--rounds", "2", "--folder", models)
    text = run("zoo_step.py", *arguments, "--peers", "onnxtrain,torch")
    header, measured = rows(text)
    assert header[:2] == ["model", "batch"]
    assert measured[0].startswith("tabular with batch normalization: features 100")
    assert measured[1] == "1024"
    assert min(map(float, measured[2:7])) > 0
    assert "1 threads, processor time" in text


@pytest.mark.torch
def test_ten_models_are_compared_with_pytorch(models: str) -> None:
    arguments = ("--quick", "--models", "experts", "--processor", "--rounds", "2", "--folder", models)
    text = run("ten_step.py", *arguments, "--peers", "onnxtrain,torch")
    _, measured = rows(text)
    assert measured[0] == "mixture of 8 dense experts"
    assert min(map(float, measured[2:7])) > 0


@pytest.mark.torch
def test_limits_give_the_share_by_model_and_operator(models: str) -> None:
    header, model, *operators = rows(run("limits.py", "--quick", "--models", "tabular_1", "--folder", models))
    assert header[6] == "share"
    seconds, products, stream, calls, limit, share = map(float, model[1:7])
    assert max(products, stream) < limit
    assert limit < products + stream + calls + 0.01
    assert share == pytest.approx(limit / seconds, rel=0.1)
    assert {"Linear", "BatchNormalizationGradient", "Adam"} <= {row[0] for row in operators}


@pytest.mark.torch
def test_gpu_says_that_there_is_none_and_its_script_runs_on_the_processor(models: str) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        assert re.fullmatch(r"Nothing is measured: this onnxruntime has no provider for CUDA .*\.\n", run("gpu.py"))
    report = run("gpu.py", "--device", "cpu", "--quick", "--folder", models)
    steps, placement, agreement, update = report.split("\n\n")[:4]
    assert min(map(float, rows(steps)[1][2:])) > 0
    assert rows(placement)[1][2] == "none"
    assert rows(agreement)[1][1:] == ["2", "0.0e+00"]
    assert min(map(float, rows(update)[1][1:3])) > 0


@pytest.mark.torch
def test_side_by_side_compares_two_trainers_with_one(models: str) -> None:
    text = run("side_by_side.py", "--quick", "--models", "mlp", "--folder", models)
    header, *found = rows(text)
    assert header[2:] == ["one trainer, steps/s", "two, half of the threads each", "two, all threads each"]
    assert [row[1] for row in found] == ["onnxtrain", "PyTorch"]
    assert all(float(cell) > 0 for row in found for cell in row[2:])
    assert "geometric mean" in text
    refused = run_refused("side_by_side.py", "--threads", "1")
    assert "--threads is 1; two trainers that share them need at least 2" in refused


@pytest.mark.torch
@needs_mpi
def test_parallel_compares_with_pytorch(models: str) -> None:
    text = run("parallel.py", "--quick", "--models", "mlp", "--ranks", "1", "2", "--folder", models)
    header, one, two = rows(text)
    assert header[:3] == ["model", "batch", "processes"]
    assert min(float(one[3]), float(one[4]), float(one[6])) > 0
    bytes_moved = 4 * (784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10)
    assert float(two[7]) == pytest.approx(bytes_moved / 1e6, rel=0.01)
    assert two[header.index("hidden")].endswith("%")


@pytest.mark.torch
@needs_mpi
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or not Path("/dev/net/tun").exists() or shutil.which("tc") is None,
    reason="networks are made by root, on Linux with iproute2 and /dev/net/tun",
)
def test_cost_model_measures_slow_networks(models: str) -> None:
    found = rows(run("cost_model.py", "--quick", "--folder", models))
    place = next(index for index, row in enumerate(found) if row[0] == "model")
    measured = {row[0]: float(row[4]) for row in found[1:place]}
    assert measured["exchange"] > 10  # the delay, in ms
    assert measured["sum of 4096 KiB"] > 1e3 * (4 << 20) / 2.5e6  # what the link lets through in that time
    assert len(found) == place + 1 + 16


@pytest.mark.torch
def test_recurrent_compares_with_pytorch(models: str) -> None:
    arguments = (
        "--quick",
        "--models",
        "gru-64-2",
        "--batch",
        "2",
        "--threads",
        "1",
        "--rounds",
        "2",
        "--folder",
        models,
    )
    header, measured = rows(run("recurrent.py", *arguments, "--peers", "onnxtrain,torch"))
    assert header[:2] == ["model", "batch"]
    assert measured[0] == "GRU, 64 wide, 2 layers"
    assert all(float(cell) > 0 for cell in measured[2:7])


@pytest.mark.torch
def test_processor_time_takes_turns(models: str) -> None:
    arguments = ("--quick", "--models", "rnn-64-1", "--batch", "2", "--peers", "onnxtrain,torch", "--folder", models)
    header, (name, batch, ours, theirs, ratio) = rows(run("processor_time.py", *arguments))
    assert header[2:] == ["onnxtrain, ms", "PyTorch, ms", "ratio to the faster"]
    assert (name, batch) == ("RNN, 64 wide, 1 layer", "2")
    assert float(ratio) == pytest.approx(float(ours) / float(theirs), rel=0.1)


@pytest.mark.torch
def test_gradient_cost_counts_nodes(models: str) -> None:
    other = f"earlier={sys.executable}"
    text = run("gradient_cost.py", "--quick", "--models", "mlp", "--folder", models, "--environment", other)
    _, (_, nodes, _, standard, *cells) = rows(text)
    seconds, *compared = (cells[start : start + 3] for start in (0, 3, 6))  # then by the clock, and of the processor
    for new, old, ratio in compared:
        assert float(ratio) == pytest.approx(float(new) / float(old), rel=0.1)
    assert int(nodes) == 5  # three Gemm, two Relu
    assert int(standard) > 2 * int(nodes)
    build, session, whole = map(float, seconds)
    assert 0 < session < whole
    assert build == pytest.approx(whole - session, rel=0.05)


@pytest.mark.torch
def test_fused_compares_kernel_body_and_torch() -> None:
    text = run("fused.py", "--quick", "--threads", "1", "--only", "ReluGradient,ConvWeightGradient")
    found = rows(text)[1:]
    assert {row[0] for row in found} == {"`ReluGradient`", "`ConvWeightGradient`"}
    assert all(float(cell) > 0 for row in found for cell in row[2:5])


@pytest.mark.torch
def test_fused_measures_every_operator() -> None:
    measured = {case.operator for case in fused_cases.cases()}
    assert measured == {operator.name for operator in fused_operators()}


@pytest.mark.torch
def test_every_differentiable_operator_is_timed_or_has_a_reason(tmp_path: Path) -> None:
    cases = timed_operators.cases()
    ruled = {entry.operator for entry in registry.entries() if entry.function is not None and entry.domain == ""}
    assert {case.operator for case in cases} | set(timed_operators.NOT_TIMED) == ruled
    assert len({case.name for case in cases}) == len(cases)
    found = tmp_path / "results.jsonl"
    text = run("operators.py", "--quick", "--results", str(found))
    assert "11 measurements" in text
    assert len(found.read_text().splitlines()) == 11


@pytest.mark.torch
def test_profile_finds_forward_gradient_and_update(models: str) -> None:
    text = run("profile_step.py", "--quick", "--models", "mlp", "--threads", "1", "--folder", models)
    groups = {row[0] for row in rows(text)}
    assert {"gradient of Gemm", "update", "forward Linear"} <= groups


def test_mnist_trains_and_checks_the_file(tmp_path: Path) -> None:
    write_digits(tmp_path, 1000, 1000)
    model = tmp_path / "trained.onnx"
    common = (str(tmp_path), "--threads", "1", "--model", str(model), "--batch-size", "32")
    text = run("mnist.py", *common, "--epochs", "3")
    assert model.exists()
    assert "Goal: 99.0 % within 3 epochs: reached." in text
    missed = run("mnist.py", *common, "--quick", "--learning-rate", "0", expected=1)
    assert "Goal: 99.0 % within 1 epochs: missed." in missed


def test_mnist_names_a_missing_file(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / "mnist.py"), str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "has neither train-images-idx3-ubyte.gz nor train-images-idx3-ubyte." in result.stderr


@pytest.mark.parametrize("name", ["array.gz", "array"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_idx_round_trip(name: str, dtype: type, tmp_path: Path) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    write_idx(tmp_path / name, array)
    found = idx.read_idx(tmp_path / name)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == dtype


def test_idx_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "array"
    path.write_bytes(b"\x89PNG....")
    with pytest.raises(ValueError, match="is not an IDX file: it begins with 89504e47"):
        idx.read_idx(path)
    write_idx(path, np.zeros((2, 2), np.uint8))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"has 3 bytes of data, but its shape \(2, 2\) needs 4"):
        idx.read_idx(path)


def test_losses_that_differ_are_reported() -> None:
    reference = harness.Measurement(losses=[2.0, 1.0])
    assert harness.losses_differ(harness.Measurement(losses=[2.0001, 1.01]), reference) == ""
    assert harness.losses_differ(harness.Measurement(losses=[2.01, 1.04]), reference, rounded=True) == ""
    assert "the loss of step 1 is 1.06" in harness.losses_differ(
        harness.Measurement(losses=[2.01, 1.06]), reference, rounded=True
    )
    assert "the loss of step 0 is 2.01" in harness.losses_differ(harness.Measurement(losses=[2.01, 1.0]), reference)
    assert "the loss of step 1 is nan" in harness.losses_differ(
        harness.Measurement(losses=[2.0, float("nan")]), reference
    )


def test_ratio_is_the_median_of_paired_rounds() -> None:
    mine, theirs = harness.Measurement(rounds=[1.0, 9.0, 3.0]), harness.Measurement(rounds=[2.0, 9.0, 2.0])
    assert mine.ratio_to(theirs) == 1.0
    assert step.geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)


def test_foreign_load_leaves_own_time_out() -> None:
    with harness.ForeignLoad() as foreign:
        subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)
    assert 0.0 <= foreign.cores <= (os.cpu_count() or 1)


def test_a_peer_that_fails_is_reported(tmp_path: Path) -> None:
    task = step.Task("onnxtrain", "mlp", 2, 1, str(tmp_path))
    (tmp_path / "mlp-0.onnx").write_bytes(b"not a model")
    found = harness.measure([task], harness.Interpreters(), rounds=1, round_seconds=0.01)
    assert re.search(r"ModelError: .*\(exit code 1\)", found["onnxtrain"].problem)


def test_profile_takes_the_median_and_names_the_part() -> None:
    name = "gradient of /0/Gemm/MatMul_7"
    events = [
        {"cat": "Node", "name": f"{name}_kernel_time", "dur": duration, "args": {"op_name": "MatMul"}}
        for duration in (900, 900, 900, 5, 100, 6)
    ]
    (node,) = profile_step.node_times(events, 6, {name})
    assert node.part == "gradient of Gemm"
    assert node.seconds == pytest.approx(6e-6)
    assert profile_step.part_of("fused /0/Gemm", "FusedGemm", {"/0/Gemm"}) == "forward Gemm"
    assert profile_step.part_of("Transpose_9", "Transpose", {"/0/Gemm"}) == "added by onnxruntime: Transpose"
    assert profile_step.part_of("update/Adam_6", "Adam", set()) == "update"


def test_report_replaces_one_section() -> None:
    page = "a\n<!-- step -->\nold\n<!-- /step -->\nb\n<!-- startup -->\nkept\n<!-- /startup -->\n"
    assert report.replaced(page, "step", "new") == page.replace("\nold\n", "\n\nnew\n\n")
    with pytest.raises(ValueError, match="The page has no section <!-- memory -->"):
        report.replaced(page, "memory", "new")


def test_every_section_has_its_page() -> None:
    for name in report.sections(["peft=python"], "folder"):
        assert report.replaced(report.page_of(name).read_text(), name, "") != "", name


def test_reading_measures_what_a_training_waits(tmp_path: Path) -> None:
    text = run("reading.py", "--quick", "--peers", "onnxtrain", "--folder", str(tmp_path))
    header, *found = rows(text)
    assert header[-1] == "waiting in later epochs"
    assert [row[:2] for row in found] == [["pictures", "onnxtrain"], ["CSV", "onnxtrain"]]
    for *_, opening, first, later, share in found:
        assert min(float(opening), float(first), float(later)) > 0
        assert 0 <= float(share.removesuffix(" %")) <= 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads memory from /proc")
def test_large_files_are_trained_in_two_ways(tmp_path: Path) -> None:
    header, *found = rows(run("large_files.py", "--quick", "--steps", "3", "--folder", str(tmp_path)))
    assert [row[header.index("trained")] for row in found] == ["LoRA", "head"] * 4
    for row in found:
        first, last = map(float, row[header.index("loss")].split(" → "))
        assert last < first
        assert float(row[header.index("own, training")]) > 10
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
def test_adapters_are_measured_beside_peft(tmp_path: Path) -> None:
    for module in ("peft", "onnxruntime_genai", "safetensors"):
        pytest.importorskip(module)
    header, *found = rows(run("adapters.py", "--quick", "--folder", str(tmp_path)))
    assert header[0] == "framework"
    assert {row[header.index("checkpointing")] for row in found} == {"no", "yes"}
    losses = {row[0]: [float(loss) for loss in row[-1].split(" → ")] for row in found}
    twice = {(row[0], row[-1]) for row in found if row[0].startswith("onnxtrain")}
    assert len(twice) == len({name for name, _ in twice})  # recomputation changes no loss
    assert losses["onnxtrain"][0] == pytest.approx(losses["PEFT"][0], abs=2e-4)
    assert losses["onnxtrain, int4 file"][0] == pytest.approx(losses["PEFT, weights of int4 in float32"][0], abs=2e-4)
    coarse = losses.pop("PEFT, bfloat16")  # its weights move by less than their rounding
    assert coarse[1] <= coarse[0]
    assert all(last < first for first, last in losses.values())
    for row in found:
        figures = row[header.index("step, ms") : -1]
        assert all(float(cell.split()[0].replace(",", "")) > 0 for cell in figures)


def test_a_failed_run_of_adapters_leaves_the_other_turns_in_pairs() -> None:
    """With the turns 1 and 2 of PEFT failed, the third of both is compared, not the third with the first."""
    command = """
import adapters
def result(seconds): return {"steps": [[seconds, seconds]], "first": [1.0, 1.0], "peak": 8.0, "losses": [2.0, 1.0]}
found = {"PEFT": [None, None, result(4)], "onnxtrain": [result(1), None, result(3)]}
row = adapters.row_of(adapters.Setting(8, "attention", False), "onnxtrain", found, adapters.SIZES["quick"], CASES, None)
print(row[4])
print(adapters.row_of(adapters.Setting(8, "attention", False), "PEFT", found, adapters.SIZES["quick"], CASES, None)[4])
""".replace("CASES", "adapters.CASES")
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=BENCHMARKS, check=True)
    assert result.stdout.split("\n")[:2] == ["2,000 (0.75)", "4,000"]


def test_cases_of_adapters_are_selected_with_those_that_they_are_compared_with() -> None:
    command = "import adapters; print([*adapters.selected(adapters.CASES, PATTERNS)])"
    for patterns, expected in (
        (["onnxtrain, int4 file, compute*"], ["PEFT, bfloat16", "onnxtrain, int4 file, compute in bfloat16"]),
        (["PEFT", "onnxtrain"], ["PEFT", "onnxtrain"]),
    ):
        program = [sys.executable, "-c", command.replace("PATTERNS", repr(patterns))]
        result = subprocess.run(program, capture_output=True, text=True, cwd=BENCHMARKS, check=True)
        assert result.stdout.strip() == repr(expected)
    program = [sys.executable, str(BENCHMARKS / "adapters.py"), "--cases", "torchtune"]
    refused = subprocess.run(program, capture_output=True, text=True, cwd=REPOSITORY)
    assert "No case is named torchtune; there are PEFT; PEFT, bfloat16;" in refused.stderr


def test_products_are_measured_in_both_types() -> None:
    header, row = rows(run("products.py", "--quick"))
    assert header[1:3] == ["float32", "bfloat16"]
    assert row[0] == "8 x 64 x 64"
    assert all(float(rate) > 0 for rate in row[1:])


@pytest.mark.torch
def test_products_are_measured_beside_those_of_torch() -> None:
    pytest.importorskip("torch")
    header, row = rows(run("products.py", "--quick", "--against-torch"))
    assert header[-2:] == ["PyTorch, float32", "PyTorch, bfloat16"]
    assert float(row[-1]) > 0


@pytest.mark.torch
def test_convolutions_are_measured_in_both_types_beside_those_of_torch() -> None:
    pytest.importorskip("torch")
    header, row = rows(run("convolutions.py", "--quick", "--against-torch"))
    assert header[1:4] == ["y float32", "y bfloat16", "y PyTorch"]
    assert len(header) == len(row) == 10
    assert row[0] == "1 x 8 x 6 x 6, 3 x 3, 8"
    assert all(float(rate) > 0 for rate in row[1:])


@pytest.mark.torch
def test_weight_gradients_are_measured_beside_those_of_torch() -> None:
    pytest.importorskip("torch")
    header, row = rows(run("products.py", "--quick", "--weight-gradients", "--against-torch"))
    assert header == ["rows x inputs x outputs", "float32", "PyTorch, float32"]
    assert all(float(rate) > 0 for rate in row[1:])


@pytest.mark.torch
def test_attention_is_measured_in_both_types_beside_that_of_torch() -> None:
    pytest.importorskip("torch")
    header, row = rows(run("attention.py", "--quick", "--against-torch"))
    assert header[1:] == ["float32", "bfloat16", "PyTorch, float32", "PyTorch, bfloat16"]
    assert row[0] == "1 x 2 x 40 x 32, causal"
    assert all(float(number) > 0 for cell in row[1:] for number in cell.split(" + "))


@pytest.mark.torch
def test_structures_of_an_exported_network_go() -> None:
    pytest.importorskip("transformers")
    text = run("structures.py", "--only", "bert")
    (_, (name, _, verdict, gone, *_)) = rows(text)
    assert (name, verdict) == ("bert", "right")
    assert 25 <= int(gone.rstrip("%")) <= 40
    assert "onnxtrain: 1 of 1 right" in text


@pytest.mark.torch
def test_a_time_limit_ends_an_architecture() -> None:
    pytest.importorskip("transformers")
    (_, row) = rows(run("structures.py", "--only", "bert", "--limit", "0.01"))
    assert row == ["bert", "transformers", "not done after 0.01 s", "0%", "not done after 0.01 s"]


@pytest.mark.torch
def test_numbers_of_channels_are_timed() -> None:
    pytest.importorskip("torch")
    (_, *found) = rows(run("structures.py", "--channels", "--quick"))
    assert [row[0] for row in found] == ["32", "63"]
    assert all(0 < float(part) < 20 for row in found for part in row[1:])


@pytest.mark.torch
def test_accuracy_at_equal_latency_is_compared(tmp_path: Path) -> None:
    pytest.importorskip("torch_pruning")
    write_digits(tmp_path, 128, 128)
    (_, *found) = rows(run("structures.py", "--accuracy", str(tmp_path), "--examples", "128", "--seeds", "1"))
    assert [row[:2] for row in found] == [["ResNet", "1"], ["VGG", "1"], ["MobileNet", "1"]]
