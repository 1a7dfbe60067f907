"""Run the conformance suite for training on a runtime. Needs Python, numpy, onnx and the runtime; nothing of onnxtrain.

    python run.py FOLDER --runtime onnxruntime
    python run.py FOLDER --runtime backend:my_package.backend    # any class or module of ONNX's Backend API
    python run.py FOLDER --command "node run_web.mjs"            # any program that speaks the protocol below

Each case runs in a process that is started again when it crashes. The program ends with status 1 where a case fails.

The protocol: the program first writes ``RUNTIME name version``. Then, for each line of its input, which is the folder
of a case, it runs all data sets, compares the outputs, and writes one line: ``RESULT passed``, ``RESULT wrong reason``
where an output differs, or ``RESULT refused reason`` where the runtime does not load or run the model. Other lines are
ignored.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import selectors
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays, Sequence[str]], Sequence[Any]]
"""Runs a model: inputs by name, in their order, and the names of the wanted outputs."""

TRAINING_INFO = "training_info"
"""The kind whose models a runtime trains, instead of running their graph."""


def onnxruntime(case: Path) -> Run:
    """Stock ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(str(case / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return lambda feeds, names: session.run(list(names), feeds)


def reference(case: Path) -> Run:
    """ONNX's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(str(case / "model.onnx"))
    return lambda feeds, names: session.run(list(names), feeds)


def openvino(case: Path) -> Run:
    """OpenVINO on the CPU, in float32: its default on some CPUs is bfloat16."""
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(str(case / "model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feeds, names: list(compiled(feeds).values())


def tract(case: Path) -> Run:
    """Tract, whose optimizer needs the shapes of the inputs."""
    import tract

    model = tract.onnx().load(str(case / "model.onnx"))
    order = [model.input_name(index) for index in range(model.input_count())]
    ready: list[Any] = []

    def run(feeds: Arrays, names: Sequence[str]) -> list[np.ndarray]:
        if not ready:
            for index, name in enumerate(order):
                kind = feeds[name].dtype
                letters = "bool" if kind.kind == "b" else f"{kind.kind}{8 * kind.itemsize}"
                model.set_input_fact(index, ",".join([*map(str, feeds[name].shape), letters]))
            ready.append(model.into_model().into_runnable())
        return [found.to_numpy() for found in ready[0].run([feeds[name] for name in order])]

    return run


def onnxtrain(case: Path) -> Run:
    """Onnxtrain: training operators and TrainingInfoProto on stock ONNX Runtime."""
    if case.parent.name != TRAINING_INFO:
        return backend("onnxtrain.backend")(case)
    import onnxtrain

    session = onnxtrain.TrainingSession(case / "model.onnx")

    def run(feeds: Arrays, names: Sequence[str]) -> list[Any]:
        results = session.step(feeds)
        return [results[name] if name in results else session.state[name.removesuffix("_new")] for name in names]

    return run


def backend(where: str) -> Callable[[Path], Run]:
    """A class or a module of ONNX's Backend API."""

    def start(case: Path) -> Run:
        import onnx

        module, _, name = where.partition(":")
        found = importlib.import_module(module)
        prepared = (getattr(found, name) if name else found).prepare(onnx.load(case / "model.onnx"), "CPU")
        return lambda feeds, names: list(prepared.run(list(feeds.values())))

    return start


RUNTIMES: dict[str, tuple[Callable[[Path], Run], str, bool]] = {
    "onnxruntime": (onnxruntime, "onnxruntime", False),
    "onnxtrain": (onnxtrain, "onnxtrain", True),
    "openvino": (openvino, "openvino", False),
    "reference": (reference, "onnx", False),
    "tract": (tract, "tract", False),
}
"""Runtimes of Python: how to run a case, the distribution with the version, and whether it runs training_info."""


def compare(found: Any, expected: np.ndarray, rtol: float, atol: float) -> str:
    """Say how an output differs from the expected one; nothing where it agrees."""
    array = np.asarray(found)
    if array.shape != expected.shape:
        return f"has the shape {list(array.shape)}, not {list(expected.shape)}"
    if array.dtype != expected.dtype:
        return f"is of {array.dtype}, not of {expected.dtype}"
    with np.errstate(all="ignore"):
        wide, wanted = array.astype(np.float64), expected.astype(np.float64)
        close = (np.abs(wide - wanted) <= atol + rtol * np.abs(wanted)) | (wide == wanted)
    close |= np.isnan(wide) & np.isnan(wanted)
    if close.all():
        return ""
    index = tuple(int(place) for place in np.argwhere(~close)[0])
    count = int((~close).sum())
    return f"is {wide[index]:.6g} at {list(index)}, not {wanted[index]:.6g}; {count} of {array.size} values differ"


def tensors(data: Path, prefix: str) -> Arrays:
    """The tensors of a data set by name, in order."""
    import onnx
    from onnx import numpy_helper

    found: Arrays = {}
    for index in range(len(list(data.glob(f"{prefix}_*.pb")))):
        tensor = onnx.TensorProto.FromString((data / f"{prefix}_{index}.pb").read_bytes())
        found[tensor.name] = np.array(numpy_helper.to_array(tensor))  # some runtimes refuse read-only memory
    return found


def run_case(case: Path, start: Callable[[Path], Run]) -> str:
    """Run all data sets of a case; from the second on, outputs of the runtime itself replace inputs."""
    about = json.loads((case / "data.json").read_text(encoding="utf-8"))
    try:
        run = start(case)
    except Exception as error:
        return f"refused {_sentence(error)}"
    fed: Arrays = {}
    for number in range(about["data_sets"]):
        data = case / f"test_data_set_{number}"
        feeds, expected = tensors(data, "input"), tensors(data, "output")
        try:
            outputs = run({name: fed.get(name, array) for name, array in feeds.items()}, list(expected))
        except Exception as error:
            return f"refused {_sentence(error)}"
        for (name, wanted), found in zip(expected.items(), outputs, strict=True):
            if difference := compare(found, wanted, about["rtol"], about["atol"]):
                return f"wrong {name} of data set {number} {difference}"
        found = dict(zip(expected, outputs, strict=True))
        fed = {given: np.array(found[output]) for output, given in about["feedback"].items()}
    return "passed"


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def work(runtime: str) -> int:
    """Speak the protocol for a runtime of Python."""
    if runtime.startswith("backend:"):
        where = runtime.removeprefix("backend:")
        start, package, trains = backend(where), where.partition(":")[0].partition(".")[0], False
    else:
        start, package, trains = RUNTIMES[runtime]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        try:
            version = getattr(importlib.import_module(package), "__version__", "unknown")
        except ImportError:
            print(f"ERROR {package} is not installed in {sys.executable}.", flush=True)
            return 1
    print(f"RUNTIME {runtime} {version}", flush=True)
    for line in sys.stdin:
        case = Path(line.rstrip("\n"))
        if case.parent.name == TRAINING_INFO and not trains:
            print("RESULT refused the runtime does not read training_info", flush=True)
        else:
            print(f"RESULT {run_case(case, start)}", flush=True)
    return 0


class Outcome(NamedTuple):
    """The result of one case: ``passed``, ``wrong``, ``refused``, ``crashed`` or ``late``, and why."""

    kind: str
    name: str
    form: str
    verdict: str
    reason: str


class Program:
    """A program that speaks the protocol."""

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self.command, self.timeout = list(command), timeout
        self.runtime = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def run(self, case: Path) -> tuple[str, str]:
        """Run a case: the verdict and the reason."""
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(f"{case.resolve()}\n".encode())
            process.stdin.flush()
            line = self._line("RESULT ")
        except BrokenPipeError:
            line = None
        except TimeoutError:
            self.stop()
            return "late", f"after {self.timeout:g} seconds"
        if line is None:
            code = process.wait()
            self.stop()
            return "crashed", f"the process ended with status {code}"
        verdict, _, reason = line.partition(" ")
        return verdict, reason

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise SystemExit(f"{shlex.join(self.command)} cannot be started: {error.strerror}.") from None
        self._rest = b""
        try:
            line = self._line("RUNTIME ", "ERROR ")
        except TimeoutError:
            line = None
        if not line or line.startswith("ERROR "):
            self.stop()
            problem = (line or "").removeprefix("ERROR ")
            raise SystemExit(problem or f"{shlex.join(self.command)} did not name its runtime.")
        self.runtime = line
        return self._process

    def stop(self) -> None:
        """End the program."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _line(self, *prefixes: str) -> str | None:
        """The next line with one of these prefixes, without the first of them; ``None`` where the program ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        end = time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" in self._rest:
                    line, self._rest = self._rest.split(b"\n", 1)
                    text = line.decode(errors="replace")
                    if text.startswith(prefixes):
                        return text.removeprefix(prefixes[0])
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError
                part = os.read(self._process.stdout.fileno(), 65536)
                if not part:
                    return None
                self._rest += part


def entries(folder: Path) -> list[dict[str, Any]]:
    """The cases of a suite, from its index."""
    index = folder / "index.json"
    if not index.is_file():
        raise SystemExit(f"{folder} has no index.json: give the folder of a conformance suite.")
    found: list[dict[str, Any]] = json.loads(index.read_text(encoding="utf-8"))["cases"]
    return found


def run_suite(folder: Path, program: Program, *, only: str = "") -> Iterator[Outcome]:
    """Run the cases whose name contains a text."""
    try:
        for entry in entries(folder):
            if only in entry["name"]:
                verdict, reason = program.run(folder / entry["kind"] / entry["name"])
                reason = reason.replace(f"{folder.resolve()}{os.sep}", "")
                yield Outcome(entry["kind"], entry["name"], entry["form"], verdict, reason)
    finally:
        program.stop()


def report(outcomes: Sequence[Outcome], runtime: str) -> dict[str, Any]:
    """Results as JSON: counts by kind and form, and the cases that failed with their reasons.

    Where all cases of a kind and form are refused, the first stands for all.
    """
    counts: dict[str, Counter[str]] = {}
    failed: dict[str, str] = {}
    for outcome in outcomes:
        counts.setdefault(f"{outcome.kind}, {outcome.form}", Counter())[outcome.verdict] += 1
    for outcome in outcomes:
        key = f"{outcome.kind}, {outcome.form}"
        is_first = not any(name.startswith(f"{key}/") for name in failed)
        if outcome.verdict != "passed" and (is_first or set(counts[key]) != {"refused"}):
            failed[f"{key}/{outcome.name}"] = f"{outcome.verdict} {outcome.reason[:90]}".rstrip()
    name, _, version = runtime.partition(" ")
    return {
        "runtime": name,
        "version": version,
        "machine": f"{platform.system()} {platform.machine()}",
        "counts": {key: dict(sorted(counter.items())) for key, counter in counts.items()},
        "failed": failed,
    }


def summary(counts: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Lines of the counts by kind and form."""
    for key, found in counts.items():
        total = sum(found.values())
        rest = ", ".join(f"{count} {verdict}" for verdict, count in found.items() if verdict != "passed")
        yield f"{key}: {found.get('passed', 0)} of {total} passed{rest and f'; {rest}'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; 1 where a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of the suite")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--runtime", help=f"{', '.join(RUNTIMES)}, or backend:MODULE or backend:MODULE:CLASS")
    which.add_argument("--command", help="a program that speaks the protocol")
    parser.add_argument("--python", default=sys.executable, help="the Python that has the runtime")
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one case; default 60")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    parser.add_argument("--quiet", action="store_true", help="print counts only, and no failure")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    known = options.runtime is None or options.runtime in RUNTIMES or options.runtime.startswith("backend:")
    if not known:
        parser.error(f"no runtime is named {options.runtime!r}: give {', '.join(RUNTIMES)}, or backend:MODULE")
    if options.worker:
        return work(options.runtime)
    if options.folder is None:
        parser.error("give the folder of the suite")
    command = [options.python, str(Path(__file__).resolve()), "--runtime", str(options.runtime), "--worker"]
    program = Program(shlex.split(options.command) if options.command else command, options.timeout)
    outcomes = []
    for outcome in run_suite(options.folder, program, only=options.only):
        outcomes.append(outcome)
        if outcome.verdict != "passed" and not options.quiet:
            print(f"{outcome.kind}/{outcome.name}: {outcome.verdict} {outcome.reason}")
    if not outcomes:
        raise SystemExit(f"No case has {options.only!r} in its name.")
    results = report(outcomes, program.runtime)
    print("\n".join([f"{results['runtime']} {results['version']}", *summary(results["counts"])]))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
