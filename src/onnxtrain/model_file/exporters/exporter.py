"""The record of an exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "made",
    "result",
    "bounded",
    "variable",
    "literal",
    "numbers",
    "of module",
    "computed",
    "eager",
    "folded",
    "statistic",
    "scale",
    "added",
    "joined biases",
]
"""Kinds of tensors that exporters name in ways of their own.

| kind | the tensor |
|---|---|
| made | has a name that no author gave |
| result | is what an operation of the program returns: the exporter computed it |
| bounded | is a scalar behind exp, sigmoid, softplus or tanh that the exporter computed |
| variable | is a variable of the program, by its path |
| literal | is written in the program's code |
| numbers | is made of numbers: it is no parameter |
| of module | is computed from a module's tensor |
| computed | is computed from others by more than another layout |
| eager | is computed outside of the exported function |
| folded | is the weight or bias of a convolution into which the exporter folded batch normalization |
| statistic | is computed from running statistics alone |
| scale | is a scale of batch normalization divided by the deviation |
| added | is a bias, or the shift of a folded batch normalization |
| joined biases | is made of the biases of a recurrent layer, and of zeros where it has one |
"""


@dataclass(frozen=True)
class Exporter:
    """Marks of the files of an exporter."""

    name: str
    names: Mapping[Kind, str] = field(default_factory=dict)
