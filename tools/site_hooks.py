"""Hooks of mkdocs: the README is the first page, and links to files outside of docs/ become plain words.

mkdocs.yml names this file; ``mkdocs build --strict`` runs it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the README as the page ``index.md``."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=first_page((ROOT / "README.md").read_text())))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/, which are not part of the site, by their text."""
    return without_outer_links(markdown, Path(page.file.src_uri).parent)


def first_page(readme: str) -> str:
    """The README, as if it lay in docs/."""
    inside = LINK.sub(lambda link: f"[{link[1]}]({_inside(link[2])}{link[3] or ''})", readme)
    return inside.replace("](docs/", "](")


def without_outer_links(markdown: str, folder: Path) -> str:
    """The page with links to files outside of docs/ replaced by their words; ``folder`` is the page's, in docs/."""

    def plain(link: re.Match[str]) -> str:
        target = link[2]
        if "://" in target or (ROOT / "docs" / folder / target).resolve().is_relative_to(ROOT / "docs"):
            return link[0]
        return link[1]

    return LINK.sub(plain, markdown)


def _inside(target: str) -> str:
    """Resolve a link of the README from docs/."""
    if "://" in target:
        return target
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
