"""Groups of parameters: what is updated otherwise than the rest, in the same step."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.operators.optimizer import LEARNING_RATES, Optimizer, as_fields
from onnxtrain.spelling import checks_arguments
from onnxtrain.training.call_text import read_call
from onnxtrain.training_info.recipe import UpdateRule
from onnxtrain.weights.names import Origin, origin_of
from onnxtrain.weights.parameters import Initializer, matching


@checks_arguments
@dataclass(frozen=True, init=False)
class Group:
    """Parameters that are updated with settings of their own.

    A parameter belongs to the first group of the list that matches it, and to no other: one that is to have what two
    groups say needs a group that says both, before them. What matches no group has the optimizer's own settings.

    Args:
        pattern: Glob patterns of names, one or several, as in ``train=``: of the initializer or its module path, or,
            where it matches none of these, of the nodes that read it. ``|`` stands between alternatives.
        lr_scale: What the learning rate is multiplied by, schedules included, 0 or more.
        **settings: Settings of the optimizer under its own names or those of PyTorch: ``weight_decay=0``. With
            ``learning_rate`` (or ``lr``) the group starts from that rate; a schedule scales it as it does the
            optimizer's.

    Raises:
        OptionError: ``lr_scale`` is no such number, or there are two rates.

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
        """Return the optimizer of this group, given that of the other parameters.

        Raises:
            OptionError: The optimizer has no such setting, or the value is outside its range.
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
                f"{self!r}: a group's learning rate is taken in proportion to the optimizer's, which is 0; give the "
                "optimizer a rate above 0."
            )
        scale = own.learning_rate / optimizer.learning_rate
        return UpdateRule(dataclasses.replace(own, learning_rate=optimizer.learning_rate), scale)

    def scaled(self, patterns: Sequence[str], factor: float) -> Group:
        """The group of other parameters whose rate is multiplied once more."""
        settings = dict(self.settings)
        for name in settings.keys() & {*LEARNING_RATES}:
            return Group(patterns, **settings | {name: settings[name] * factor})
        return Group(patterns, lr_scale=self.lr_scale * factor, **settings)


def read_group(text: str) -> Group:
    """A group as text: the patterns, then its settings.

    Raises:
        OptionError: It has another form.

    >>> read_group("*.bias|*norm*, weight_decay=0, lr_scale=0.5")
    Group('*.bias|*norm*', lr_scale=0.5, weight_decay=0)
    """
    call = read_call(f"group({text})")
    try:
        if call is None or not call.positional or not call.named:
            raise ValueError
        settings = {name: ast.literal_eval(value) for name, value in call.named.items()}
    except (ValueError, SyntaxError):
        raise OptionError(
            f"The group {text!r} is not a pattern with settings; write them as in '*.bias|*norm*, weight_decay=0'."
        ) from None
    return Group(call.positional, **settings)


def listed_groups(groups: Group | Sequence[Group]) -> tuple[Group, ...]:
    """Groups as a tuple.

    Raises:
        OptionError: Something else is among them.
    """
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
    """The update rules of the parameters that are in groups.

    Args:
        groups: The groups; the first that matches a parameter has it.
        optimizer: That of all others.
        table: All initializers.
        model: A working copy.

    Raises:
        OptionError: A pattern matches no initializer, or a setting is none of the optimizer's.
    """
    rules = [group.rule(optimizer) for group in groups]
    return {name: rules[found[0]] for name, found in members(groups, table, model).items()}


def group_hints(groups: Sequence[Group], table: Sequence[Initializer], model: ir.Model) -> list[str]:
    """Sentences on what groups may not be meant to do.

    A group may match parameters of an earlier one that says nothing of the same setting, or have an alternative that
    matches nothing: patterns tell capital letters from others.
    """
    sentences, counts = [], dict[tuple[int, int], int]()
    paths = _paths(table, model)
    for group in groups:
        alternatives = [one for pattern in group.patterns if pattern not in paths for one in pattern.split("|")]
        sentences += [
            f"In {group!r} nothing matches {alternative!r}, in which capital letters count."
            for alternative in alternatives
            if len(alternatives) > 1 and not _matches(alternative, paths, model)
        ]
    for found in members(groups, table, model).values():
        for later in found[1:]:
            counts[found[0], later] = counts.get((found[0], later), 0) + 1
    for (first, later), count in counts.items():
        lost = _changed(groups[later]) - _changed(groups[first])
        if lost:
            sentences.append(
                f"{groups[later]!r} matches {count} parameters that {groups[first]!r} has already: the first group "
                f"that matches counts alone, so that they do not get its {' and '.join(sorted(lost))}."
            )
    return sentences


def merged_hints(
    choices: Mapping[str, str | Sequence[str] | None], table: Sequence[Initializer], model: ir.Model
) -> list[str]:
    """Sentences on tensors of several modules of which patterns name only some: what is said holds for all of them.

    Args:
        choices: Patterns by the option that has them.
        table: All initializers.
        model: A working copy.
    """
    sentences = []
    copies = {row.name for row in table if row.name not in model.graph.initializers}
    for option, given in choices.items():
        patterns = [given] if isinstance(given, str) else list(given or ())
        alternatives = [one for pattern in patterns for one in (pattern, *pattern.split("|"))]
        for row in table:
            if row.name not in model.graph.initializers or not row.paths:
                continue
            own = () if origin_of(row.name) is Origin.EXPORTER else (row.name,)
            names = dict.fromkeys(name for name in (*own, *row.paths) if name not in copies)
            if row.name in alternatives or len(names) < 2:
                continue
            matched = [name for name in names if any(fnmatch.fnmatchcase(name, one) for one in alternatives)]
            if matched and len(matched) < len(names):
                others = [name for name in names if name not in matched]
                more = f" and {len(others) - 2} more" if len(others) > 2 else ""
                sentences.append(
                    f"{option} matches {matched[0]}, but the file holds it as one tensor ({row.name}) with "
                    f"{', '.join(others[:2])}{more}, so it holds for all of them; untie= gives each module its own."
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
    """The parameters that are in groups, with the places of all groups that match them.

    Raises:
        OptionError: A pattern matches no initializer.
    """
    if not groups:
        return {}
    paths = _paths(table, model)
    trained = {row.name for row in table if row.trainable}
    found: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        for name in matching("group", group.patterns, paths, model):
            if name in trained:
                found.setdefault(name, []).append(place)
    return {name: found[name] for name in paths if name in found}
