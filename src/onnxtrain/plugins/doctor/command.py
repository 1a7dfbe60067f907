"""``onnxtrain doctor``: find what prevents or changes the training of an exported model."""

from __future__ import annotations

import dataclasses

from onnxtrain.cli import flags, terminal
from onnxtrain.cli.messages import in_flags

HELP = "Find what prevents or changes the training of a model, and the export call that avoids it."

EXAMPLES = """\
The exit status is 1 if the model cannot be trained.

Examples

    onnxtrain doctor model.onnx
    onnxtrain doctor model.onnx --json
"""

_LABELS = {"stops": "stops training", "changes": "changes training", "note": "good to know"}


def command(
    model: flags.ModelPath,
    /,
    *,
    prediction: flags.Prediction = None,
    json_output: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Run ``onnxtrain doctor``."""
    from onnxtrain.plugins.doctor.diagnosis import diagnose, trains

    findings = diagnose(model, output=prediction)
    if json_output:
        rows = [dataclasses.asdict(finding) | {"severity": finding.severity.value} for finding in findings]
        terminal.print_json(rows)
        return 0 if trains(findings) else 1
    console = terminal.console()
    for finding in findings:
        console.print(f"{_LABELS[finding.severity.value]}: {in_flags(finding.what)}", soft_wrap=True)
        if finding.remedy:
            console.print(f"    {in_flags(finding.remedy)}", soft_wrap=True)
    if not findings:
        console.print(f"Nothing stands in the way of training {model.name}.")
    elif trains(findings):
        console.print(f"{model.name} can be trained.")
    return 0 if trains(findings) else 1
