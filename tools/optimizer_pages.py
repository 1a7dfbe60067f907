"""Reference pages of the optimizer operators, in the layout of ONNX's operator pages.

    python tools/optimizer_pages.py

writes docs/operators.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from pathlib import Path

from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.operators.registry import OPTIMIZERS, Entry
from onnxtrain.operators.schema import Attribute, OptimizerSchema

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "operators"


def pages() -> dict[str, str]:
    """Return all pages by file name."""
    made = {f"{entry.schema.name.lower()}.md": page(entry) for entry in OPTIMIZERS.values()}
    return {"index.md": index(), **made}


_COMMON = """## What all operators share

- **Inputs**: `R`, the learning rate, and `T`, the update count, have one element each. `inputs` (variadic,
  heterogeneous) are all X, then all G, then all of each state. G, the gradient, has the shape of X or one that
  broadcasts to it; states have the type and shape of X.
- **Outputs** (variadic, heterogeneous): all X_new, then all of each new state, each of the type and shape of its input.
  An unused output has an empty name.
- **Types**: R is float or double, T int64. The tensors of one variable are float or double; another variable may have
  the other type.
- **Settings** in Python are `learning_rate`, which is R, 0 or more, and the attributes, in the ranges of their pages;
  the operators themselves take every number. `Adam` and `Momentum` also take a
  [`sparsity`](../pruning.md#sparsity-promotion).
- **Update rules** are written for one variable; several variables are updated independently. R, T and the attributes
  combine in float64 and are rounded to the variable's type where they meet a tensor.
"""


def index() -> str:
    """Return the table of optimizers, and what their pages do not repeat."""
    rows = [
        f"| [{s.name}]({s.name.lower()}.md) | `{s.domain}` | {', '.join(x.name for x in s.states)} | "
        f"{', '.join(f'`{a.name}`' for a in s.attributes)} |"
        for s in (entry.schema for entry in OPTIMIZERS.values())
    ]
    return "\n".join(
        [
            "# Optimizer operators",
            "",
            "| operator | domain | state per variable | attributes |",
            "|---|---|---|---|",
            *rows,
            "",
            _COMMON,
        ]
    )


def page(entry: Entry) -> str:
    """Return the page of one operator."""
    schema = entry.schema
    parts = [
        f"# {schema.name}",
        _summary(schema),
        "## Update rule",
        f"```python\n{_body_of(schema)}```",
        *([schema.details] if schema.details else []),
        "## Attributes",
        "<dl>\n" + "\n".join(_attribute(attribute) for attribute in schema.attributes) + "\n</dl>",
        "## Inputs and outputs",
        _inputs_and_outputs(schema),
        "## Example",
        f"```python\n{example(entry)}\n```",
        "## Settings in Python",
        f"```text\n{_settings(entry)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _summary(schema: OptimizerSchema) -> str:
    version = f"Version {schema.version} of the domain `{schema.domain}`"
    if schema.domain == TRAINING_DOMAIN:
        link = f"https://onnx.ai/onnx/operators/onnx_aionnxpreviewtraining_{schema.name}.html"
        version += f", ONNX's own: see [its page]({link})"
    return f"{schema.doc}\n\n{version}."


def _body_of(schema: OptimizerSchema) -> str:
    """Return the lines of the rule below its docstring."""
    source = inspect.getsource(schema.rule)
    _, _, body = source.split('"""', 2)
    return inspect.cleandoc(body) + "\n"


def example(entry: Entry) -> str:
    """Return the part of the settings' doctest that runs the operator over arrays."""
    text = inspect.cleandoc(entry.settings.__doc__ or "")
    imported = f">>> from onnxtrain.operators import {entry.schema.name.lower()}\n"
    example = inspect.cleandoc("    " + imported + text.split(imported)[1])
    return f">>> import numpy as np\n{example}"


def _attribute(attribute: Attribute) -> str:
    kind = "list of ints" if attribute.kind is tuple else "string" if attribute.kind is str else "float"
    if attribute.default is None:
        default = " (required)"
    elif attribute.default == ():
        default = " (default is empty)"
    else:
        default = f" (default is {attribute.default if kind == 'string' else f'{attribute.default:g}'})"
    choices = f" One of {', '.join(attribute.choices)}." if attribute.choices else ""
    also = f"as a setting also <tt>{attribute.familiar}</tt>" if attribute.familiar else ""
    if attribute.kind is float:
        also = f"{attribute.sensible}; {also}" if also else str(attribute.sensible)
    setting = f" {also[0].upper()}{also[1:]}." if also else ""
    return f"<dt><tt>{attribute.name}</tt> : {kind}{default}</dt>\n<dd>{attribute.doc}{choices}{setting}</dd>"


def _settings(entry: Entry) -> str:
    """Return what the docstring of the settings says beyond the other sections of the page."""
    _, *blocks = inspect.cleandoc(entry.settings.__doc__ or "").split("\n\n")
    skipped = (" ", "Args:", "Raises:", "Example:")
    kept = (block for block in blocks if not block.endswith("::") and not block.startswith(skipped))
    defaults = ", ".join(f"{field.name}={field.default!r}" for field in fields(entry.settings))
    return "\n\n".join([f"{entry.settings.__name__}({defaults})", *kept])


def _inputs_and_outputs(schema: OptimizerSchema) -> str:
    names = [state.name for state in schema.states]
    inputs = ", ".join(["`R`", "`T`", "all X", "all G", *(f"all {name}" for name in names)])
    outputs = ", ".join(["all X_new", *(f"all {name}_new" for name in names)])
    fewest = sum(_always(schema))
    states = "".join(f" {state.name}: {state.doc}" for state in schema.states)
    return (
        f"Inputs: {inputs} (at least {4 + fewest}). Outputs: {outputs} (at least {1 + fewest}).{states} "
        "See [shapes and types](index.md)."
    )


def _always(schema: OptimizerSchema) -> list[bool]:
    """Return which states the operator has with every attribute at its default."""
    defaults = {a.name: 0.0 if a.default is None else a.default for a in schema.attributes}
    return [state.used(defaults) for state in schema.states]


if __name__ == "__main__":
    if not __doc__:
        sys.exit("The pages are made of docstrings, which python -OO leaves out: run it without -OO.")
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
