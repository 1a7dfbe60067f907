"""The PyTorch model that an adapter belongs to, as PEFT's classes find it: its name and its task."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxtrain.model_file.small_files import read_json

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
}
"""PEFT's tasks, by the ends of the names of transformers' classes."""

_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Modules that PEFT's class of a task always saves, and needs in every folder."""


@dataclass(frozen=True)
class Checkpoint:
    """The PyTorch model that an adapter belongs to."""

    base_model: str = ""
    task_type: str = ""

    def for_layers(self, names: Collection[str]) -> Checkpoint:
        """Return the checkpoint without a task if adapters of these layers are in a head that its class saves whole."""
        inside = any(self.is_head(name) for name in names)
        return replace(self, task_type="") if inside else self

    def is_head(self, module: str) -> bool:
        """Return whether a module is in a head that PEFT's class of the task saves."""
        return not set(module.split(".")).isdisjoint(_HEADS.get(self.task_type, ()))

    def saved_module(self, module: str) -> str:
        """Return the module that PEFT saves: the head that a module is in, else the module.

        Example:
            >>> Checkpoint(task_type="SEQ_CLS").saved_module("bert.classifier.dense")
            'bert.classifier'
        """
        path = module.split(".")
        ends = [index for index, part in enumerate(path) if part in _HEADS.get(self.task_type, ())]
        return ".".join(path[: ends[0] + 1]) if ends else module

    def completed(self, folder: Path | None, base_model: str | os.PathLike[str] | None) -> Checkpoint:
        """Return the checkpoint with what the user gives, and what ``config.json`` files say of the rest."""
        given = self if base_model is None else replace(self, base_model=os.fspath(base_model))
        for source in (Path(given.base_model) if given.base_model else None, folder):
            config = {} if source is None else _config(source)
            task = given.task_type or _task(config)
            name = given.base_model or _name(config, source)
            given = Checkpoint(name, task)
        return given


def _config(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's ``config.json``; {} without one that can be read."""
    try:
        found = read_json(folder / "config.json")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _task(config: dict[str, Any]) -> str:
    listed = config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    end = re.search("|".join(f"{end}$" for end in _TASKS), first) if isinstance(first, str) else None
    return "" if end is None else _TASKS[end.group()]


def _name(config: dict[str, Any], folder: Path | None) -> str:
    name = config.get("_name_or_path")
    if isinstance(name, str) and name:
        return name
    has_weights = config and folder is not None and any((folder / file).is_file() for file in _WEIGHTS)
    return os.path.abspath(folder) if has_weights and folder is not None else ""
