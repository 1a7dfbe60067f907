"""Untrusted adapters: mutated settings, manifests and tensors, merged into a model."""

from __future__ import annotations

import copy
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from reliability.mutation import damage
from reliability.outcome import WrongError
from reliability.worker import Operations

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e38, 1e300, float("nan"),
    float("inf"), "", "2", "layer1", "LORA", "\ud800", [], [1], ["*"], {}, {"layer1": 0}, {"layer1": "a"}, {"": 1},
)  # fmt: skip
ARRAYS: tuple[Any, ...] = (
    (2, 4), (5, 2), (0, 4), (2, 0), (4,), (), (3, 4), (2, 4, 1, 1), (5, 2, 1, 1), (2, 4, 0, 1), (1, 1), (2, 5), (1, 4)
)  # fmt: skip
TYPES = ("f4", "f2", "f8", "i8", "u1", "?")


class Subject:
    """One adapter per case, which is inspected, merged and converted."""

    def __init__(self, shared: Path) -> None:
        import onnx

        import onnxtrain
        from onnxtrain.adapters import convert_adapter

        warnings.simplefilter("ignore")
        self._shared = shared
        onnx.save(onnxtrain.examples.mlp((4, 5, 3)), shared / "model.onnx")
        trainer = onnxtrain.Trainer(
            shared / "model.onnx",
            loss="softmax_cross_entropy",
            lora=onnxtrain.Lora(rank=2, targets="layer1"),
            train="layer2.*",
        )
        trainer.parameters.update({name: array + 1 for name, array in trainer.get_weights().items()})
        trainer.save(shared / "a.onnx_adapter")
        shutil.rmtree(shared / "folder", ignore_errors=True)
        convert_adapter(shared / "model.onnx", shared / "a.onnx_adapter", shared / "folder")

    def run(self, seed: int, index: int, case: Path, operations: Operations) -> None:
        """Spoil an adapter and use it."""
        from onnxtrain.adapters import add_slots, add_weighted, convert_adapter, describe_adapter, merge_adapter

        generator = random.Random(f"adapters {seed} {index}")
        warnings.simplefilter("ignore")
        model = case / "model.onnx"
        shutil.copy(self._shared / "model.onnx", model)
        config = case / "config.json"  # of the checkpoint, beside the model
        config.write_text(json.dumps({"architectures": ["BertForSequenceClassification"], "_name_or_path": "bert"}))
        settings = case / "genai_config.json"
        settings.write_text(json.dumps({"model": {"type": generator.choice(("llama", "phi", "phi3"))}}))
        if generator.random() < 0.6:
            adapter = case / "folder"
            shutil.copytree(self._shared / "folder", adapter)
            target = adapter / generator.choice(("adapter_config.json", "adapter_model.safetensors", "onnxtrain.json"))
        else:
            adapter = case / "a.onnx_adapter"
            for name in ("a.onnx_adapter", "a.onnx_adapter.json"):
                shutil.copy(self._shared / name, case / name)
            target = generator.choice((adapter, case / "a.onnx_adapter.json"))
        if generator.random() < 0.1:
            target = generator.choice((config, settings))
        spoil_file(target, generator)
        with np.errstate(all="ignore"):
            operations.run("describe", lambda: describe_adapter(adapter))
            operations.run("merge", lambda: _merge(merge_adapter, model, adapter, case / "merged.onnx"))
            operations.run("convert", lambda: convert_adapter(model, adapter, case / "other"))
            operations.run("slots", lambda: add_slots(model, case / "slots.onnx", adapter=adapter))
            terms = [(adapter, 0.5), (self._shared / adapter.name, -2)]
            operations.run("add", lambda: add_weighted(terms, case / "sum", combination="svd", model=model))
            operations.run("add alike", lambda: add_weighted(terms, case / f"sum{adapter.suffix}"))


def _merge(merge: Any, model: Path, adapter: Path, output: Path) -> None:
    import onnx

    merge(model, adapter, output)
    for tensor in onnx.load(output).graph.initializer:
        if not np.isfinite(onnx.numpy_helper.to_array(tensor)).all():
            raise WrongError("values that are not finite were merged")


def spoil_file(path: Path, generator: random.Random) -> None:
    """Damage a file, or change its contents: JSON field by field, safetensors tensor by tensor."""
    if generator.random() < 0.25:
        path.write_bytes(damage(path.read_bytes(), generator))
    elif path.suffix == ".json":
        found = json.loads(path.read_text())
        spoil_json(found, generator)
        path.write_text(json.dumps(found))
    elif path.suffix == ".safetensors":
        _spoil_tensors(path, generator)
    else:
        path.write_bytes(damage(path.read_bytes(), generator))


def spoil_json(found: Any, generator: random.Random) -> None:
    """Change some values of a JSON document, in place."""
    for _ in range(generator.randrange(1, 4)):
        level = found
        while isinstance(level, dict | list) and level:
            keys = [*level] if isinstance(level, dict) else [*range(len(level))]
            key: Any = generator.choice(keys)
            if isinstance(level[key], dict | list) and level[key] and generator.random() < 0.7:
                level = level[key]
                continue
            if isinstance(level, dict) and generator.random() < 0.2:
                level.pop(key)
            else:
                level[key] = copy.deepcopy(generator.choice(VALUES))
            break


def _spoil_tensors(path: Path, generator: random.Random) -> None:
    from safetensors.numpy import load_file, save_file

    if generator.random() < 0.5:
        arrays = load_file(path)
        for name in generator.sample([*arrays], min(len(arrays), generator.randrange(1, 3))):
            kind = generator.randrange(4)
            if kind == 0:
                arrays[name] = np.full(generator.choice(ARRAYS), generator.choice((1, 0)), generator.choice(TYPES))
            elif kind == 1:
                arrays[name] = np.full_like(arrays[name], generator.choice((np.nan, np.inf, 3e38, 1e-45)))
            elif kind == 2:
                arrays[name + generator.choice(("x", ".weight", ""))] = arrays.pop(name)
            else:
                arrays.pop(name)
        save_file(arrays, path)
        return
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entry = header[generator.choice([*header])]
    if "dtype" in entry:
        entry["dtype"] = generator.choice(("F8_E4M3", "F8_E5M2", "F4", "BF16", "I64", "C64", "x", entry["dtype"]))
        entry["shape"] = generator.choice(([2**62, 0], [2**63], [0], [], [-1], [2, 4], entry["shape"]))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
