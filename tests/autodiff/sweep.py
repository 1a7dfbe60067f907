"""Every usable node test of ONNX's backend suite as gradient checks.

A test is a model of one node, with inputs. It is checked at its own opset with all sizes known, with only ranks known,
with nothing known, and with its integer inputs as constants; then at each of the other opsets that it can be brought
to. What is left out or changed, and why, is in ``sweep_tables``.

``python tests/autodiff/sweep.py [operator ...]`` runs it; ``--write docs/operators.md`` writes the table.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
from sweep_subjects import NodeTest, Subject, node_tests, refusal, subjects
from sweep_tables import BY_RUNTIME, EXCUSES, NOT_BY_RUNTIME, SINGLE, matching

from onnxtrain import testing
from onnxtrain.errors import GradientError
from onnxtrain.reference import evaluator

Variant = Literal["static", "dynamic", "unknown", "constant"]
DOUBLE, FLOAT = np.dtype(np.float64), np.dtype(np.float32)
TOLERANCE_BY_RUNTIME = 1e-3
"""Against differences in double, of a gradient that ONNX Runtime computed in single precision."""


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Attributes:
        test: Name of ONNX's test.
        operator: Its operator.
        opset: Where it was checked.
        variant: What the gradient builder knew of shapes and integer inputs.
        worst: The largest relative error; NaN where nothing was compared.
        runtime: Whether ONNX Runtime has kernels for the operator and was compared.
        excuse: What the rule needs and did not get: "rank" or "constants".
        failure: What went wrong.
    """

    test: str
    operator: str
    opset: int
    variant: Variant
    worst: float = float("nan")
    runtime: bool = False
    excuse: str = ""
    failure: str = ""


def checks(test: NodeTest) -> Iterator[tuple[Subject, Variant]]:
    """All checks of one test."""
    turns: tuple[Variant, ...] = ("static", "dynamic", "unknown")
    for index, subject in enumerate(subjects(test)):
        for variant in turns if index == 0 else (turns[index % 3],):
            yield subject, variant
        if subject.has_integers:
            yield subject, "constant"


def run(subject: Subject, variant: Variant, directions: int = 1) -> Outcome:
    """Check one subject; failures are part of the outcome."""
    outcome = functools.partial(Outcome, subject.test, subject.operator, subject.opset, variant)
    runtime = matching(NOT_BY_RUNTIME, subject.test) is None and has_kernel(subject)
    try:
        worst = _worst_error(subject, variant, runtime, directions)
    except GradientError as error:
        excuse = next((name for name, words in EXCUSES.items() if re.search(words, str(error))), "")
        allowed = (excuse == "rank" and variant in ("dynamic", "unknown")) or (
            excuse == "constants" and variant != "constant"
        )
        return outcome(excuse=excuse) if allowed else outcome(failure=f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever a rule does wrong is a result of the sweep
        return outcome(failure=f"{type(error).__name__}: {error}")
    return outcome(worst=worst, runtime=runtime)


def _worst_error(subject: Subject, variant: Variant, runtime: bool, directions: int) -> float:
    shapes = "static" if variant == "constant" else variant
    given = subject.with_constants() if variant == "constant" else subject
    if matching(BY_RUNTIME, subject.test):
        return _worst_by_runtime(given, shapes)
    precision = "float" if subject.operator in SINGLE else "double"
    result = testing.check_gradient(
        given.model,
        given.feeds,
        wrt=given.wrt,
        shapes=shapes,
        precision=precision,
        runtime=runtime,
        directions=directions,
    )
    _check_model(result.model)
    return result.worst


def _worst_by_runtime(subject: Subject, shapes: Literal["static", "dynamic", "unknown"]) -> float:
    """ONNX Runtime's gradient in single precision against the reference evaluator's differences in double."""
    model = testing.with_float_type(subject.model, DOUBLE)
    feeds = {name: _as(array, DOUBLE) for name, array in subject.feeds.items()}
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        outputs = dict(zip((o.name for o in model.graph.output), evaluator(model).run(None, feeds), strict=True))
    projections = {name: rng.normal(size=y.shape) for name, y in outputs.items() if y.dtype == DOUBLE}
    built = testing.projected_gradient(model, subject.wrt, projections, shapes, feeds)
    _check_model(built)
    found = _run_single(built, subject)
    worst = 0.0
    for name in subject.wrt:
        gradient = found[f"{name}_grad"].astype(DOUBLE)
        testing._check_kind(name, gradient, feeds[name])
        arguments = (name, gradient, rng, 1e-6, TOLERANCE_BY_RUNTIME)
        worst = max(worst, testing._compare(evaluator(model), feeds, projections, *arguments))
    return worst


def _check_model(model: onnx.ModelProto) -> None:
    """What was built is valid, with types and shapes that fit; the checker wants outputs to have shapes."""
    if all(output.type.tensor_type.HasField("shape") for output in model.graph.output):
        onnx.checker.check_model(model, full_check=True)


def has_kernel(subject: Subject) -> bool:
    """Whether ONNX Runtime runs the model itself; then it has to run its gradient, too."""
    return _has_kernel(testing.with_float_type(subject.model, FLOAT).SerializeToString(), subject)


_KERNELS: dict[bytes, bool] = {}


def _has_kernel(model: bytes, subject: Subject) -> bool:
    if model not in _KERNELS:
        try:
            _run_single(onnx.ModelProto.FromString(model), subject)
        except Exception:  # ONNX Runtime's errors have no common class
            _KERNELS[model] = False
        else:
            _KERNELS[model] = True
    return _KERNELS[model]


def _run_single(model: onnx.ModelProto, subject: Subject) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    serialized = testing.with_float_type(model, FLOAT).SerializeToString()
    session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    arrays = session.run(None, {name: _as(array, FLOAT) for name, array in subject.feeds.items()})
    return dict(zip((output.name for output in model.graph.output), arrays, strict=True))


def _as(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return array.astype(dtype) if array.dtype in (FLOAT, DOUBLE) else array


def sweep(operators: Sequence[str] = ()) -> Iterator[Outcome]:
    """Check everything, or what is of the named operators."""
    for test in node_tests():
        if (not operators or test.operator in operators) and refusal(test) is None:
            for subject, variant in checks(test):
                yield run(subject, variant)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", help="check only these")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table of operators")
    options = parser.parse_args(arguments)
    onnxruntime.set_default_logger_severity(4)
    begin = time.perf_counter()
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for outcome in sweep(options.operators):
            outcomes.append(outcome)
            if outcome.failure:
                first = outcome.failure.splitlines()[0]
                print(f"{outcome.test} {outcome.operator} {outcome.opset} {outcome.variant}: {first}", flush=True)
    failures = sum(bool(outcome.failure) for outcome in outcomes)
    seconds = time.perf_counter() - begin
    tests = len({outcome.test for outcome in outcomes})
    print(f"{len(outcomes)} checks of {tests} tests, {failures} failed, {seconds:.0f} s")
    if options.write:
        from sweep_document import operators_document

        options.write.write_text(operators_document(outcomes), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
