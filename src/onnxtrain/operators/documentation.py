"""Reference pages of the optimizer operators, in the layout of ONNX's operator pages.

``python -m onnxtrain.operators FOLDER`` writes them.
"""

from __future__ import annotations

import inspect

from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.operators.registry import OPTIMIZERS, Entry
from onnxtrain.operators.schema import Attribute, OptimizerSchema


def pages() -> dict[str, str]:
    """Return all pages by file name."""
    made = {f"{entry.schema.name.lower()}.md": page(entry) for entry in OPTIMIZERS.values()}
    return {"index.md": index(), **made}


def index() -> str:
    """Return the table of optimizers."""
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
        ]
    )


def page(entry: Entry) -> str:
    """Return the page of one operator."""
    schema = entry.schema
    parts = [
        f"# {schema.name}",
        _summary(schema),
        "## Update rule",
        "For one variable; several variables are updated independently. R, T and the attributes "
        "combine in float64 and are rounded to the variable's type where they meet a tensor.",
        f"```python\n{_body_of(schema)}```",
        *([schema.details] if schema.details else []),
        "## Version",
        f"Version {schema.version} of the domain `{schema.domain}`.",
        "## Attributes",
        "<dl>\n" + "\n".join(_attribute(attribute) for attribute in schema.attributes) + "\n</dl>",
        f"## Inputs (at least {4 + sum(_always(schema))})",
        _inputs(schema),
        f"## Outputs (at least {1 + sum(_always(schema))})",
        _outputs(schema),
        "## Type constraints",
        _definitions(
            ("T1: tensor(float), tensor(double)", "The type of R."),
            ("T2: tensor(int64)", "The type of T."),
            (
                "T3: tensor(float), tensor(double)",
                "The type of all tensors of one variable; another variable may have the other type.",
            ),
        ),
        "## Example",
        f"```python\n{_example(entry)}\n```",
        "## Settings in Python",
        f"```text\n{inspect.cleandoc(entry.settings.__doc__ or '')}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _summary(schema: OptimizerSchema) -> str:
    if schema.domain == TRAINING_DOMAIN:
        link = f"https://onnx.ai/onnx/operators/onnx_aionnxpreviewtraining_{schema.name}.html"
        return f"{schema.doc}\n\nThe operator is ONNX's own: see [its page]({link})."
    return schema.doc


def _body_of(schema: OptimizerSchema) -> str:
    """Return the lines of the rule below its docstring."""
    source = inspect.getsource(schema.rule)
    _, _, body = source.split('"""', 2)
    return inspect.cleandoc(body) + "\n"


def _example(entry: Entry) -> str:
    """Return the doctest of the operator over arrays."""
    _, example = inspect.cleandoc(entry.reference.__doc__ or "").split("Example:\n")
    return inspect.cleandoc(example)


def _attribute(attribute: Attribute) -> str:
    kind = "list of ints" if attribute.kind is tuple else "string" if attribute.kind is str else "float"
    if attribute.default is None:
        default = " (required)"
    elif attribute.default == ():
        default = " (default is empty)"
    else:
        default = f" (default is {attribute.default if kind == 'string' else f'{attribute.default:g}'})"
    choices = f" One of {', '.join(attribute.choices)}." if attribute.choices else ""
    familiar = f" As a setting also <tt>{attribute.familiar}</tt>." if attribute.familiar else ""
    return f"<dt><tt>{attribute.name}</tt> : {kind}{default}</dt>\n<dd>{attribute.doc}{choices}{familiar}</dd>"


def _inputs(schema: OptimizerSchema) -> str:
    order = ["all X", "all G", *(f"all {state.name}" for state in schema.states)]
    states = "".join(f" {state.name}: {state.doc}" for state in schema.states)
    return _definitions(
        ("R : T1", "The learning rate: exactly one element."),
        ("T : T2", "The update count: exactly one element."),
        (
            "inputs (variadic, heterogeneous) : T3",
            f"In this order: {', '.join(order)}. X: The variable. G: Its gradient, of X's shape or one that "
            f"broadcasts to it.{states} States have the type and shape of X.",
        ),
    )


def _outputs(schema: OptimizerSchema) -> str:
    order = ["all X_new", *(f"all {state.name}_new" for state in schema.states)]
    return _definitions(
        (
            "outputs (variadic, heterogeneous) : T3",
            f"In this order: {', '.join(order)}, each of the type and shape of its input. An unused "
            "output has an empty name.",
        )
    )


def _always(schema: OptimizerSchema) -> list[bool]:
    """Return which states the operator has with every attribute at its default."""
    defaults = {a.name: 0.0 if a.default is None else a.default for a in schema.attributes}
    return [state.used(defaults) for state in schema.states]


def _definitions(*items: tuple[str, str]) -> str:
    return "<dl>\n" + "\n".join(f"<dt><tt>{term}</tt></dt>\n<dd>{text}</dd>" for term, text in items) + "\n</dl>"
