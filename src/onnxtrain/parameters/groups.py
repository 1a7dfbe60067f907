"""Groups of parameters that are updated with settings of their own, in the same step."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.errors.formatting import listed
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.patterns import alternatives, escape, matches, pattern_list
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.training_info.recipe import UpdateRule
from onnxtrain.model_file.exporters import NameOrigin, origin_of
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.operators.call_text import read_call, read_literal
from onnxtrain.operators.optimizer import LEARNING_RATES, Optimizer, as_fields
from onnxtrain.parameters.readers import arrivals
from onnxtrain.parameters.trainable import Initializer, matching, parameter_table


@checks_arguments
@dataclass(frozen=True, init=False)
class Group:
    """A group of parameters with separate optimizer settings.

    A parameter belongs to the first group that matches it, and to no other: to combine the settings of two groups, put
    a group with both before them. Parameters without a group have the optimizer's own settings.

    Args:
        pattern: One or several glob patterns of names, as for ``train=``: of the initializer or its module path, or,
            where it matches none of these, of the nodes that read it. ``|`` separates alternatives.
        lr_scale: Factor of the learning rate, schedules included, 0 or more.
        **settings: Settings of the optimizer under its own names or PyTorch's: ``weight_decay=0``. With
            ``learning_rate`` (or ``lr``) the group starts from that rate; a schedule scales it like the optimizer's.

    Raises:
        OptionError: ``lr_scale`` is invalid, or both a rate and a scale are given.

    Example:
        >>> import onnxtrain
        >>> onnxtrain.Group("*.bias|*norm*", weight_decay=0.0)
        Group('*.bias|*norm*', weight_decay=0.0)
        >>> model = onnxtrain.examples.mlp((4, 8, 3))
        >>> trainer = onnxtrain.Trainer(
        ...     model,
        ...     loss="cross_entropy",
        ...     optimizer="adamw(lr=1e-3)",
        ...     groups=[onnxtrain.Group("*bias*", weight_decay=0.0), onnxtrain.Group("*0*", lr_scale=0.1)],
        ... )
    """

    patterns: tuple[str, ...]
    lr_scale: float
    settings: tuple[tuple[str, Any], ...]

    def __init__(self, pattern: str | Sequence[str], *, lr_scale: float = 1.0, **settings: Any) -> None:
        object.__setattr__(self, "patterns", (pattern,) if isinstance(pattern, str) else tuple(pattern))
        object.__setattr__(self, "lr_scale", lr_scale)
        object.__setattr__(self, "settings", tuple(settings.items()))
        if not self.patterns or not all(isinstance(one, str) for one in self.patterns):
            raise OptionError(f"Group({pattern!r}): a group needs a glob pattern of names, or several.")
        if isinstance(lr_scale, bool) or not isinstance(lr_scale, (int, float)):
            raise OptionError(f"{self!r}: lr_scale is {lr_scale!r}, but must be a number.")
        if not (math.isfinite(lr_scale) and lr_scale >= 0):
            raise OptionError(f"{self!r}: lr_scale is {lr_scale}, but must be a finite number, 0 or more.")
        if lr_scale != 1 and settings.keys() & {*LEARNING_RATES}:
            raise OptionError(f"{self!r} has both a learning rate and lr_scale; give one of them.")

    def __repr__(self) -> str:
        shown = self.patterns[0] if len(self.patterns) == 1 else list(self.patterns)
        scale = [] if self.lr_scale == 1 else [("lr_scale", self.lr_scale)]
        given = [f"{name}={value!r}" for name, value in (*scale, *self.settings)]
        return f"Group({', '.join([repr(shown), *given])})"

    def rule(self, optimizer: Optimizer) -> UpdateRule:
        """Return the update rule of this group, based on the optimizer of the other parameters.

        Raises:
            OptionError: A setting does not exist, or its value is outside its range.
        """
        try:
            settings = as_fields(optimizer, dict(self.settings))
            own = dataclasses.replace(optimizer, **settings)
        except OptionError as error:
            raise OptionError(f"{self!r}: {error}") from None
        if "learning_rate" not in settings:
            return UpdateRule(own, float(self.lr_scale))
        if not optimizer.learning_rate:
            raise OptionError(
                f"{self!r}: a group's learning rate is stored relative to the optimizer's, which is 0; give the "
                "optimizer a rate above 0."
            )
        scale = own.learning_rate / optimizer.learning_rate
        return UpdateRule(dataclasses.replace(own, learning_rate=optimizer.learning_rate), scale)

    def scaled(self, patterns: Sequence[str], factor: float) -> Group:
        """Return a group of other parameters with the same settings and a scaled rate."""
        settings = dict(self.settings)
        for name in settings.keys() & {*LEARNING_RATES}:
            return Group(patterns, **settings | {name: settings[name] * factor})
        return Group(patterns, lr_scale=self.lr_scale * factor, **settings)


def read_group(text: str) -> Group:
    """Parse a group from text: patterns, then settings."""
    call = read_call(f"group({text})")
    try:
        if call is None or not call.positional or not call.named:
            raise ValueError
        settings = {name: read_literal(value) for name, value in call.named.items()}
    except ValueError:
        raise OptionError(
            f"The group {text!r} is not a pattern with settings; write them as in '*.bias|*norm*, weight_decay=0'."
        ) from None
    return Group(call.positional, **settings)


def listed_groups(groups: Group | Sequence[Group]) -> tuple[Group, ...]:
    """Return groups as a tuple."""
    found = (groups,) if isinstance(groups, Group) else tuple(groups)
    for group in found:
        if not isinstance(group, Group):
            raise OptionError(
                f"groups has {group!r}; it takes groups such as onnxtrain.Group('*.bias', weight_decay=0.0)."
            )
    return found


def update_rules(
    groups: Sequence[Group], optimizer: Optimizer, table: Sequence[Initializer], model: ir.Model
) -> dict[str, UpdateRule]:
    """Return the update rules of the parameters that are in groups."""
    rules = [group.rule(optimizer) for group in groups]
    return {name: rules[found[0]] for name, found in members(groups, table, model).items()}


def group_hints(groups: Sequence[Group], table: Sequence[Initializer], model: ir.Model) -> list[str]:
    """Return hints on groups that may not do what they are meant to do.

    A group may match parameters of an earlier group that lacks its settings, or have an alternative that matches
    nothing, since case counts.
    """
    sentences, counts = [], dict[tuple[int, int], int]()
    paths = _paths(table, model)
    for group in groups:
        parts = [one for pattern in group.patterns if pattern not in paths for one in alternatives(pattern)]
        sentences += [
            f"In {group!r} nothing matches {part!r}; patterns are case-sensitive."
            for part in parts
            if len(parts) > 1 and not _matches(part, paths, model)
        ]
    for found in members(groups, table, model).values():
        for later in found[1:]:
            counts[found[0], later] = counts.get((found[0], later), 0) + 1
    for (first, later), count in counts.items():
        lost = _changed(groups[later]) - _changed(groups[first])
        if lost:
            sentences.append(
                f"{groups[later]!r} matches {count} parameters that {groups[first]!r} has already: only the first "
                f"group that matches applies, so that they do not get its {' and '.join(sorted(lost))}."
            )
    return sentences


def merged_hints(
    choices: Mapping[str, str | Sequence[str] | None], table: Sequence[Initializer], model: ir.Model
) -> list[str]:
    """Return hints on tensors shared by several modules where patterns name only some of these."""
    sentences = []
    copies = {row.name for row in table if row.name not in model.graph.initializers}
    for option, given in choices.items():
        patterns = pattern_list(given)
        named = {one for pattern in patterns for one in (pattern, *alternatives(pattern))}
        for row in table:
            if row.name not in model.graph.initializers or not row.paths:
                continue
            own = () if origin_of(row.name) is NameOrigin.EXPORTER else (row.name,)
            names = dict.fromkeys(name for name in (*own, *row.paths) if name not in copies)
            is_filler = not own and not row.shape  # zeros for the biases that layers do not have
            if row.name in named or len(names) < 2 or is_filler:
                continue
            matched = [name for name in names if any(matches(pattern, name) for pattern in patterns)]
            if matched and len(matched) < len(names):
                others = [name for name in names if name not in matched]
                sentences.append(
                    f"{option} matches {matched[0]}, but the file holds it as one tensor ({row.name}) with "
                    f"{listed(others, 2)}, so it applies to all of them; untie= gives each module its own."
                )
    return sentences


def _paths(table: Sequence[Initializer], model: ir.Model) -> dict[str, tuple[str, ...]]:
    return {row.name: row.paths for row in table if row.name in model.graph.initializers}


def _matches(pattern: str, paths: Mapping[str, tuple[str, ...]], model: ir.Model) -> bool:
    try:
        return bool(matching("group", [pattern], paths, model))
    except OptionError:
        return False


def _changed(group: Group) -> set[str]:
    return {name for name, _ in group.settings} | ({"lr_scale"} if group.lr_scale != 1 else set())


def members(groups: Sequence[Group], table: Sequence[Initializer], model: ir.Model) -> dict[str, list[int]]:
    """Return the parameters that are in groups, with the indices of all matching groups."""
    if not groups:
        return {}
    paths = _paths(table, model)
    trained = {row.name for row in table if row.trainable}
    found: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        for name in matching("group", group.patterns, paths, model):
            if name in trained:
                found.setdefault(name, []).append(index)
    return {name: found[name] for name in paths if name in found}


_SEPARATOR = re.compile(r"[./]")


@checks_arguments
@refuses_invalid()
def layer_decay(
    model: str | os.PathLike[str] | onnx.ModelProto, decay: float, groups: Sequence[Group] = ()
) -> list[Group]:
    """Make groups for layer-wise learning-rate decay: the rate falls with the distance of a layer from the output.

    The parameters of layer k of n, counted from 0 at the input, get ``lr_scale = decay**(n - 1 - k)``: the last layer
    has the full rate. Layers follow from names and module paths, in the order of computation: parameters that share a
    path up to its first number (``encoder.layer.3``) are a layer, all parameters before the first such layer (the
    embeddings) are one, and all after the last (the head) are one. In a model without numbers every module is a layer;
    without module names, every matrix with the vectors after it.

    Args:
        model: The model that is to be trained.
        decay: The factor from a layer to the one before it, above 0 and at most 1; 0.65 to 0.9 are usual.
        groups: Other groups, which keep their settings and also get the factors of their layers.

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
    graph = working.clone()  # the table expands functions, but patterns match the original names
    table = parameter_table(graph, None)
    layers = _layers(graph, [row for row in table if row.trainable])
    if not layers:
        raise OptionError("The model has no trainable parameter, so it has no layers.")
    found = members(own, table, working)
    result = []
    for index, group in enumerate([*own, Group("*")]):
        for layer, names in enumerate(layers):
            chosen = [name for name in names if found.get(name, [len(own)])[0] == index]
            if chosen:
                result.append(group.scaled(list(map(escape, chosen)), decay ** (len(layers) - 1 - layer)))
    return result


def _layers(model: ir.Model, rows: Sequence[Initializer]) -> list[list[str]]:
    """Return the names of parameters by layer, from the input to the output."""
    order = {node: index for index, node in enumerate(model.graph)}
    end = len(order)
    positions = {
        row.name: min(
            (order.get(node, end) for node, _ in arrivals(model.graph.initializers[row.name], model.functions)),
            default=end,
        )
        for row in rows
    }
    rows = sorted(rows, key=lambda row: positions[row.name])
    keys = _keys(rows, positions)
    layers: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        layers.setdefault(keys[row.name], []).append(row.name)
    return list(layers.values())


def _keys(rows: Sequence[Initializer], positions: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the layer key of each parameter; parameters are in the order of the model."""
    keys: dict[str, tuple[str, ...]] = {}
    others: list[str] = []
    numbered: list[int] = []
    matrix = ""
    for row in rows:
        path = row.paths[0] if row.paths else row.name
        parts = _SEPARATOR.split(path.strip("/"))
        number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        if number is not None:
            keys[row.name] = tuple(parts[: number + 1])
            numbered.append(positions[row.name])
        elif len(parts) > 1:
            keys[row.name] = tuple(parts[:-1])
            others.append(row.name)
        else:
            if len(row.shape) > 1 or not matrix:
                matrix = row.name
            keys[row.name] = (matrix,)
            others.append(row.name)
    for name in others if numbered else ():
        if positions[name] < numbered[0]:
            keys[name] = ("before the first number",)
        elif positions[name] > numbered[-1]:
            keys[name] = ("after the last number",)
    return keys
