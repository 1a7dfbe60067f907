"""Optimizer settings: the learning rate and the operator's attributes, by ONNX's and by PyTorch's names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Self, TypeVar

from onnxtrain.errors import ArgumentError, OperatorError, OptionError
from onnxtrain.errors.spelling import suggestion
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.operators.schema import NOT_NEGATIVE, Attribute, OptimizerSchema, Rule, State
from onnxtrain.operators.sparsity import Sparsity

LEARNING_RATES: Final = ("learning_rate", "lr")
"""Names of the learning rate of every optimizer."""

_COMPLEMENT: Final = "1 - "


@dataclass(frozen=True)
class Optimizer:
    """Settings of an optimizer: the learning rate and the attributes of its operator.

    Every optimizer accepts each setting by two names: ONNX's attribute (``alpha``, ``beta``, ``epsilon``,
    ``norm_coefficient``) and, if it differs, PyTorch's name (``betas``, ``eps``, ``weight_decay``, ``momentum``,
    ``nesterov``); ``lr`` is ``learning_rate``. The same names work in Python, in text (``"adam(lr=1e-3)"``), in TOML
    and as flags of the command line. A field of the class has one of the two names.

    Raises:
        OptionError: A setting is outside its range; the message states the setting, its value and the range.
    """

    schema: ClassVar[OptimizerSchema]

    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not _is_number(self.learning_rate) or self.learning_rate not in NOT_NEGATIVE:
            raise OptionError(
                f"{name}: learning_rate is {self.learning_rate!r}, but must be a finite number, {NOT_NEGATIVE}."
            ).about("learning_rate", got=self.learning_rate, wanted=str(NOT_NEGATIVE))
        for attribute in self.schema.attributes:
            label, value = self._read(attribute)
            if attribute.kind is not float:
                continue
            if not _is_number(value) or value not in attribute.sensible:
                raise OptionError(
                    f"{name}: {label} is {value!r}, but must be a finite number, {attribute.sensible}."
                ).about(label, got=value, wanted=str(attribute.sensible))
        try:
            self.schema.complete(self.node_attributes())
        except OperatorError as error:
            raise OptionError(str(error)) from None

    def node_attributes(self) -> dict[str, Any]:
        """Return all attributes of the operator's node."""
        return {
            attribute.name: float(value) if attribute.kind is float else value
            for attribute in self.schema.attributes
            for _, value in [self._read(attribute)]
        }

    @classmethod
    def field_of(cls, attribute: Attribute) -> str:
        """Return the name of the field that holds an attribute: ``alpha``, or ``betas[0]`` for an item of a pair."""
        return attribute.name if attribute.name in _field_names(cls) else attribute.familiar

    def _read(self, attribute: Attribute) -> tuple[str, Any]:
        """Return the label and the value of an attribute in the fields."""
        label = self.field_of(attribute)
        name, index = _item(label)
        value = getattr(self, name)
        if attribute.kind is str and name != attribute.name:
            return label, _choice(type(self), attribute, name, value)
        return label, value if index is None else _pair(type(self), name, value)[index]

    @property
    def states(self) -> tuple[State, ...]:
        """States of each parameter, in the order of the operator's inputs."""
        return self.schema.used_states(self.schema.complete(self.node_attributes()))

    @property
    def sparsity_modifier(self) -> Sparsity | None:
        """The sparsity promotion that modifies the rule, if any."""
        found = getattr(self, "sparsity", None)
        return found if isinstance(found, Sparsity) else None

    @property
    def promotes_sparsity(self) -> bool:
        """True where steps grow with the size of a weight."""
        return self.sparsity_modifier is not None

    @property
    def promoted_block(self) -> tuple[int, int]:
        """The (outputs, inputs) of the blocks of weights whose sparsity is promoted together."""
        found: tuple[int, int] = getattr(self.sparsity_modifier or self, "block", (1, 1))
        return found

    @property
    def elementwise(self) -> bool:
        """True where the update of an element depends on no other element of its tensor."""
        return not self.promotes_sparsity

    def plain(self) -> Self:
        """Return the same update rule without sparsity promotion."""
        modifiable = any(field.name == "sparsity" for field in fields(self))
        return replace(self, **{"sparsity": None}) if modifiable else self  # type: ignore[arg-type]


S = TypeVar("S", bound=Optimizer)


def setting_names(settings: type[Optimizer]) -> tuple[str, ...]:
    """Return all names of an optimizer's settings: of the learning rate, of the attributes, of other fields."""
    attributes = settings.schema.attributes
    familiar = (_item(attribute.familiar)[0].removeprefix(_COMPLEMENT) for attribute in attributes)
    own = (name for attribute, also in zip(attributes, familiar, strict=True) for name in (also, attribute.name))
    return tuple(dict.fromkeys(name for name in (*LEARNING_RATES, *own, *_field_names(settings)) if name))


def as_fields(settings: Optimizer | type[Optimizer], given: Mapping[str, Any], positional: int = 0) -> dict[str, Any]:
    """Return arguments under the names of the fields."""
    cls = settings if isinstance(settings, type) else type(settings)
    attributes = {attribute.name: attribute for attribute in cls.schema.attributes}
    first = _field_names(cls)[:positional]
    inside = [name for name, each in attributes.items() if _item(cls.field_of(each))[0] in first]
    before = dict.fromkeys([*first, *inside], "the arguments before")
    found: dict[str, Any] = {}
    for argument, value in given.items():
        for setting, part in _settings_of(cls, argument, value):
            if setting in before:
                raise OptionError(f"{cls.__name__}: {setting} is given twice, by {before[setting]} and by {argument}.")
            before[setting] = argument
            name, index = _item(cls.field_of(attributes[setting]) if setting in attributes else setting)
            if index is not None:
                items = list(found.get(name, getattr(settings, name)))
                items[index] = part
                part = tuple(items)
            elif name != setting:
                part = _is_on(cls, attributes[setting], part) if attributes[setting].kind is str else part
            found[name] = part
    return found


def _settings_of(cls: type[Optimizer], argument: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes and other fields that an argument sets, with their values."""
    name = cls.__name__
    if argument in LEARNING_RATES:
        yield LEARNING_RATES[0], value
        return
    attributes = {attribute.name: attribute for attribute in cls.schema.attributes}
    if argument in attributes:
        yield argument, value
        return
    matches = [(each, *_item(each.familiar)) for each in attributes.values() if each.familiar]
    matches = [match for match in matches if match[1].removeprefix(_COMPLEMENT) == argument]
    for attribute, familiar, index in matches:
        if index is not None:
            yield attribute.name, _pair(cls, argument, value)[index]
        elif attribute.kind is str:
            yield attribute.name, _choice(cls, attribute, argument, value)
        elif familiar != argument:
            if not _is_number(value):
                raise OptionError(f"{name}: {argument} is {value!r}, but must be a number.")
            yield attribute.name, 1 - value
        else:
            yield attribute.name, value
    if matches:
        return
    if argument not in _field_names(cls):
        names = setting_names(cls)
        raise ArgumentError(
            f"{name} has no setting {argument!r}; its settings are {', '.join(names)}.{suggestion(argument, names)}"
        )
    yield argument, value


def _choice(cls: type[Optimizer], attribute: Attribute, name: str, value: Any) -> str:
    """The mode that a field which is True or False chooses."""
    if not isinstance(value, bool):
        raise OptionError(f"{cls.__name__}: {name} is {value!r}, but must be True or False.")
    return attribute.choices[value]


def _is_on(cls: type[Optimizer], attribute: Attribute, value: Any) -> bool:
    """Return whether a mode is the second of its two choices, for a field that is True or False."""
    if value not in attribute.choices:
        allowed = ", ".join(map(repr, attribute.choices))
        raise OptionError(f"{cls.__name__}: {attribute.name} is {value!r}, but must be one of {allowed}.")
    return bool(attribute.choices.index(value))


def _pair(cls: type[Optimizer], name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise OptionError(f"{cls.__name__}: {name} is {value!r}, but must be a pair of numbers.")
    return value[0], value[1]


def _item(label: str) -> tuple[str, int | None]:
    """Return the field and the index of ``betas[0]``."""
    name, _, index = label.rstrip("]").partition("[")
    return name, int(index) if index else None


def _field_names(settings: type[Optimizer]) -> list[str]:
    return [field.name for field in fields(settings)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def optimizer(
    doc: str,
    rule: Rule,
    *attributes: Attribute,
    states: tuple[State, ...] = (),
    domain: str = ONNXTRAIN_DOMAIN,
    required: bool = False,
    **more: Any,
) -> Callable[[type[S]], type[S]]:
    """Give a dataclass of settings the schema of its operator, and a constructor that takes all names of a setting."""

    def decorate(settings: type[S]) -> type[S]:
        values = {field.name: field.default for field in fields(settings)}

        def complete(attribute: Attribute) -> Attribute:
            if required or attribute.default is not None:
                return attribute
            name, index = _item(settings.field_of(attribute))
            value: Any = values[name]
            if name != attribute.name and attribute.kind is str:
                value = attribute.choices[value]
            return attribute._replace(default=value if index is None else value[index])

        completed = tuple(map(complete, attributes))
        settings.schema = OptimizerSchema(settings.__name__, doc, rule, completed, states, domain, **more)
        _accept_all_names(settings)
        return settings

    return decorate


def added_names(settings: type[Optimizer]) -> dict[str, str]:
    """Return the names of settings that are no fields, with their types."""
    attributes = {attribute.name: attribute for attribute in settings.schema.attributes}
    added = {}
    for name in setting_names(settings):
        if name not in _field_names(settings):
            pair = any(_item(each.familiar) == (name, 0) for each in attributes.values())
            text = name in attributes and attributes[name].kind is str
            flag = any(each.familiar == name and each.kind is str for each in attributes.values())
            added[name] = "tuple[float, float]" if pair else "str" if text else "bool" if flag else "float"
    return added


def _accept_all_names(settings: type[Optimizer]) -> None:
    """Make a constructor accept each setting by all its names."""
    plain = settings.__init__
    added = {name: f"{kind} | None" for name, kind in added_names(settings).items()}

    @functools.wraps(plain)
    def construct(self: Any, *args: Any, **given: Any) -> None:
        plain(self, *args, **as_fields(type(self), given, len(args)))

    signature = inspect.signature(plain)
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in added.items()
    ]
    construct.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *keywords]
    )
    construct.__annotations__ = {**plain.__annotations__, **added}
    settings.__init__ = construct  # type: ignore[method-assign]
