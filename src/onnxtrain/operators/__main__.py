"""Write the operators' reference pages: ``python -m onnxtrain.operators FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from onnxtrain.operators.documentation import pages

if __name__ == "__main__":
    if not __doc__:
        sys.exit("The pages are made of docstrings, which python -OO leaves out: run it without -OO.")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
