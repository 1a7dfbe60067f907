"""Model files that are each made to hit one weak place: sizes, depths, cycles, places that are no files."""

from reliability import crafted_files, crafted_graphs  # noqa: F401 - they fill the book
from reliability.crafting import CRAFTED as CRAFTED
