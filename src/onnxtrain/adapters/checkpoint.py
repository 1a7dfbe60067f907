"""The PyTorch model that an adapter belongs to: its name, its task, and its names for the tensors of the ONNX model.

PEFT leaves out what it does not find under its name in the checkpoint, in silence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnxtrain.errors import ModelError
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
            config = _read(source, "config.json")
            given = Checkpoint(given.base_model or _name(config, source), given.task_type or _task(config))
        return given


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


_FINAL_NORM = re.compile(r"^model\.layers\.\d+\.final_norm_layernorm(?=\.|$)")
"""The last norm, by which a model of the builder is recognized."""

_NORM = re.compile(r"^model\.layers\.\d+\.(\w+_layernorm|attn\.[qk]_norm\.layernorm)\.(weight|bias)$")

_BUILDER = (
    (re.compile(r"(?<=^model\.layers\.)(\d+)\.attn\.(?=(q|k|v|o|qkv)_proj\b)"), r"\1.self_attn."),
    (re.compile(r"(?<=^model\.layers\.)(\d+)\.attn\.([qk]_norm)\.layernorm\b"), r"\1.self_attn.\2"),
    (_FINAL_NORM, "model.norm"),
)
"""Names in the builder's models, and in checkpoints of most architectures."""

_ATTENTION, _GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")

_Rename = tuple[re.Pattern[str], str]


@dataclass(frozen=True)
class Architecture:
    """Names and values of an architecture's checkpoint."""

    kind: str = ""
    renames: tuple[_Rename, ...] = ()
    packed: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    offset: float = 0.0
    norms: bool = True
    known: bool = True
    built: bool = False

    @classmethod
    def of(cls, names: Iterable[str], folder: Path | None, checkpoint: Checkpoint) -> Architecture:
        """Return the architecture of a model, by genai_config.json beside it or config.json of its checkpoint."""
        kind = _setting(folder, "genai_config.json", "model", "type")
        base = Path(checkpoint.base_model) if checkpoint.base_model else None
        kind = kind or _setting(base, "config.json", "model_type") or _setting(folder, "config.json", "model_type")
        if not any(map(_FINAL_NORM.match, names)):
            own = _TABLE.get(kind, Architecture())
            return Architecture(kind, own.renames, own.packed, own.offset)
        own = _TABLE.get(kind, Architecture(known=False))
        return Architecture(kind, own.renames, own.packed, own.offset, own.norms, own.known, built=True)

    def in_checkpoint(self, name: str) -> str:
        """Return the checkpoint's name for that of a module or tensor, usual or of the builder."""
        for pattern, replacement in (*_BUILDER, *self.renames):
            name = pattern.sub(replacement, name)
        return name

    def is_norm(self, name: str) -> bool:
        """Return whether an initializer is a norm of the builder."""
        return self.built and _NORM.match(name) is not None

    def packs(self, name: str) -> bool:
        """Return whether the checkpoint packs a layer with others."""
        return any(name.endswith(f".{module}.{last}") for module, lasts in self.packed.values() for last in lasts)

    def check_known(self, label: str) -> None:
        """Raise ModelError if the names of the checkpoint are not known."""
        if not self.known:
            told = f"the names of {self.kind!r} are not known"
            if not self.kind:
                told = "genai_config.json beside the model, which names its architecture, is missing"
            raise ModelError(
                f"{label!r} cannot be a PEFT folder, whose tensors have the names of the checkpoint: {told}; save an "
                ".onnx_adapter file, or the whole model as .onnx."
            )


def in_checkpoints(name: str) -> str:
    """Convert a layer name to the checkpoint's name, as most architectures have it.

    Example:
        >>> in_checkpoints("model.layers.3.attn.qkv_proj")
        'model.layers.3.self_attn.qkv_proj'
    """
    return Architecture().in_checkpoint(name)


def _rename(pattern: str, replacement: str) -> _Rename:
    return re.compile(pattern), replacement


_LANGUAGE_MODEL = (_rename(r"^model\.(?=(embed_tokens|layers|norm)\b)", "model.language_model."),)

_TABLE: Mapping[str, Architecture] = {
    **dict.fromkeys(("ernie4_5", "granite", "llama", "mistral", "qwen2", "qwen3", "smollm3"), Architecture()),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "nemotron"), Architecture(offset=1.0)),
    **dict.fromkeys(("gemma3_vl_text", "gemma3"), Architecture(renames=_LANGUAGE_MODEL, offset=1.0)),
    **dict.fromkeys(("mistral3_text", "mistral3"), Architecture(renames=_LANGUAGE_MODEL)),
    **dict.fromkeys(
        ("hunyuandensev1", "hunyuan_v1_dense"),
        Architecture(
            renames=(
                _rename(r"self_attn\.q_norm\b", "self_attn.query_layernorm"),
                _rename(r"self_attn\.k_norm\b", "self_attn.key_layernorm"),
            )
        ),
    ),
    "granitemoehybrid": Architecture(
        renames=(_rename(r"(?<=\.)mlp\.down_proj\b", "shared_mlp.output_linear"),),
        packed={"shared_mlp.input_linear": ("mlp", _GATED)},
    ),
    "olmo": Architecture(norms=False),
    "phi": Architecture(
        renames=(
            _rename(r"self_attn\.o_proj\b", "self_attn.dense"),
            _rename(r"^model\.norm\b", "model.final_layernorm"),
        )
    ),
    "phi3": Architecture(packed={"self_attn.qkv_proj": ("self_attn", _ATTENTION), "mlp.gate_up_proj": ("mlp", _GATED)}),
}
"""Architectures by their type in genai_config.json, or by ``model_type`` in config.json."""


def _setting(folder: Path | None, file: str, *path: str) -> str:
    """Return a text of a JSON file; "" without one."""
    found: Any = _read(folder, file)
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else ""


def _read(folder: Path | None, file: str) -> dict[str, Any]:
    """Return the contents of a JSON file; {} without one that can be read."""
    try:
        found = {} if folder is None else read_json(folder / file, finite=False)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
