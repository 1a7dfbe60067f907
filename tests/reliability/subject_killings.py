"""Commands that are killed, or whose file operations fail: see ``killer``."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from reliability.killer import SCENARIOS, Undisturbed, Victim, build_faults, disturb, disturb_and_look, undisturbed
from reliability.worker import Operations


class Subject:
    """One scenario, disturbed once."""

    def __init__(self, shared: Path) -> None:
        library = build_faults(shared)
        if library is None:
            raise SystemExit("the killer needs Linux and a C++ compiler")
        self._victim = Victim(library)
        self._shared = shared
        self._runs: dict[str, Undisturbed] = {}

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Disturb a run of a scenario."""
        generator = random.Random(f"killings {seed} {index}")
        name = generator.choice([*SCENARIOS])
        found = self._undisturbed(name)
        how = disturb(found, generator)
        (case / "how.txt").write_text(f"{name}\n{how}\n{found.operations[int(how.get('at', 1)) - 1]}\n")
        operations.run(name, lambda: disturb_and_look(found, case / "run", self._victim, how))

    def _undisturbed(self, name: str) -> Undisturbed:
        if name not in self._runs:
            folder = self._shared / name.replace(" ", "-")
            shutil.rmtree(folder, ignore_errors=True)
            self._runs[name] = undisturbed(SCENARIOS[name], folder, self._victim)
        return self._runs[name]
