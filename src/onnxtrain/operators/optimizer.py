"""What the public optimizer objects share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from onnxtrain.errors import OperatorError, OptionError
from onnxtrain.operators.schema import NOT_NEGATIVE, OptimizerSchema, State
from onnxtrain.operators.sparsity import Sparsity


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's settings: the learning rate, and the attributes of its operator.

    A setting has the name of its attribute, unless ``names`` says otherwise: ``{"alpha": "betas[0]"}`` for one that is
    the first of a pair.

    Raises:
        OptionError: A setting is outside its range; the message names it, what it got and the range.
    """

    schema: ClassVar[OptimizerSchema]
    names: ClassVar[Mapping[str, str]] = {}

    learning_rate: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not _is_number(self.learning_rate) or self.learning_rate not in NOT_NEGATIVE:
            raise OptionError(
                f"{name}: learning_rate is {self.learning_rate!r}, but must be a finite number, {NOT_NEGATIVE}."
            )
        for attribute in self.schema.attributes:
            label, value = self._setting(attribute.name)
            if attribute.kind is str:
                continue
            if not _is_number(value) or value not in attribute.sensible:
                raise OptionError(f"{name}: {label} is {value!r}, but must be a finite number, {attribute.sensible}.")
        try:
            self.schema.complete(self.node_attributes())
        except OperatorError as error:
            raise OptionError(str(error)) from None

    def node_attributes(self) -> dict[str, float | str]:
        """All attributes of the operator's node."""
        return {
            attribute.name: value if attribute.kind is str else float(value)
            for attribute in self.schema.attributes
            for _, value in [self._setting(attribute.name)]
        }

    @classmethod
    def from_attributes(cls, **given: Any) -> Self:
        """The settings that give the operator these attributes; ``learning_rate`` may be among them.

        Raises:
            OptionError: A value is outside its range.
        """
        defaults = {field.name: field.default for field in fields(cls)}
        found: dict[str, Any] = {}
        for attribute, value in given.items():
            field, index = _place(cls.names.get(attribute, attribute))
            if index is not None:
                items = [*found.get(field, defaults[field])]
                items[index] = value
                value = tuple(items)
            found[field] = value
        return cls(**found)

    def _setting(self, attribute: str) -> tuple[str, Any]:
        """An attribute as the user knows it: the name of its setting, and its value."""
        name = self.names.get(attribute, attribute)
        field, index = _place(name)
        value = getattr(self, field)
        if index is None:
            return name, value
        if not isinstance(value, (tuple, list)) or len(value) <= index:
            raise OptionError(f"{type(self).__name__}: {field} is {value!r}, but must be a pair of numbers.")
        return name, value[index]

    @property
    def states(self) -> tuple[State, ...]:
        """What is kept for each parameter, with initial values, in the order of the operator's inputs."""
        return self.schema.used_states(self.schema.complete(self.node_attributes()))

    @property
    def sparsity_modifier(self) -> Sparsity | None:
        """How the rule is modified to promote sparsity; ``None`` where it is not."""
        found = getattr(self, "sparsity", None)
        return found if isinstance(found, Sparsity) else None

    @property
    def promotes_sparsity(self) -> bool:
        """Whether steps grow with the size of a weight."""
        return self.sparsity_modifier is not None

    @property
    def elementwise(self) -> bool:
        """Whether the update of an element depends on no other element of its tensor."""
        return not self.promotes_sparsity

    def plain(self) -> Self:
        """The same update rule without sparsity promotion."""
        modifiable = any(field.name == "sparsity" for field in fields(self))
        return replace(self, **{"sparsity": None}) if modifiable else self  # type: ignore[arg-type]


def _place(name: str) -> tuple[str, int | None]:
    """The field of a setting, and its place within it."""
    field, _, index = name.rstrip("]").partition("[")
    return field, int(index) if index else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
