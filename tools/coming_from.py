"""Write the tasks of docs/coming_from.md that take another number of lines here than in the shortest peer.

    python tools/coming_from.py

It counts statements without imports. The code of all forty is in `coming_from_tasks.py`, and a test runs it.
"""

from __future__ import annotations

import ast
from pathlib import Path

from coming_from_tasks import TASKS, Task

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming_from.md"
BEGIN, END = "<!-- generated: python tools/coming_from.py -->", "<!-- end of the generated part -->"


def lines(code: str) -> int:
    """The statements of some code, without imports."""
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)]
    return sum(not isinstance(node, ast.Import | ast.ImportFrom) for node in found)


def differs(task: Task) -> bool:
    """Return whether a task takes another number of statements here, or is offered here only."""
    return lines(task.here) != lines(task.there)


def counted(task: Task) -> str:
    """A task's title with its statements here and elsewhere."""
    there = f"{task.peer} {lines(task.there)}" if task.there else "here only"
    return f"{task.title} ({lines(task.here)}, {there})"


def generated() -> str:
    """The sum, and the code of the tasks that differ."""
    tasks = [task for group in TASKS.values() for task in group]
    shown = [task for task in tasks if differs(task)]
    both = [task for task in shown if task.there]
    here, there = (sum(lines(getattr(task, name)) for task in both) for name in ("here", "there"))
    total = (
        f"Of {len(tasks)} tasks, {len(tasks) - len(shown)} take the same number, {len(both)} take {here} here, "
        f"{there} there, and {len(shown) - len(both)} are offered here only:"
    )
    code = "\n\n".join(f"# {counted(task)}\n{task.here}" for task in shown)
    return f"{total}\n\n```py\n{code}\n```"


def page(text: str) -> str:
    """The page with its generated part."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{generated()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
