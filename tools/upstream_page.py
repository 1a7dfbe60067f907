"""Write docs/upstream.md, the open entries of the registry of upstream bugs, or print a report that is ready to send.

python tools/upstream_page.py                      # write the page
python tools/upstream_page.py "evaluated Scan"     # print the report of one bug, with a program that shows it
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "upstream.md"
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "languages")]

from onnxtrain.graph.upstream.book import BOOK, Workaround  # noqa: E402
from workarounds import bugs_of_evaluation, bugs_of_onnx, bugs_of_onnxruntime, shown  # noqa: E402,F401

BEGIN = "<!-- generated: python tools/upstream_page.py -->"

OF_THE_TEST = ("# the workaround works", "# in the test only")
"""Ends of lines that a report leaves out, since they need onnxtrain or pytest."""

LINKS = {
    "onnx": "https://github.com/onnx/onnx/issues",
    "onnx-ir": "https://github.com/onnx/ir-py/issues",
    "onnxruntime": "https://github.com/microsoft/onnxruntime/issues",
    "onnxruntime-gpu": "https://github.com/microsoft/onnxruntime/issues",
    "onnxruntime-openvino": "https://github.com/intel/onnxruntime/issues",
    "onnxruntime-web": "https://github.com/microsoft/onnxruntime/issues",
}
"""Addresses at which bugs of each package are reported."""

IN_BROWSERS = """import * as ort from "onnxruntime-web/webgpu";

for (const provider of ["wasm", "webgpu"]) {
  const session = await ort.InferenceSession.create("model.onnx", { executionProviders: [provider] });
  const data = Float32Array.from({ length: SIZE }, (_, index) => Math.sin(index));
  const outputs = await session.run({ x: new ort.Tensor("float32", data, DIMS) });
  console.log(provider, outputs[session.outputNames[0]].data);
}
"""


def open_entries() -> list[Workaround]:
    """The bugs that the newest version still has."""
    return [entry for entry in BOOK if entry.gone is None]


def script(name: str) -> str:
    """The reproduction of a bug as a program of its own: what its function needs, the function, and a call."""
    function = shown.SHOWN[name]
    found: dict[str, str] = {}
    imports: set[str] = set()
    module = sys.modules[function.__module__]
    _collect(module, function.__name__, found, imports)
    body = "\n\n\n".join(found.values())
    lines = sorted(imports, key=lambda line: (not line.startswith("from __future__"), line.startswith("from"), line))
    return "\n".join([*lines, "", "", f"{body}", "", "", f'print("present" if {function.__name__}() else "gone")'])


def _collect(module: ModuleType, name: str, found: dict[str, str], imports: set[str]) -> None:
    """Add the definition of a name of a module, after the definitions that it needs."""
    lines, statements = _statements(module)
    statement = statements.get(name)
    if statement is None or name in found:
        return
    if isinstance(statement, ast.Import | ast.ImportFrom):
        home = getattr(statement, "module", None) or ""
        if home.split(".")[0] in ("workarounds", "peak_memory"):
            _collect(sys.modules[home], name, found, imports)
        else:
            imports.add(_one_import(statement, name))
        return
    for used in ast.walk(statement):
        if isinstance(used, ast.Name) and used.id != name:
            _collect(module, used.id, found, imports)
    found[name] = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])


@functools.cache
def _statements(module: ModuleType) -> tuple[list[str], dict[str, ast.stmt]]:
    """The lines of a module, and its statements by the names that they define.

    Without decorators, and without the lines of :data:`OF_THE_TEST`.
    """
    lines = [line for line in inspect.getsource(module).splitlines() if not line.endswith(OF_THE_TEST)]
    found: dict[str, ast.stmt] = {}
    for statement in ast.parse("\n".join(lines)).body:
        if isinstance(statement, ast.FunctionDef):
            statement.decorator_list = []
            found[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            found |= {target.id: statement for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0]: statement for alias in statement.names}
    return lines, found


def _one_import(statement: ast.stmt, name: str) -> str:
    assert isinstance(statement, ast.Import | ast.ImportFrom)
    chosen = [a for a in statement.names if (a.asname or a.name).split(".")[0] == name]
    if isinstance(statement, ast.ImportFrom):
        return ast.unparse(ast.ImportFrom(module=statement.module, names=chosen, level=0))
    return ast.unparse(ast.Import(names=chosen))


def versions(entry: Workaround) -> str:
    """The oldest and the newest version that were tried, once if they are one."""
    oldest, newest = entry.seen
    return newest if oldest == newest else f"{oldest} to {newest}"


def report(entry: Workaround) -> str:
    """One report: title, versions, what happens, and a program that shows it."""
    text = f"# {entry.package}: {entry.name}\n\nTo report at {LINKS[entry.package]}.\n\n"
    text += f"Versions: {versions(entry)} (the oldest and the newest that were tried).\n\n"
    text += f"{entry.wrong}\n\n"
    text += f"Until it is fixed, onnxtrain avoids it: {entry.done[0].lower()}{entry.done[1:]}\n\n"
    if entry.package == "onnxruntime-web":
        return text + f"```py\n{browser_model(entry.name)}\n```\n\n```js\n{browser_script(entry.name)}```\n"
    program = script(entry.name)
    if "import onnxtrain" in program:
        text += "The program takes an operator of another domain from `pip install onnxtrain`.\n\n"
    return text + f"```py\n{program}\n```\n"


def _web_model(name: str) -> tuple[str, tuple[int, ...]]:
    """The model of a bug of the provider for browsers as text, and the shape of its filters if it has some."""
    from test_browser import CONVOLUTIONS, LACKING

    if name in LACKING:
        return LACKING[name], ()
    assert name == "convolutions on WebGPU", f"say here how to show {name!r}"
    image, filters, attributes = CONVOLUTIONS["strided"]
    dims = ",".join(map(str, image))
    return f"(float[1,{dims}] x) => (float[1,{filters[0]},a,b] y) {{ y = Conv<{attributes}>(x, w) }}", filters


def browser_model(name: str) -> str:
    """A program that writes the model of a bug of the provider for browsers."""
    text, filters = _web_model(name)
    lines = ["import numpy as np", "import onnx", "from onnx import numpy_helper, parser", "", f'text = """g {text}"""']
    lines.append("model = parser.parse_model('<ir_version: 8, opset_import: [\"\": 18]>' + text)")
    if filters:
        lines.append(f"w = np.random.default_rng(0).standard_normal({filters}).astype(np.float32)")
        lines.append('model.graph.initializer.append(numpy_helper.from_array(w, "w"))')
    else:
        del lines[0]
        lines[1] = "from onnx import parser"
    return "\n".join([*lines, 'onnx.save(model, "model.onnx")'])


def browser_script(name: str) -> str:
    """The code of a page that runs it."""
    found = re.search(r"float\[([\d,]+)\] x", _web_model(name)[0])
    assert found is not None
    dims = [int(size) for size in found[1].split(",")]
    return IN_BROWSERS.replace("SIZE", str(math.prod(dims))).replace("DIMS", str(dims))


def tables() -> str:
    """A table of the open entries of each package."""
    parts = []
    for package in sorted({entry.package for entry in open_entries()}):
        rows = [
            f"| {entry.name} | {versions(entry)} | {entry.wrong} | {entry.done} |"
            for entry in open_entries()
            if entry.package == package
        ]
        head = "| bug | versions | what happens | what onnxtrain does |\n| --- | --- | --- | --- |\n"
        parts.append(f"## Bugs of {package}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def page(text: str) -> str:
    """The page with the tables written again."""
    return f"{text.split(BEGIN)[0]}{BEGIN}\n\n{tables()}"


def main(names: Sequence[str]) -> None:
    """Print the reports of these bugs; without a name, write the page."""
    entries = {entry.name: entry for entry in open_entries()}
    unknown = [name for name in names if name not in entries]
    if unknown:
        raise SystemExit(f"No open bug is named {', '.join(map(repr, unknown))}; there are {', '.join(entries)}.")
    if names:
        print("\n".join(report(entries[name]) for name in names))
    else:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
