"""Report of a training: one HTML file with its figures inside, which loads nothing and runs no program."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from onnxtrain.errors.escaping import visible
from onnxtrain.training.report.charts import (
    Chart,
    bar_chart,
    column_chart,
    curves,
    line_chart,
    matrix_chart,
    point_chart,
    shown,
)
from onnxtrain.training.report.record import (
    Confusion,
    ParameterRow,
    Residuals,
    Rows,
    RunRecord,
    best_epoch,
    measured_columns,
    words,
)

_MOST_LINES = 12
"""Most parameters whose gradients are drawn; the table has all."""

_MOST_BARS = 40
_MOST_CLASSES = 60
_MOST_MISTAKES = 10
_BINS = 30

_STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;color:#0f172a;background:#fff;margin:0 auto;padding:24px;max-width:1360px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 8px}
p{max-width:80ch;margin:6px 0}
.charts{display:flex;flex-wrap:wrap;gap:24px;align-items:end}
svg{max-width:100%;height:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:8px 0}
th,td{padding:3px 14px 3px 0;text-align:left;vertical-align:top;border-bottom:1px solid #e2e8f0}
td.n,th.n{text-align:right}
td{overflow-wrap:anywhere}
pre{background:#f1f5f9;padding:12px;overflow-x:auto;font-size:13px;white-space:pre-wrap;overflow-wrap:anywhere}
.quiet{color:#475569}
"""


def page(record: RunRecord) -> str:
    """Return the report as HTML."""
    parts = [
        f"<h1>{_text(record.title)}</h1>",
        _table((), list(record.facts.items())) if record.facts else "",
        _section("Result", _results(record.rows)),
        _section("Curves", _charts(curves(record.rows))),
        _section("Predictions", _outcome(record)),
        _section("Gradient norms", _gradients(record)),
        _section("Sparsity", _sparsity(record.parameters)),
        _section("Parameters", _parameters(record.parameters)),
        _section("How it was made", _how(record)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(record.title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _results(rows: Rows) -> str:
    cells = []
    for name in measured_columns(rows):
        values = [row.get(name, math.nan) for row in rows]
        best = best_epoch(values, name)
        where = ("", "") if best is None else (shown(values[best]), str(round(rows[best]["epoch"])))
        cells.append((words(name), shown(values[-1]), *where))
    return _table(("", "last epoch", "best", "in epoch"), cells, numbers=(1, 2, 3)) if cells else ""


def _outcome(record: RunRecord) -> str:
    shown_each = (_confusion(each) if isinstance(each, Confusion) else _residuals(each) for each in record.outcome)
    return _quiet(record.outcome_of) + "".join(shown_each)


def _confusion(found: Confusion) -> str:
    title = found.title or "confusion matrix"
    parts = []
    if len(found.labels) <= _MOST_CLASSES:
        parts.append(_charts([matrix_chart(found.counts, found.labels, title=title)]))
    wrong = [
        (count, true, predicted)
        for true, row in enumerate(found.counts)
        for predicted, count in enumerate(row)
        if count and true != predicted
    ]
    total = sum(sum(row) for row in found.counts)
    right = total - sum(count for count, _, _ in wrong)
    parts.append(f"<p>{shown(right)} of {shown(total)} right.</p>")
    if wrong and len(found.labels) > 2:
        rows = [
            (found.labels[true], found.labels[predicted], shown(count))
            for count, true, predicted in sorted(wrong, key=lambda each: -each[0])[:_MOST_MISTAKES]
        ]
        parts.append(_table(("true", "taken for", "how often"), rows, numbers=(2,)))
    return "".join(parts)


def _residuals(found: Residuals) -> str:
    differences = [
        said - true for true, said in zip(found.truth, found.predicted, strict=True) if math.isfinite(said - true)
    ]
    if not differences:
        return "<p>No prediction is a finite number.</p>"
    points = point_chart(found.truth, found.predicted, title="predicted over true", names=("true", "predicted"))
    low, high = min(differences), max(differences)
    width = (high - low) / _BINS or 1.0
    counts = [0] * _BINS
    for difference in differences:
        counts[min(_BINS - 1, int((difference - low) / width))] += 1
    edges = [low + width * index for index in range(_BINS + 1)]
    mean = sum(differences) / len(differences)
    spread = math.sqrt(sum((each - mean) ** 2 for each in differences) / len(differences))
    columns = column_chart(counts, edges, title="residuals", name="predicted - true")
    return _charts([points, columns]) + f"<p>Residuals: mean {shown(mean)}, standard deviation {shown(spread)}.</p>"


def _gradients(record: RunRecord) -> str:
    parts = [_quiet(record.gradients_of)]
    norms = record.gradient_norms
    if norms:
        largest = sorted(norms, key=lambda name: -max(filter(math.isfinite, norms[name]), default=0.0))[:_MOST_LINES]
        kept = {name: norms[name] for name in norms if name in largest}
        epochs = list(range(1, 1 + len(next(iter(kept.values())))))
        few = "" if len(kept) == len(norms) else f" ({len(kept)} largest of {len(norms)})"
        parts.append(_charts([line_chart(kept, epochs, title=f"norm of the gradient{few}")]))
    return "".join(parts)


def _sparsity(parameters: Sequence[ParameterRow]) -> str:
    if not parameters:
        return ""
    size = sum(row.size for row in parameters)
    zeros = sum(round(row.zeros * row.size) for row in parameters)
    parts = [f"<p>{zeros:,} of {size:,} trained weights are zero ({zeros / max(size, 1):.1%}).</p>"]
    sparse = sorted((row for row in parameters if row.zeros), key=lambda row: -row.size)[:_MOST_BARS]
    if sparse:
        bars = {row.name: row.zeros for row in sparse}
        notes = {row.name: f"{row.zeros:.1%} of {row.size:,}" for row in sparse}
        parts.append(_charts([bar_chart(bars, title="zeros", notes=notes)]))
    return "".join(parts)


def _parameters(parameters: Sequence[ParameterRow]) -> str:
    heads = ("name", "shape", "size", "zeros", "norm", "change", "gradient")
    rows = [
        (
            row.name,
            " x ".join(map(str, row.shape)) or "scalar",
            f"{row.size:,}",
            f"{row.zeros:.1%}",
            shown(row.norm),
            "" if row.change is None else shown(row.change),
            "" if row.gradient is None else shown(row.gradient),
        )
        for row in parameters
    ]
    return _table(heads, rows, numbers=range(2, 7)) if rows else ""


def _how(record: RunRecord) -> str:
    parts = [f"<pre>{_text(record.command)}</pre>"] if record.command else []
    if record.settings:
        parts.append(f"<p>All settings, as <code>config.toml</code> has them:</p><pre>{_text(record.settings)}</pre>")
    return "".join(parts)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _charts(found: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(chart.svg() for chart in found)}</div>' if found else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        shown_cells = (
            f"<{tag}{' class=n' if index in numbers else ''}><bdi>{_text(cell)}</bdi></{tag}>"
            for index, cell in enumerate(row)
        )
        return f"<tr>{''.join(shown_cells)}</tr>"

    head = f"<thead>{cells(heads, 'th')}</thead>" if heads else ""
    return f"<table>{head}<tbody>{''.join(cells(row, 'td') for row in rows)}</tbody></table>"


def _quiet(text: str) -> str:
    return f'<p class="quiet">{_text(text)}</p>' if text else ""


def _text(text: str) -> str:
    return html.escape(visible(text))
