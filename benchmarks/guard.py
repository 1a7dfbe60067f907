"""Steps of this version and of the last release in turns: fails if one became slower.

    python benchmarks/guard.py --earlier PYTHON          # the interpreter of an environment with the last release

Ten short cases. New over old is the median over paired rounds; a case above the limit is measured once more, with twice
as many rounds, so that one disturbed minute of the machine does not decide. The exit status is 1 if a case stays above.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness import (
    ForeignLoad,
    Interpreters,
    load_line,
    machine_line,
    make_parser,
    milliseconds,
    table,
    warn_when_busy,
    write_report,
)
from models import MODELS
from peers import Task
from step import compare, geometric_mean

CASES = {
    "mlp": 32,
    "lenet5": 32,
    "conv6": 8,
    "resnet18": 4,
    "mobilenet_v2": 8,
    "unet": 4,
    "bert_mini": 8,
    "distilbert": 8,
    "gpt2": 8,
    "vit_tiny": 4,
}
"""Models and their batch."""

NEW, OLD = "onnxtrain", "earlier"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report and write it; return 1 if a case is slower than the limit allows."""
    parser = make_parser(__doc__, "two cases in short rounds, to see that it runs", models=True)
    parser.add_argument("--earlier", required=True, help="Python of the environment with the version before")
    parser.add_argument("--limit", type=float, default=1.10, help="new over old that is still accepted (1.10)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (1)")
    parser.add_argument("--rounds", type=int, default=11, help="paired rounds of half a second (11)")
    options = parser.parse_args(arguments)
    warn_when_busy()
    interpreters = Interpreters({OLD: options.earlier})
    rows, ratios, slower = [], [], []
    with ForeignLoad() as foreign:
        for model, batch in list(CASES.items())[: 2 if options.quick else None]:
            tasks = [Task(peer, model, batch, options.threads, options.folder) for peer in (NEW, OLD)]
            for rounds in (options.rounds, 2 * options.rounds):
                found = compare(tasks, interpreters, rounds, 0.05 if options.quick else 0.5, OLD)
                if problem := found[NEW].problem or found[OLD].problem:
                    raise SystemExit(f"{model} cannot be compared: {problem}")
                ratio = found[NEW].ratio_to(found[OLD])
                if ratio <= options.limit:
                    break
            else:
                slower.append(model)
            ratios.append(ratio)
            times = [milliseconds(found[peer].seconds) for peer in (NEW, OLD)]
            memory = f"{found[NEW].peak / found[OLD].peak:.2f}"
            rows.append([MODELS[model].description, str(batch), *times, f"{ratio:.2f}", memory])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    verdict = f"Slower than {options.limit:.2f}: {', '.join(slower)}." if slower else "None is slower."
    lines = [
        table(["model", "batch", "new, ms", "old, ms", "new / old", "memory"], rows),
        f"Geometric mean {geometric_mean(ratios):.2f}. {verdict}",
        f"{machine_line()} {load_line(foreign)}",
    ]
    write_report("\n\n".join(lines), options.output)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
