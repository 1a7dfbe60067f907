"""Every usable node test of ONNX's backend suite as gradient checks.

A test is a model of one node, with inputs. It is checked at its own opset with all sizes known, with only ranks known,
with nothing known, and with its integer inputs as constants; then at all other opsets that it converts to. ``tables``
lists exceptions, with reasons. ``python tools/operators_page.py`` runs it all and writes
the table of ``docs/operators.md``.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Literal

import numpy as np
import onnx
import onnxruntime

from autodiff.case import gradients_alone
from autodiff.sweep.outcome import Outcome, Variant
from autodiff.sweep.subjects import NodeTest, Subject, node_tests, refusal, subjects
from autodiff.sweep.tables import BY_RUNTIME, EXCUSES, NOT_BY_RUNTIME, NOT_TWICE, SINGLE, matching
from onnxtrain import testing
from onnxtrain.autodiff.evaluator import evaluator
from onnxtrain.errors import GradientError

DOUBLE, FLOAT = np.dtype(np.float64), np.dtype(np.float32)
EXCUSED = {
    "rank": ("dynamic", "unknown"),
    "constants": ("static", "dynamic", "unknown"),
}
"""Checks in which a rule may raise an error."""

TOLERANCE_BY_RUNTIME = 1e-3
"""Tolerance of a float32 gradient by ONNX Runtime against differences in float64."""

TOLERANCE_OF_TORCH = 1e-6
"""Tolerance relative to the largest value, where both compute in float64."""


def checks(test: NodeTest) -> Iterator[tuple[Subject, Variant]]:
    """All checks of one test."""
    turns: tuple[Variant, ...] = ("static", "dynamic", "unknown")
    for index, subject in enumerate(subjects(test)):
        for variant in turns if index == 0 else (turns[index % 3],):
            yield subject, variant
        if index == 0 and subject.has_integers:
            yield subject, "constant"


def run(subject: Subject, variant: Variant, directions: int = 1) -> Outcome:
    """Check one subject; failures are part of the outcome."""
    outcome = functools.partial(Outcome, subject.test, subject.operator, subject.opset, variant)
    runtime = matching(NOT_BY_RUNTIME, subject.test) is None and has_kernel(subject)
    try:
        worst = _worst_error(subject, variant, runtime, directions)
    except GradientError as error:
        excuse = next((name for name, words in EXCUSES.items() if re.search(words, str(error))), "")
        allowed = variant in EXCUSED.get(excuse, ())
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
    """Compare ONNX Runtime's float32 gradient with the reference evaluator's float64 differences."""
    model = testing.with_float_type(subject.model, DOUBLE)
    feeds = {name: _as(array, DOUBLE) for name, array in subject.feeds.items()}
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        outputs = dict(zip((o.name for o in model.graph.output), evaluator(model).run(None, feeds), strict=True))
    projections = {name: rng.normal(size=y.shape) for name, y in outputs.items() if y.dtype == DOUBLE}
    built = testing.projected_gradient(model, subject.wrt, projections, shapes)
    _check_model(built)
    found = _run_single(built, subject)
    worst = 0.0
    for name in subject.wrt:
        gradient = found[f"{name}_grad"].astype(DOUBLE)
        testing._check_kind(name, gradient, feeds[name])
        arguments = (name, gradient, rng, 1e-6, TOLERANCE_BY_RUNTIME)
        worst = max(worst, testing._compare(evaluator(model), feeds, projections, *arguments))
    return worst


def run_second_order(subject: Subject, directions: int = 1) -> Outcome:
    """Check the gradient of a gradient against central differences of the first."""
    outcome = functools.partial(Outcome, subject.test, subject.operator, subject.opset, "second order")
    try:
        model = testing.with_float_type(subject.model, DOUBLE)
        feeds = {name: _as(array, DOUBLE) for name, array in subject.feeds.items()}
        rng = np.random.default_rng(1)
        outputs = zip((o.name for o in model.graph.output), evaluator(model).run(None, feeds), strict=True)
        projections = {name: rng.normal(size=y.shape) for name, y in outputs if y.dtype == DOUBLE}
        first = gradients_alone(testing.projected_gradient(model, subject.wrt, projections))
        result = testing.check_gradient(first, feeds, wrt=subject.wrt, directions=directions, tolerance=1e-5)
    except Exception as error:  # as in run
        return outcome(failure=f"{type(error).__name__}: {error}")
    return outcome(worst=result.worst, runtime=True)


def run_torch(subject: Subject) -> Outcome | None:
    """Compare a gradient with PyTorch's; ``None`` where PyTorch is not installed or lacks the operator."""
    if importlib.util.find_spec("torch") is None:
        return None
    from autodiff.sweep.by_torch import torch_gradients

    outcome = functools.partial(Outcome, subject.test, subject.operator, subject.opset, "PyTorch")
    single = subject.operator in SINGLE or matching(BY_RUNTIME, subject.test) is not None
    try:
        model = testing.with_float_type(subject.model, FLOAT if single else DOUBLE)
        feeds = {name: _as(array, FLOAT if single else DOUBLE) for name, array in subject.feeds.items()}
        outputs = _evaluated(model, feeds, single)
        rng = np.random.default_rng(2)
        projections = {n: rng.normal(size=y.shape).astype(y.dtype) for n, y in outputs.items() if y.dtype.kind == "f"}
        reference = torch_gradients(subject, projections)
        if reference is None:
            return None
        found = _evaluated(testing.projected_gradient(model, subject.wrt, projections), feeds, single)
        expected = {**reference[0], **{f"{name}_grad": gradient for name, gradient in reference[1].items()}}
        errors = {name: testing._relative_error(found[name], wanted) for name, wanted in expected.items()}
    except Exception as error:  # as in run
        return outcome(failure=f"{type(error).__name__}: {error}")
    name, worst = max(errors.items(), key=lambda item: item[1])
    limit = TOLERANCE_BY_RUNTIME if single else TOLERANCE_OF_TORCH
    return outcome(worst=worst, failure="" if worst <= limit else f"{name} differs by {worst:.2g} from PyTorch's")


def _evaluated(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], single: bool) -> dict[str, np.ndarray]:
    """The outputs by ONNX Runtime in float32, or by the reference evaluator."""
    if single:
        return _run_feeds(model, feeds)
    with np.errstate(all="ignore"):
        arrays = evaluator(model).run(None, dict(feeds))
    return dict(zip((output.name for output in model.graph.output), arrays, strict=True))


def second_order_subject(operator: str) -> Subject:
    """The operator's first usable test; for LayerNormalization without the float32 statistics."""
    subject = next(subject for test in usable_tests(operator) for subject in subjects(test))
    if operator == "LayerNormalization":
        del subject.model.graph.node[0].output[1:]
        del subject.model.graph.output[1:]
    return subject


def _check_model(model: onnx.ModelProto) -> None:
    """Check that a built model is valid; the checker requires shapes of inputs and outputs."""
    if all(info.type.tensor_type.HasField("shape") for info in (*model.graph.input, *model.graph.output)):
        onnx.checker.check_model(model)


def has_kernel(subject: Subject) -> bool:
    """Return whether ONNX Runtime runs the model, so that it must run its gradient."""
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
    return _run_feeds(model, subject.feeds)


def _run_feeds(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    serialized = testing.with_float_type(model, FLOAT).SerializeToString()
    session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    arrays = session.run(None, {name: _as(array, FLOAT) for name, array in feeds.items()})
    return dict(zip((output.name for output in model.graph.output), arrays, strict=True))


def _as(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return array.astype(dtype) if array.dtype in (FLOAT, DOUBLE) else array


def sweep(operator: str) -> list[Outcome]:
    """Run all checks of one operator."""
    onnxruntime.set_default_logger_severity(4)
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of infinities on the way
        for test in usable_tests(operator):
            outcomes += [run(subject, variant) for subject, variant in checks(test)]
            first = next(subjects(test), None)
            compared = None if first is None else run_torch(first)
            outcomes += [] if compared is None else [compared]
        if outcomes and operator not in NOT_TWICE:
            outcomes.append(run_second_order(second_order_subject(operator)))
    return outcomes


def usable_tests(operator: str) -> Iterator[NodeTest]:
    """ONNX's tests of an operator that are gradient checks."""
    return (test for test in node_tests() if test.operator == operator and refusal(test) is None)


def sweep_all(operators: Sequence[str], jobs: int) -> list[Outcome]:
    """Run all checks of the given operators in several processes; print failures and a summary."""
    begin = time.perf_counter()
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(jobs) as pool:
        for found in pool.map(sweep, operators):
            outcomes += found
            for outcome in (outcome for outcome in found if outcome.failure):
                first = outcome.failure.splitlines()[0]
                print(f"{outcome.test} {outcome.operator} {outcome.opset} {outcome.variant}: {first}", flush=True)
    failures = sum(bool(outcome.failure) for outcome in outcomes)
    tests = len({outcome.test for outcome in outcomes})
    print(f"{len(outcomes)} checks of {tests} tests, {failures} failed, {time.perf_counter() - begin:.0f} s")
    return outcomes
