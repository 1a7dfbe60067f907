"""Model files that each target one weakness: sizes, depths, cycles, paths that are not files."""

from reliability import crafted_files, crafted_graphs  # noqa: F401 - they fill the book
from reliability.crafting import CRAFTED as CRAFTED
