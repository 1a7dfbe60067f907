"""Layer-wise decay of the learning rate: the further from the output, the smaller the steps."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.ir.shapes import infer_shapes
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.spelling import checks_arguments
from onnxtrain.weights.groups import Group, listed_groups, members
from onnxtrain.weights.parameters import Initializer, parameter_table
from onnxtrain.weights.readers import arrivals

_SEPARATOR = re.compile(r"[./]")


@checks_arguments
@refuses_invalid()
def layer_decay(
    model: str | os.PathLike[str] | onnx.ModelProto, decay: float, groups: Sequence[Group] = ()
) -> list[Group]:
    """Groups of parameters whose learning rate falls with the distance of their layer from the output.

    The parameters of layer k of n, counted from 0 at the input, get ``lr_scale = decay**(n - 1 - k)``: the last layer
    has the whole rate. Layers are taken from names and module paths, in the order in which the model computes them:
    what shares a path up to its first number (``encoder.layer.3``) is a layer, all that comes before the first such
    layer (the embeddings) is one, and all that comes after the last (the head). In a model without numbers every module
    is a layer; where names tell nothing, every matrix with the vectors behind it.

    Args:
        model: The model that is to be trained.
        decay: The factor from a layer to the one before it, above 0 and at most 1; 0.65 to 0.9 are usual.
        groups: Other groups, which keep their settings and get the factors of their layers, too.

    Returns:
        The groups for ``Trainer(groups=...)``.

    Raises:
        ModelError: The model cannot be read.
        OptionError: ``decay`` is outside its range; a group matches nothing; there is nothing to train.

    Example:
        >>> import onnxtrain
        >>> model = onnxtrain.examples.mlp((4, 8, 3))
        >>> [group.lr_scale for group in layer_decay(model, 0.5)]
        [0.5, 1.0]
        >>> groups = layer_decay(model, 0.5, groups=[Group("*bias*", weight_decay=0.0)])

    Source:
        H. Bao, L. Dong, S. Piao, F. Wei, "BEiT: BERT Pre-Training of Image Transformers", ICLR 2022.
    """
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
        raise OptionError(f"decay is {decay!r}; layer_decay needs a number above 0 and at most 1.")
    working = infer_shapes(ModelFile.load(model).training_model())
    own = listed_groups(groups)
    graph = working.clone()  # the table may expand functions, which patterns are not to see
    table = parameter_table(graph, None)
    layers = _layers(graph, [row for row in table if row.trainable])
    if not layers:
        raise OptionError("The model has no trainable parameter, so that there are no layers.")
    found = members(own, table, working)
    result = []
    for index, group in enumerate([*own, Group("*")]):
        for place, names in enumerate(layers):
            chosen = [name for name in names if found.get(name, [len(own)])[0] == index]
            if chosen:
                result.append(group.scaled(list(map(glob.escape, chosen)), decay ** (len(layers) - 1 - place)))
    return result


def _layers(model: ir.Model, rows: Sequence[Initializer]) -> list[list[str]]:
    """The names of parameters by layer, from the input to the output."""
    order = {node: place for place, node in enumerate(model.graph)}
    end = len(order)
    places = {
        row.name: min(
            (order.get(node, end) for node, _ in arrivals(model.graph.initializers[row.name], model.functions)),
            default=end,
        )
        for row in rows
    }
    rows = sorted(rows, key=lambda row: places[row.name])
    keys = _keys(rows, places)
    layers: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        layers.setdefault(keys[row.name], []).append(row.name)
    return list(layers.values())


def _keys(rows: Sequence[Initializer], places: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the layer key of each parameter; parameters are in the order of the model."""
    keys: dict[str, tuple[str, ...]] = {}
    others: list[str] = []
    numbered: list[int] = []
    matrix = ""
    for row in rows:
        path = row.paths[0] if row.paths else row.name
        parts = _SEPARATOR.split(path.strip("/"))
        number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        if number is not None:
            keys[row.name] = tuple(parts[: number + 1])
            numbered.append(places[row.name])
        elif len(parts) > 1:
            keys[row.name] = tuple(parts[:-1])
            others.append(row.name)
        else:
            if len(row.shape) > 1 or not matrix:
                matrix = row.name
            keys[row.name] = (matrix,)
            others.append(row.name)
    for name in others if numbered else ():
        if places[name] < numbered[0]:
            keys[name] = ("before the first number",)
        elif places[name] > numbered[-1]:
            keys[name] = ("after the last number",)
    return keys
