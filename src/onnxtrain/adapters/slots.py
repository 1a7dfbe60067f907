"""Models with slots: optional inputs for adapters that ONNX Runtime loads at run time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.adapters.adapter import GAIN, A, Adapter, B
from onnxtrain.adapters.base_model import BaseModel, chosen_layers
from onnxtrain.adapters.emit import Emitter, Pair, add_tensor, rewritten
from onnxtrain.adapters.files import read_adapter
from onnxtrain.adapters.layers import AUTO, Layer, Target, choose_layers, main_output, refuse_magnitudes
from onnxtrain.data.data_names import read_names, write_names
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.operands import Value
from onnxtrain.model_file.exporters import optimum
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid

RANK = "lora_rank"
"""Prefix of the symbolic rank dimension of A and B; every slot has its own."""

AdapterPath = str | os.PathLike[str]


@checks_arguments
@refuses_invalid()
def add_slots(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str | os.PathLike[str],
    *,
    targets: str | Sequence[str] = AUTO,
    dora: bool = False,
    adapter: AdapterPath | Sequence[AdapterPath] | None = None,
) -> list[str]:
    """Write a model with slots for adapters, which ONNX Runtime fills from ``.onnx_adapter`` files.

    Each slot is a pair of inputs ``{layer}.lora_A.weight`` [inputs, rank] and ``{layer}.lora_B.weight`` [rank, outputs]
    of any rank. Their defaults have rank 0: without an adapter the model computes the same as before. Tensors that were
    trained in full beside ``adapter``, such as a head, become inputs, too, with the model's values as defaults.

    One model serves several adapters, of different layers and ranks: each run takes the one that it names, and layers
    that this one lacks compute as without. In Python::

        adapters = onnxruntime.LoraAdapter()
        adapters.Load("tuned.onnx_adapter")
        run = onnxruntime.RunOptions()
        run.add_active_adapter(adapters)
        session.run(None, feeds, run)

    Args:
        model: A path or a loaded model; it is not changed.
        output: The file to write; external data goes beside it.
        targets: The layers that get slots; see :class:`onnxtrain.Lora`.
        dora: Add inputs ``{layer}.lora_gain`` [outputs] for DoRA, too, with ones as defaults.
        adapter: An adapter, or several, whose layers get slots; it replaces ``targets`` and ``dora``.

    Returns:
        The names of the layers with slots.

    Raises:
        ModelError: The model cannot be read, the result cannot be written, an adapter belongs to another model, or one
            is of a packed layer and another of a part of it.
        OptionError: ``targets`` matches no layer, ``adapter`` is empty, or a tensor that was trained in full cannot
            become an input.
    """
    file = ModelFile.load(model)
    if any(value.name == optimum.BRANCH for value in file.proto.graph.input):
        raise OptionError(
            "The layers of a merged decoder (use_cache_branch) are in the branches of an If, where slots cannot be; "
            "merge the adapter into the model (merge_adapter)."
        )
    given = [adapter] if isinstance(adapter, str | os.PathLike) else adapter
    if given is not None and not given:
        raise OptionError("adapter is an empty list; give one adapter or several, or targets=.")
    names: list[str] = []

    def edit(working: ir.Model, layers: list[Layer]) -> None:
        graph = working.graph
        if given is None:
            chosen = choose_layers(layers, targets, main_output(graph))
            magnitudes = {layer.name for layer in chosen} if dora else set()
        else:
            chosen, magnitudes = _layers_of(given, BaseModel(file, graph, layers))
        refuse_magnitudes([layer for layer in chosen if layer.name in magnitudes])
        emitter = Emitter(graph, graph.opset_imports[""])
        for layer_index, layer in enumerate(chosen):
            op = emitter.builder(layer)
            pairs = []
            for part_index, target in enumerate(layer.targets):
                rank = f"{RANK}_{layer_index}_{part_index}"
                pairs.append(_slot(op, target, rank, dora=layer.name in magnitudes))
                names.append(target.name)
            emitter.add(op, layer, pairs)

    rewritten(file, edit).save(output, {})
    write_names(Path(output), read_names(file))
    return names


def _layers_of(paths: Sequence[AdapterPath], base: BaseModel) -> tuple[list[Layer], set[str]]:
    """Return the layers that adapters are of, and the names of those with magnitudes."""
    found: dict[str, Target] = {}
    full: dict[str, None] = {}
    magnitudes = set[str]()
    graph = base.graph
    for path in paths:
        fitted, targets = base.fit(_checked(read_adapter(path), graph, str(path)), str(path))
        for target, entry in zip(targets, fitted.entries.values(), strict=True):
            found[target.name] = target
            if entry.magnitude is not None:
                magnitudes.add(target.layer.name)
        full |= dict.fromkeys(fitted.tensors)
    chosen = chosen_layers(base.layers, list(found.values()), ", ".join(map(str, paths)))
    for name in full:
        if graph.initializers[name] not in graph.inputs:
            graph.inputs.append(graph.initializers[name])
    return chosen, magnitudes


def _checked(adapter: Adapter, graph: ir.Graph, label: str) -> Adapter:
    """Check that the tensors trained in full beside an adapter can become inputs of a model; return the adapter."""
    for name in adapter.tensors:
        if name not in graph.initializers:
            raise OptionError(
                f"{label!r} has values for {name!r}, which is not an initializer of the model's main graph and "
                "cannot become an input; merge the adapter into the model instead (merge_adapter)."
            ).about(label, got=name)
    return adapter


def _slot(op: Builder, target: Target, rank: str, *, dora: bool) -> Pair:
    """Add the inputs of a layer's adapter."""
    layer, name, outputs = target.layer, target.name, target.outputs
    dtype = layer.y.dtype or ir.DataType.FLOAT
    ones = (1,) * len(layer.window)
    if layer.is_convolution:
        a = _input(op, name + A, (rank, layer.inputs, *layer.window), dtype)
        b = _input(op, name + B, (outputs, rank, *ones), dtype)
    else:
        a = _input(op, name + A, (layer.inputs, rank), dtype)
        b = _input(op, name + B, (rank, outputs), dtype)
    return Pair(a, b, 1.0, target.part, _input(op, name + GAIN, (outputs,), dtype) if dora else None)


def _input(op: Builder, name: str, shape: tuple[int | str, ...], dtype: ir.DataType) -> Value:
    """Add an optional input; its default is empty if an axis is symbolic, and ones otherwise."""
    sizes = [size if isinstance(size, int) else 0 for size in shape]
    value = add_tensor(op, name, np.ones(sizes, dtype.numpy()), "slots; give the model without").with_shape(shape)
    op.graph.inputs.append(value.ir)
    return value
