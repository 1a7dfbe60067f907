"""The list of passes."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import onnx
import onnx_ir as ir
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering import pipeline
from onnxtrain.lowering.build_gradients import Derivative
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.rewrite import Rewrite
from onnxtrain.lowering.rules.kernels import KERNELS

pytestmark = pytest.mark.sampled(1)  # each case is cheap

HERE = Path(__file__).parent


def passes() -> dict[str, str]:
    """Return the functions that the list calls, and the modules that define them."""
    tree = ast.parse(inspect.getsource(pipeline))
    modules = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if node.module.startswith("onnxtrain.lowering")
    }
    body = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "lower_graph")
    calls = [node.func.id for node in ast.walk(body) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return {name: modules[name] for name in calls if name in modules}


def home(name: str) -> ModuleType:
    """Return the module that defines a pass."""
    return importlib.import_module(passes()[name])


def test_the_list_names_passes():
    assert {"fuse_attention", "build_gradients", "resolve_fused", "recompute", "fuse_updates"} <= set(passes())


def made(name: str) -> object:
    """Return a pass."""
    return getattr(home(name), name)


@pytest.mark.parametrize("name", sorted(passes()))
def test_every_pass_has_a_file_of_tests(name):
    check = name.startswith("check_")
    assert check or name == "use_kernels" or (HERE / f"test_{name}.py").is_file()


def test_every_kernel_has_a_file_of_tests():
    files = {path.name for path in HERE.glob("test_use_*_kernels.py")} | {"test_split_cross_entropy.py"}
    text = "".join((HERE / file).read_text() for file in files)
    assert all(name in text for rule in KERNELS for name in rule.pattern.anchors)


@pytest.mark.parametrize("name", sorted(passes()))
def test_every_pass_says_what_it_requires_and_ensures(name):
    text = inspect.getdoc(made(name)) or ""  # of rules: of the class, since the driver does that
    assert "Requires:" in text
    assert "Ensures:" in text


@pytest.mark.parametrize("name", sorted(name for name in passes() if isinstance(made(name), Rewrite)))
def test_every_rewrite_is_documented_behind_it(name):
    lines = inspect.getsource(home(name)).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"{name} = "))
    end = next(place for place in range(start, len(lines)) if lines[place].startswith(('"""', "#", "def ")))
    assert lines[end].startswith('"""')


def listed() -> list[tuple[str, str]]:
    """Return the passes of the function in order, each with the graphs that it is for."""
    tree = ast.parse(inspect.getsource(pipeline.lower_graph))
    choices = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "kernels"]
    ways = {id(inner): way for node in choices for way, part in branches(node) for inner in ast.walk(part)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    names = {*passes(), "clean", "remove_unused"}
    calls = sorted((call for call in calls if call.func.id in names), key=lambda call: call.lineno)
    return [(call.func.id, ways.get(id(call), "both")) for call in calls]


def branches(node: ast.If) -> list[tuple[str, ast.stmt]]:
    return [("kernels", part) for part in node.body] + [("portable", part) for part in node.orelse]


def test_the_page_has_the_list():
    text = (HERE.parents[1] / "docs" / "architecture.md").read_text().split("### The passes")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE) == listed()


GRAPH = """
<ir_version: 8, opset_import: ["": 18]>
f (float[n, 4] x) => (float[n, 3] y) <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}>
{ h = MatMul(x, w)  y = Tanh(h) }
"""


@pytest.mark.parametrize("kernels", [False, True])
def test_every_pass_leaves_a_valid_model(kernels, monkeypatch):
    """Run ONNX's checker and shape inference after every pass, where the graph has standard operators only."""
    seen = []

    def checked(name, function):
        def run(model, *arguments, **keywords):
            result = function(model, *arguments, **keywords)
            if isinstance(model, ir.Model) and all(not node.domain for node in model.graph):
                proto = ir.to_proto(model)
                onnx.checker.check_model(proto)
                onnx.shape_inference.infer_shapes(proto, strict_mode=True)
                seen.append(name)
            return result

        return run

    for name in passes():
        place = pipeline if hasattr(pipeline, name) else home(name)  # it is imported when it is needed
        monkeypatch.setattr(place, name, checked(name, getattr(place, name)))
    model = infer_shapes(ir.from_proto(parser.parse_model(GRAPH)))
    graph = model.graph
    (y,) = graph.outputs
    lower_graph(model, kernels=kernels, derivative=Derivative(y, [graph.initializers["w"]]))
    assert [value.name for value in graph.outputs] == ["y", "w_grad"]
    assert len(seen) >= 3


def test_nothing_is_left_of_other_domains():
    trained = onnxtrain.training_model(
        onnxtrain.examples.mlp((4, 3)), loss="softmax_cross_entropy", optimizer=onnxtrain.Adam()
    )
    step = onnxtrain.lower(trained)
    assert {entry.domain for entry in step.opset_import} == {""}
    assert {node.domain for node in step.graph.node} == {""}
