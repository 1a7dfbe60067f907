"""Remove structures from a model: channels, heads and hidden units that masks set to zero."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import onnx

from onnxtrain.editing.working import Model, Working
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.value import dimensions
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.plugins.structures.axes import CHANGED_OUTPUT, Structures, find_structures

_SHOWN = 3
"""Structures that a warning describes."""


class ShrinkWarning(UserWarning):
    """Some structures are masked, but stay in the model; the message says why."""


@checks_arguments
@refuses_invalid()
def shrink(
    model: Model, masks: Mapping[str, np.ndarray] | None = None, *, change_outputs: bool = False
) -> onnx.ModelProto:
    """Remove the channels, heads and hidden units that are masked entirely; the model becomes smaller and stays dense.

    A structure owns entries of several tensors: an output channel of a convolution also a bias, the parameters of a
    normalization and a column of the next layer. It is removed if each mask that covers one of its entries is false at
    all of them. The result computes what the model computes with all parameters of these structures at zero; without
    ``masks``, the same as the model.

    Args:
        model: A path or a loaded model; it is not changed.
        masks: For each masked parameter, a boolean array of its shape, false at what goes. By default the zeros of the
            file are the masks, and a structure goes if all its weights, biases and scales are zero.
        change_outputs: Also remove structures that are part of an output of the model, whose shape then changes.

    Returns:
        The smaller model, which runs wherever the model ran.

    Raises:
        ModelError: The model cannot be read.
        OptionError: A mask fits no parameter, no structure is masked entirely, an output of the model would change its
            shape, or nothing of a layer would remain.

    Warns:
        ShrinkWarning: Masked structures stay.

    Example:
        >>> import onnxtrain
        >>> model = onnxtrain.examples.mlp((4, 16, 3))
        >>> mask = np.ones((16, 4), bool)
        >>> mask[5:] = False
        >>> small = shrink(model, {"layer1.weight": mask})
        >>> {tensor.name: tuple(tensor.dims) for tensor in small.graph.initializer if len(tensor.dims) == 2}
        {'layer1.weight': (5, 4), 'layer2.weight': (3, 5)}
    """
    working = Working(model)
    structures = find_structures(working.model, change_outputs=change_outputs)
    given = _zeros(structures) if masks is None else _checked(working, masks)
    masked = structures.under(given)
    free = [root for root in masked.tolist() if root not in structures.locked]
    held = [root for root in masked.tolist() if root in structures.locked]
    stays = _staying(structures, held, refused=masks is not None)
    if not free:
        raise OptionError(
            "No structure can be removed: none that may go is "
            + ("zero" if masks is None else "masked")
            + " in all of its entries. Prune whole channels, heads or hidden units."
            + (f" Masked structures that stay: {stays}." if stays else "")
        )
    structures.remove(free)
    if stays:
        warnings.warn(f"Masked structures stay in the model: {stays}.", ShrinkWarning, stacklevel=4)
    return working.finish()


def _zeros(structures: Structures) -> dict[str, np.ndarray]:
    """Return masks of the zeros of all weights with structures."""
    found: dict[str, np.ndarray] = {}
    points = structures.zero_points
    for value, _ in structures.parameters():
        if structures.is_weight(value) and value.const_value is not None:
            array = np.asarray(value.const_value.numpy())
            found[str(value.name)] = np.asarray(array != points.get(value, 0))
    return found


def _checked(working: Working, masks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    if not isinstance(masks, Mapping):
        raise OptionError(f"masks is a {type(masks).__name__}; it needs a mapping of parameters' names to arrays.")
    found: dict[str, np.ndarray] = {}
    for name, mask in masks.items():
        value = working.graph.initializers.get(name)
        if value is None:
            raise OptionError(f"There is a mask for {name!r}, which is not an initializer of the model.")
        array = np.asarray(mask)
        if array.dtype != bool or array.shape != dimensions(value):
            raise OptionError(
                f"The mask of {name!r} is {array.dtype} of shape {array.shape}; it needs to be bool of shape "
                f"{dimensions(value)}."
            )
        found[name] = array
    return found


def _staying(structures: Structures, held: list[int], *, refused: bool) -> str:
    """Describe the structures that are masked and stay."""
    reasons: dict[str, int] = {}
    for root in held:
        reason = structures.locked[root]
        if refused and reason.endswith(CHANGED_OUTPUT):
            raise OptionError(f"A masked structure stays: {reason}; allow it with change_outputs=True.")
        reasons[reason] = reasons.get(reason, 0) + 1
    shown = "; ".join(f"{count} because {reason}" for reason, count in list(reasons.items())[:_SHOWN])
    more = f"; and {len(reasons) - _SHOWN} further reasons" if len(reasons) > _SHOWN else ""
    return shown + more
