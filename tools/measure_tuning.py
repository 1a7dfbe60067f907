"""Measure the constants of native/tuning.h again: each compared with half and twice its value.

    python tools/measure_tuning.py [NAME...] [--factors 0.5 1 2] [--rounds 15]

For every constant, a copy of native/ with another value is built in a temporary folder. The cases that depend on the
constant (tuning_cases.py), single nodes and steps of small trainings, alternate between the two libraries; cases that
share work run on two threads. The script prints time ratios: below 1 the changed constant is faster. The first build
takes a minute, later ones some seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import onnxruntime

from onnxtrain.errors import OnnxTrainError
from onnxtrain.lowering.description import IN_PLACE_KEY
from tuning_cases import CASES, Case, Work

ROOT = Path(__file__).resolve().parents[1]
DEFINITION = r"(?P<before>\b{name}\s*(?:=\s*|\())(?P<value>std::size_t\{{1\}} << \d+|[\d.]+(?: \* [\d.]+)*)"


def main() -> None:
    """Measure the constants that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--factors", nargs="+", type=float, default=[0.5, 2.0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    unknown = set(options.names) - set(CASES)
    if unknown:
        sys.exit(f"There is no case for {', '.join(sorted(unknown))}: choose of {', '.join(CASES)}.")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        shutil.copytree(ROOT / "native", source / "native")
        shutil.copy(ROOT / "CMakeLists.txt", source)
        plain = build(source, Path(folder) / "plain.so")
        header = source / "native" / "tuning.h"
        text, made = header.read_text(), header.stat().st_mtime_ns
        print("| figure | factor | case | time, of the plain library's |\n|---|---:|---|---:|")
        before: list[Path] = []
        for name in options.names or CASES:
            of_figure = users(source, name)
            for factor in options.factors:
                header.write_text(changed(text, name, factor))
                os.utime(header, ns=(made, made))  # so that only files that use the constant are compiled again
                for file in (*before, *of_figure):
                    file.touch()
                before = of_figure
                library = build(source, Path(folder) / f"{name}-{factor}.so")
                for label, ratio in compare(plain, library, CASES[name], options.rounds).items():
                    print(f"| `{name}` | {factor:g} | {label} | {ratio:.3f} |", flush=True)
                library.unlink()


def users(source: Path, name: str) -> list[Path]:
    """Return the files of a source tree that use a constant."""
    files = (file for file in (source / "native").rglob("*") if file.suffix in (".h", ".cpp"))
    return [file for file in files if file.name != "tuning.h" and re.search(rf"\b{name}\b", file.read_text())]


def changed(text: str, name: str, factor: float) -> str:
    """Return the header with one constant multiplied by a factor."""
    found = re.search(DEFINITION.format(name=name), text)
    if found is None:
        sys.exit(f"native/tuning.h has no figure {name}.")
    value = found["value"]
    new = f"{value} * {factor}" if "." in value else f"static_cast<std::size_t>(({value}) * {factor})"
    return text[: found.start()] + found["before"] + new + text[found.end() :]


def build(source: Path, library: Path) -> Path:
    """Build the library of a source tree incrementally, and copy it."""
    made = source / "build"
    for command in (["cmake", "-S", source, "-B", made], ["cmake", "--build", made, "--parallel", os.cpu_count()]):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
    shutil.copy(made / "libonnxtrain_kernels.so", library)
    return library


def runner(library: Path, work: Work) -> Callable[[], object]:
    """Return a function that runs a graph with one library."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = work.threads
    options.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(work.model.SerializeToString(), options, ["CPUExecutionProvider"])
    binding, values = (
        session.io_binding(),
        {n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in work.feeds.items()},
    )
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    metadata = session.get_modelmeta().custom_metadata_map
    in_place = {f"{state}_new": values[state] for state in json.loads(metadata.get(IN_PLACE_KEY, "[]"))}
    for output in session.get_outputs():
        if output.name in in_place:
            binding.bind_ortvalue_output(output.name, in_place[output.name])
        else:
            binding.bind_output(output.name, "cpu")
    return lambda: session.run_with_iobinding(binding)


def compare(plain: Path, other: Path, cases: Mapping[str, Case], rounds: int) -> dict[str, float]:
    """The median over rounds of the ratio of times, by case; without those that this machine cannot run."""
    ratios = {}
    for label, make in cases.items():
        try:
            work = make()
        except OnnxTrainError as error:
            print(f"{label} is not measured here: {error}", file=sys.stderr)
            continue
        steps = [runner(library, work) for library in (plain, other)]
        for step in steps:
            step()
        of_rounds = []
        for number in range(rounds):
            times = [0.0, 0.0]
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                start = time.perf_counter()
                for _ in range(3):
                    steps[which]()
                times[which] = time.perf_counter() - start
            of_rounds.append(times[1] / times[0])
        ratios[label] = statistics.median(of_rounds)
    return ratios


if __name__ == "__main__":
    main()
