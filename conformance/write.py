"""Write the suite: models, inputs and expected outputs in the form of ONNX's backend tests.

    python -m conformance.write build/conformance --jobs 2

writes ``KIND/test_NAME/model.onnx``, ``data.json`` (tolerances, source), ``test_data_set_0/`` and further data sets
of each case, and ``index.json``, the list of all. Models named ``_expanded`` compute the same in standard operators.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import onnxtrain
from conformance import gradients, losses, optimizers, trainings
from conformance.subject import KINDS, RTOL, Made, Subject, expand

INDEX = "index.json"


@functools.cache
def subjects() -> list[Subject]:
    """All cases; a name that two of a kind share gets a number."""
    seen: Counter[tuple[str, str]] = Counter()

    def numbered() -> Iterator[Subject]:
        for module in (gradients, losses, optimizers, trainings):
            for subject in module.subjects():
                seen[subject.kind, subject.name] += 1
                number = seen[subject.kind, subject.name]
                yield replace(subject, name=f"{subject.name}_{number}") if number > 1 else subject

    return list(numbered())


def chosen(only: str = "", kinds: Sequence[str] = ()) -> list[Subject]:
    """The cases whose name contains a text, of these kinds; no kinds are all."""
    return [subject for subject in subjects() if only in subject.name and (not kinds or subject.kind in kinds)]


def write_subject(subject: Subject, folder: Path) -> list[dict[str, Any]]:
    """Compute a case and write its models; returns its entries of the index."""
    made = subject.make()
    entries = []
    for form in subject.forms:
        model = made.model if not form else made.expanded or expand(made.model)
        onnx.checker.check_model(model)
        entry = {
            "name": f"test_{subject.name}{form}",
            "kind": subject.kind,
            "covers": sorted(subject.covers),
            "form": "expanded" if form else "as written",
            "source": made.source,
            "rtol": RTOL,
            "atol": made.atol,
            "data_sets": len(made.steps),
            "feedback": dict(made.feedback),
        }
        _write_case(folder / subject.kind / str(entry["name"]), model, made, entry)
        entries.append(entry)
    return entries


def _write_case(case: Path, model: onnx.ModelProto, made: Made, entry: dict[str, Any]) -> None:
    case.mkdir(parents=True)
    (case / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))
    (case / "data.json").write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
    extra = [info.name for entry in model.training_info for info in entry.algorithm.input]
    inputs = [info.name for info in model.graph.input] + extra
    outputs = [info.name for info in model.graph.output]
    for number, (feeds, expected) in enumerate(made.steps):
        data = case / f"test_data_set_{number}"
        data.mkdir()
        given = [name for name in inputs if name in feeds]
        wanted = list(expected) if model.training_info else outputs
        for prefix, names, arrays in (("input", given, feeds), ("output", wanted, expected)):
            for index, name in enumerate(names):
                array = arrays[name].astype(np.float32) if arrays[name].dtype == np.float64 else arrays[name]
                tensor = numpy_helper.from_array(np.asarray(array), name)
                (data / f"{prefix}_{index}.pb").write_bytes(tensor.SerializeToString(deterministic=True))


def _write_numbered(task: tuple[int, Path, str, tuple[str, ...]]) -> tuple[str, list[dict[str, Any]]]:
    number, folder, only, kinds = task
    subject = chosen(only, kinds)[number]
    try:
        return "", write_subject(subject, folder)
    except Exception as error:
        return f"{subject.kind} {subject.name}: {type(error).__name__}: {error}", []


def write_suite(folder: Path, *, only: str = "", kinds: Sequence[str] = (), jobs: int = 1) -> list[str]:
    """Write the suite to a folder, which must be empty or not exist; returns what failed."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: give a new folder, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    count = len(chosen(only, kinds))
    if not count:
        raise SystemExit(f"No case has {only!r} in its name and is of the kinds {', '.join(kinds or KINDS)}.")
    tasks = [(number, folder, only, tuple(kinds)) for number in range(count)]
    if jobs == 1:
        results = [_write_numbered(task) for task in tasks]
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            results = pool.map(_write_numbered, tasks, chunksize=8)
    entries = [entry for _, found in results for entry in found]
    index = {"onnxtrain": onnxtrain.__version__, "onnx": onnx.__version__, "cases": entries}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    shutil.copy(Path(__file__).with_name("run.py"), folder / "run.py")
    return [failure for failure, _ in results if failure]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the suite; 1 where a case has no expected values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--kind", action="append", choices=KINDS, default=[], help="only cases of this kind")
    parser.add_argument("--jobs", type=int, default=1, help="processes; default 1")
    options = parser.parse_args(arguments)
    failures = write_suite(options.folder, only=options.only, kinds=options.kind, jobs=options.jobs)
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{len(json.loads((options.folder / INDEX).read_text())['cases'])} cases in {options.folder}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
