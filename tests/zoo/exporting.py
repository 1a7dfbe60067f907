"""Modules of torch that both exporters write, and what their files lost or changed.

Nothing here imports torch before a function is called.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

import onnxtrain
from onnxtrain.model_file.file import ModelFile
from zoo.gradients import distinct


class Exported(NamedTuple):
    """A module to export.

    Attributes:
        build: Makes it of ``torch``.
        shapes: Shapes of its floating inputs; the first axis is the batch, which has 2 examples.
        ids: Inputs of two axes are integers below this, where not 0.
        exporters: Those that can write it.
        free: Exporters that can write it with a dynamic batch size.
    """

    build: Callable[[Any], Any]
    shapes: tuple[tuple[int, ...], ...] = ((2, 6),)
    ids: int = 0
    exporters: tuple[str, ...] = ("dynamo", "torchscript")
    free: tuple[str, ...] = ("dynamo", "torchscript")

    def example(self, torch: Any) -> tuple[Any, ...]:
        """Seeded inputs."""
        generator = np.random.default_rng(0)
        return tuple(
            torch.from_numpy(
                generator.integers(0, self.ids, shape)
                if self.ids and len(shape) == 2
                else generator.normal(size=shape).astype(np.float32)
            )
            for shape in self.shapes
        )


def module_class(torch: Any, forward: Callable[..., Any], **parts: Any) -> Any:
    """A module with these modules and parameters, and this method ``forward``."""

    class Made(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, *inputs: Any) -> Any:
            return forward(self, *inputs)

    return Made()


def differences(parameters: dict[str, np.ndarray], model: onnx.ModelProto) -> list[str]:
    """Trainable tensors of a file that are not parameters of the program, and vice versa.

    Layout does not count, nor do tensors that the exporter computed from parameters (a folded batch normalization):
    these have the shape of one. A parameter that is not in the file cannot be trained. Where only one
    value fills a parameter, its name tells. A token or state that the exporter copied for each example counts once.
    """
    rows = onnxtrain.inspect(model).initializers
    file = ModelFile.load(model)
    held = {row.name: elements(file.value(row.name)) for row in rows if row.dtype == "float"}
    known = Counter(value for array in parameters.values() for value in elements(array))
    shapes = {tuple(sorted(array.shape)) for array in parameters.values()}
    trained = {row.name for row in rows if row.trainable}
    shape_of = {row.name: tuple(row.shape) for row in rows}
    seen = Counter(value for name in trained for value in once(held[name], shape_of[name], shapes))
    hinted = {value for row in rows if row.undecided for value in held[row.name]}
    found = []
    for row in rows:
        if row.trainable:
            others = [value for value in held[row.name] if value not in known]
            if others and tuple(sorted(row.shape)) not in shapes:
                found.append(f"{row.name} {row.shape} is trained: {others[:3]}")
    found += [f"{seen[fill]} times {fill} is trained" for fill in (0.0, 1.0) if seen[fill] > known[fill]]
    for name, array in parameters.items():
        values = elements(array)
        is_fill = len(set(values)) == 1 and values[0] in (0.0, 1.0)
        if is_fill and name in held and name not in trained:
            found.append(f"{name} {array.shape} is not trained")
        everywhere = {value for others in held.values() for value in others}
        missing = everywhere.difference(seen, hinted, (0.0, 1.0))
        if not is_fill and missing.intersection(values):
            found.append(f"{name} {array.shape} is not trained")
    return found


def once(values: list[float], shape: tuple[int, ...], known: set[tuple[int, ...]]) -> list[float]:
    """The elements of a tensor, or of one of its equal parts along an axis where that has the shape of a parameter."""
    array = np.reshape(values, shape)
    for axis, size in enumerate(shape):
        part = array.take([0], axis)
        if size > 1 and tuple(sorted(shape)) not in known and tuple(sorted(part.shape)) in known:
            return elements(part) if (array == part).all() else values
    return values


def elements(array: np.ndarray) -> list[float]:
    """The elements of an array in float32."""
    flat: list[float] = np.asarray(array, np.float32).reshape(-1).tolist()
    return flat


def export(
    torch: Any, case: Exported, path: Path, exporter: str, *, free: bool, fresh: bool, optimize: bool = True
) -> tuple[dict[str, np.ndarray], onnx.ModelProto]:
    """The parameters of a module, and its file.

    Args:
        torch: The package.
        case: The module.
        path: Where to write.
        exporter: "dynamo" or "torchscript".
        free: True if the batch is free.
        fresh: True if its parameters are as initialized; otherwise no two of their elements are equal.
        optimize: True if the newer exporter optimizes, as it does by default.
    """
    torch.manual_seed(0)
    module = case.build(torch).eval()
    if not fresh:
        module = distinct(module)
    example = case.example(torch)
    options: dict[str, Any] = {"dynamo": exporter == "dynamo", "external_data": False, "verbose": False}
    if exporter == "dynamo":
        options |= {"optimize": optimize}
        if free:
            options |= {"dynamic_shapes": [{0: torch.export.Dim("N")} for _ in example]}
    else:
        del options["external_data"]
        options |= {"input_names": [f"x{i}" for i in range(len(example))]}
        if free:
            options |= {"dynamic_axes": {f"x{i}": {0: "N"} for i in range(len(example))}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "dynamo" and free:
            signature_is_variadic = type(module).__name__ == "Made"
            if signature_is_variadic:
                options["dynamic_shapes"] = (tuple(options["dynamic_shapes"]),)
        torch.onnx.export(module, example, str(path), **options)
    parameters = {name: p.detach().numpy().copy() for name, p in module.named_parameters() if p.requires_grad}
    return parameters, onnx.load(path)
