"""Pages of help: the flags that most people need and a list of the others, one group of them, or all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cyclopts import App
from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel

from onnxtrain.cli.flags import COMMON, MODEL
from onnxtrain.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

FLAGS = ("--help", "-h", "--help-all")

_LONG = 30
"""Flags from which a command has a short help."""

_LISTED = 56
"""Width of the flags of a group in the list of groups."""


class Panels(DefaultFormatter):
    """Prints those panels of a page that are asked for; cyclopts calls it with each of them."""

    def __init__(self, title: str | None = None, groups: HelpPanel | None = None, order: Sequence[str] = ()) -> None:
        super().__init__()
        self._title, self._groups, self._order = title, groups, order

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print a panel: of this title, or by default all but the short one."""
        title = str(panel.title)
        if title != self._title and (self._title is not None or title == COMMON.name):
            return
        if self._groups is not None:
            entries = sorted(panel.entries, key=lambda entry: self._order.index(entry.display_labels[0]))
            panel = panel.copy(entries=[_shortened(entry) for entry in entries])
        super().__call__(console, options, panel)
        if self._groups is not None:
            super().__call__(console, options, self._groups)


def first_sentence(help_text: str) -> str:
    """Return the first sentence of a flag's help, with its default.

    >>> first_sentence("Threads within an operator. Others wait.  [default: one per core]")
    'Threads within an operator.  [default: one per core]'
    """
    text, mark, default = help_text.partition("  [")
    return f"{text.partition('. ')[0].rstrip('.')}.{mark}{default}"


def choose_page(app: App, command: str, module: Any, tokens: Sequence[str]) -> None:
    """Let the help of a command print the page that the tokens ask for."""
    more = getattr(module, "MORE_EXAMPLES", "")
    app.help_formatter, app.help_epilogue = Panels(), module.EXAMPLES + more
    members = _members(app)
    position = min(tokens.index(flag) for flag in FLAGS if flag in tokens)
    words = [word for word in tokens[position + 1 : position + 2] if word not in (*FLAGS, command)]
    if words and not words[0].startswith("-"):
        title = next((title for title in members if title.lower() == words[0].lower()), None)
        if title is None:
            listed = ", ".join(map(str.lower, members))
            raise OptionError(f"{command} has no group of flags {words[0]!r}; --help takes one of {listed}.")
        app.help_formatter, app.help_epilogue = Panels(title), " "
    elif sum(map(len, members.values())) > _LONG and "--help-all" not in tokens:
        rows = []
        for title, flags in members.items():
            less_used = [name for name, common in flags.items() if not common]
            if title != MODEL.name:
                rows.append(HelpEntry(positive_names=(title.lower(),), description=_listed(less_used or [*flags])))
        heading = f"More: onnxtrain {command} --help GROUP, or --help-all"
        order = [name for flags in members.values() for name in flags]
        app.help_formatter = Panels(COMMON.name, HelpPanel(format="command", title=heading, entries=rows), order)
        app.help_epilogue = module.EXAMPLES


def _members(app: App) -> dict[str, dict[str, bool]]:
    """Return the flags of each group, and whether the short help shows them."""
    found: dict[Any, dict[str, bool]] = {}
    for argument in app.assemble_argument_collection():
        groups: Any = argument.parameter.group
        for group in groups:
            if argument.show and group != COMMON:
                found.setdefault(group, {})[argument.name] = COMMON in groups
    last = max((group.sort_key for group in found if isinstance(group.sort_key, int)), default=0) + 1
    return {
        group.name: found[group]
        for group in sorted(found, key=lambda group: group.sort_key if isinstance(group.sort_key, int) else last)
    }


def _listed(names: Sequence[str]) -> str:
    """Return the first of the names, as many as fit into a line."""
    text = ""
    for name in names:
        if len(text) + len(name) > _LISTED - 4:
            return f"{text} ..."
        text = f"{text} {name}".strip()
    return text


def _shortened(entry: HelpEntry) -> HelpEntry:
    """Return a row of help with the first sentence alone."""
    return entry.copy(description=first_sentence(entry.description.primary_renderable.plain))
