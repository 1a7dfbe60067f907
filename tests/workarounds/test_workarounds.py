"""Upstream bugs in the registry: each is reproduced in the installed version; a fixed one fails the test."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.graph.limits import has_body_in_branches
from onnxtrain.graph.upstream import sessions
from onnxtrain.graph.upstream.book import BOOK, Workaround
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.step import create_session
from sentences import raises_sentence
from workarounds import bugs_of_evaluation, bugs_of_onnx, bugs_of_onnxruntime, bugs_of_torch  # noqa: F401 - a registry
from workarounds.bugs_of_onnxruntime import DEEP_SCAN
from workarounds.shown import SHOWN, model

SOURCES = Path(onnxtrain.__file__).parent


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def installed(package: str) -> tuple[int, ...] | None:
    if package == "onnxruntime":  # also where it comes from a distribution of another name
        return version(onnxruntime.__version__)
    try:
        return version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def verdict(entry: Workaround, found: tuple[int, ...], present: bool) -> str:
    """Return the required action for an entry, or nothing if the registry is up to date."""
    oldest, newest = map(version, entry.seen)
    if entry.gone is not None and found >= version(entry.gone):
        return f"{entry.name!r} is back in {entry.package} {found}: say so in `seen`, and take `gone` away." * present
    if present or found < oldest or (entry.gone is not None and found > newest):
        return ""
    return (
        f"{entry.name!r} is gone in {entry.package} {found}: say so in `gone`, and remove the workaround in "
        f"{', '.join(entry.where)} when no supported version has it any more."
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PyTorch's exporter
@pytest.mark.parametrize(
    "entry", [entry for entry in BOOK if entry.package != "onnxruntime-web"], ids=lambda entry: entry.name
)
def test_the_bug_is_there(entry: Workaround) -> None:
    found = installed(entry.package)
    if found is None:
        pytest.skip(f"{entry.package} is not installed")
    assert not (problem := verdict(entry, found, SHOWN[entry.name]())), problem


def test_the_bell_rings() -> None:
    entry = Workaround("a bug", "onnx", ("1.20.0", "1.22.0"), "Wrong.", "Done.", ("ir/shapes.py",))
    gone = Workaround("a bug", "onnx", ("1.20.0", "1.22.0"), "Wrong.", "Done.", ("ir/shapes.py",), gone="1.24.0")
    assert re.search(r"'a bug' is gone in onnx \(1, 25, 0\): .* in ir/shapes.py", verdict(entry, (1, 25, 0), False))
    assert "is gone" in verdict(entry, (1, 21, 0), False)
    assert "is gone" in verdict(gone, (1, 21, 0), False)
    assert "is back in onnx (1, 25, 0)" in verdict(gone, (1, 25, 0), True)
    for book, found, present in [
        (entry, (1, 25, 0), True),
        (entry, (1, 19, 0), False),
        (gone, (1, 21, 0), True),
        (gone, (1, 23, 0), False),  # not checked
        (gone, (1, 25, 0), False),
    ]:
        assert verdict(book, found, present) == ""


def test_the_book_is_complete() -> None:
    names = [entry.name for entry in BOOK]
    in_browsers = {entry.name for entry in BOOK if entry.package == "onnxruntime-web"}  # shown in languages/
    assert set(SHOWN) == set(names) - in_browsers
    assert len(names) == len(set(names))
    for entry in BOOK:
        for text in (entry.wrong, entry.done):
            assert text[0].isupper()
            assert text.endswith(".")
        for file in entry.where:
            text = " ".join((SOURCES / file).read_text(encoding="utf-8").split())
            assert entry.name in text or "onnxtrain.graph.upstream" in text, f"{file} does not name {entry.name!r}"
    for file in SOURCES.rglob("*.py"):
        for name in re.findall(r"\(workarounds: ([^).]+)\)", " ".join(file.read_text(encoding="utf-8").split())):
            for one in name.split(", "):
                assert one in names, f"{file} names {one!r}, which is not in the book"


@pytest.mark.parametrize("equation", ["...ij,...j->...i", "... i j , ...j -> ...i"])
def test_einsum_with_ellipses_of_different_ranks_is_refused(equation: str) -> None:
    text = f"""g (float[N,3,4] x, float[4] w) => (float[N,3] y) {{ y = Einsum<equation = "{equation}">(x, w) }}"""
    with raises_sentence("einsum_ellipses", got=[0, 1]):
        sessions.refuse_crashing_nodes(ir.from_proto(model(text)).graph)


def test_einsum_with_ellipses_of_one_rank_passes() -> None:
    text = """g (float[N,3,4] x, float[N,4] w) => (float[N,3] y)
        { y = Einsum<equation = "...ij,...j->...i">(x, w) }"""
    sessions.refuse_crashing_nodes(ir.from_proto(model(text)).graph)


def test_bodies_deep_in_branches_run() -> None:
    rng = np.random.default_rng(0)
    x, h, a = (np.abs(rng.normal(size=size)).astype(np.float32) for size in ((3, 2, 2), (2, 2), (2, 2)))
    expected = h
    for row in x:
        expected = expected @ a + row
    working = ir.from_proto(model(DEEP_SCAN))
    found = create_session(working, RuntimeOptions(threads=1)).run(None, {"x": x, "h": h, "a": a})[0]
    np.testing.assert_allclose(found, expected @ a, rtol=1e-5)


SCAN = "a = Scan <num_scan_inputs = 1, body = s (float i) => (float j) { j = Neg(i) }> (x)"
IF = "y = If (c) <then_branch = t () => (float[3] a) {{ {} }}, else_branch = e () => (float[3] f) {{ f = Abs(x) }}>"
OWN = '<domain: "own", opset_import: ["": 18, "own": 1]>'


@pytest.mark.parametrize(
    ("nodes", "functions", "deep"),
    [
        (IF.format("a = Neg(x)"), "", False),
        (IF.format(SCAN), "", False),
        (IF.format("g = Neg(x) " + IF.replace("y =", "a =").replace("[3] a", "[3] b").format("b = Neg(x)")), "", False),
        (IF.format(IF.replace("y =", "a =").replace("[3] a", "[3] b").format(SCAN.replace("a =", "b ="))), "", True),
        (IF.format("a = own.f(x, c)"), f"{OWN} f (x, c) => (y) {{ {IF.format(SCAN)} }}", True),
        ("y = own.f(x, c)", f"{OWN} f (x, c) => (y) {{ {IF.format(SCAN)} }}", False),
    ],
    ids=["a branch", "a Scan in one", "two branches", "a Scan in two", "a Scan in a function", "a function alone"],
)
def test_what_lies_deep_in_branches(nodes: str, functions: str, deep: bool) -> None:
    imports = '<ir_version: 10, opset_import: ["": 18, "own": 1]>'
    proto = parser.parse_model(f"{imports} g (float[3] x, bool c) => (float[3] y) {{ {nodes} }} {functions}")
    assert has_body_in_branches(ir.from_proto(proto), 2) == deep
