"""The optimizers' native kernels on arrays in memory, in place, without ONNX Runtime.

Each optimizer has a function: :func:`adagrad_`, :func:`adam_`, :func:`momentum_`, :func:`ssgd_` and so on,
under the name of the operator in lower case. Each updates lists of parameters and their states in place: NumPy arrays,
or tensors of any library with DLPack support, such as PyTorch. States come in the operator's order: for
Adam all first moments ``V``, then all second moments ``H``. Attributes are rounded to float32, as a model file stores
them, so that a function here and the operator in a model give the same bits; the learning rate is float64.

    >>> import numpy as np
    >>> x, g, h = np.array([1.0]), np.array([-1.0]), np.array([3.0])
    >>> adagrad_([x], [g], [h], learning_rate=0.5, step=0, epsilon=0.0)
    >>> x, h
    (array([1.25]), array([4.]))
    >>> x, g, v, h = np.array([1.0]), np.array([2.0]), np.array([0.0]), np.array([0.0])
    >>> adam_([x], [g], [v, h], learning_rate=0.5, step=1, alpha=0.5, beta=0.75, epsilon=0.0)
    >>> x, v, h
    (array([0.5]), array([1.]), array([1.]))
    >>> x, g, v = np.array([1.0]), np.array([2.0]), np.array([4.0])
    >>> momentum_([x], [g], [v], learning_rate=0.25, step=1, alpha=0.5, beta=1.0)
    >>> x, v
    (array([0.]), array([4.]))
    >>> x, g = np.array([3.0, 1.0]), np.array([1.0, 1.0])
    >>> ssgd_([x], [g], learning_rate=0.5, measure="p-norm", p=1.0)  # s = |x| / mean(|x|) = 1.5, 0.5
    >>> x
    array([2.25, 0.75])

The functions are generated from the operators' schemas, so ``help`` shows their reference pages. :class:`Bound` checks
arrays once for many steps; each function also remembers arrays that it has checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from onnxtrain.errors._internal import public_names
from onnxtrain.operators.registry import OPTIMIZERS, Entry
from onnxtrain.runtime.bound import Bound, bound, defaults

if TYPE_CHECKING:

    class Update(Protocol):
        """A function that takes one step of an optimizer in place."""

        def __call__(
            self,
            parameters: Sequence[Any],
            gradients: Sequence[Any],
            states: Sequence[Any] = (),
            *,
            learning_rate: float,
            step: int = ...,
            threads: int = 1,
            **attributes: float | str,
        ) -> None: ...

    def __getattr__(name: str) -> Update: ...


def _function(entry: Entry) -> Callable[..., None]:
    """Create the function of an optimizer, with signature and docstring from its schema."""

    def update(
        parameters: Sequence[Any], gradients: Sequence[Any], states: Sequence[Any] = (), **arguments: Any
    ) -> None:
        bound(parameters, gradients, states).update(entry, **arguments)

    schema, values = entry.schema, defaults(entry)
    keyword, annotation = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    always = any(state.used(values) for state in schema.states)
    lists = [inspect.Parameter(name, annotation, annotation=Sequence[Any]) for name in ("parameters", "gradients")]
    lists.append(
        inspect.Parameter(
            "states", annotation, annotation=Sequence[Any], default=inspect.Parameter.empty if always else ()
        )
    )
    own = [inspect.Parameter("learning_rate", keyword, annotation=float)]
    own += [inspect.Parameter("step", keyword, annotation=int)] if schema.counted else []
    own += [
        inspect.Parameter(attribute.name, keyword, annotation=attribute.kind, default=values[attribute.name])
        for attribute in schema.attributes
    ]
    own.append(inspect.Parameter("threads", keyword, annotation=int, default=1))
    update.__name__ = update.__qualname__ = f"{schema.name.lower()}_"
    update.__signature__ = inspect.Signature([*lists, *own])  # type: ignore[attr-defined]
    update.__doc__ = _docstring(entry)
    return update


def _docstring(entry: Entry) -> str:
    schema = entry.schema
    letters = " then ".join(f"``{state.name}`` of every parameter" for state in schema.states) or "none"
    count = f"        step: T; {schema.first_count} in the first step.\n" if schema.counted else ""
    attributes = "".join(f"        {attribute.name}: {attribute.doc}\n" for attribute in schema.attributes)
    return f"""Update ``parameters`` and ``states`` in place by one step of {schema.name}.

    {schema.doc} The reference page of the operator has the update rule; :class:`onnxtrain.{schema.name}` says how it
    compares with PyTorch's.

    Args:
        parameters: X, float32 or float64 arrays of any shape.
        gradients: G, of the parameters' types and shapes.
        states: {letters}.
        learning_rate: R.
{count}{attributes}        threads: How many threads share the work; the result does not depend on it.

    Raises:
        OperatorError: An array cannot be used (see :class:`Bound`), or an argument is outside its range.
    """


_FUNCTIONS = {f"{name.lower()}_": _function(entry) for name, entry in OPTIMIZERS.items()}
globals().update(_FUNCTIONS)
__all__ = ["Bound", *_FUNCTIONS]

__dir__ = public_names(__name__)
