"""Subjects of the tests: each makes a case from (seed, number) and runs it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol

from reliability.worker import Operations

SUBJECTS = {
    "models": "model files: mutants of small models, byte by byte and field by field",
    "crafted": "model files, each aimed at one weakness",
    "reading": "model files, data files and checkpoints that are only read: many more of them",
    "data": "data files: .npy, .npz and folders, mutants and crafted ones",
    "checkpoints": "checkpoint folders: mutants of both files, with matching checksums and without",
    "flags": "command lines: every flag with extreme values, missing, empty, repeated",
    "adapters": "adapters: settings, manifests and tensors of PEFT's folders and of .onnx_adapter files",
    "small": "small files: tokenizers, labels, run folders, TOML, weights of examples, states",
    "tables": "CSV, Parquet, text, tar and image files, damaged and crafted",
    "texts": "chats and texts with the settings and templates of a tokenizer, damaged and changed field by field",
    "images": "images with masks and COCO files, damaged and changed field by field",
    "pages": "requests to the server of federated pages, damaged and forged",
    "interrupts": "commands in processes of their own that get Ctrl-C at any moment",
    "killings": "commands that are killed at a file operation or at any moment, or whose file operations fail",
}


class Subject(Protocol):
    """Runs the cases of one kind of input."""

    def __init__(self, shared: Path) -> None:
        """Create the files that all cases need, in this folder."""

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Make a case in a folder, which is the current one too, and run it."""


def find(name: str) -> type[Subject]:
    """The class of a subject."""
    found: type[Subject] = importlib.import_module(f"reliability.subject_{name}").Subject
    return found
