"""Write the forty tasks of docs/coming_from.md, with the lines each takes here and in the shortest peer.

    python tools/coming_from.py

It counts statements without imports. The code is in `coming_from_tasks.py`, and a test runs it.
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


def row(task: Task) -> str:
    """A line of the table."""
    mark = "" if task.runs else ", not run"
    there = f"{lines(task.there)} ({task.peer}{mark})" if task.there else "-"
    return f"| {task.title} | {lines(task.here)} | {there} |"


def section(heading: str, tasks: list[Task]) -> str:
    """A group of tasks: the table, and the code that is counted."""
    table = "\n".join(["| task | here | elsewhere |", "|---|---:|---|", *map(row, tasks)])
    code = "\n\n".join(f"# {task.title}\n{task.here}" for task in tasks)
    return f"### {heading}\n\n{table}\n\n```py\n{code}\n```"


def generated() -> str:
    """All groups, and the sum."""
    tasks = [task for group in TASKS.values() for task in group]
    offered = [task for task in tasks if task.there]
    here, there = (sum(lines(getattr(task, name)) for task in offered) for name in ("here", "there"))
    total = (
        f"{len(tasks)} tasks; the {len(offered)} that others offer, too, take {here} lines here and {there} in the "
        "peer that needs the fewest."
    )
    return "\n\n".join([total, *(section(heading, group) for heading, group in TASKS.items())])


def page(text: str) -> str:
    """The page with its generated part."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{generated()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
