"""Names as people write them: the nearest right one for a misspelt one, and those of other tools."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, overload

from onnxtrain.errors import ArgumentError

T = TypeVar("T", bound=Callable[..., Any])

_ALIKE = 0.6
"""Similarity from which a word is suggested, of :mod:`difflib`'s ratio."""

_LONGEST = 100
"""Characters of a word that is compared with others, which takes time with their square."""

_TYPES = "a model in float16 or bfloat16 trains as it is, in float32; leave it out, and give a model of that type"
_SCALING = "gradients are float32 whatever the type of the model, so that no loss is scaled; leave it out"
_ROUNDING = "give precision=onnxtrain.Precision(master_weights=False), which rounds bfloat16 weights stochastically"

ELSEWHERE = {
    **dict.fromkeys(("fp16", "bf16", "half", "amp", "use_amp", "autocast", "mixed_precision"), _TYPES),
    **dict.fromkeys(("loss_scale", "loss_scaling", "loss_scaler", "scaler", "grad_scaler"), _SCALING),
    **dict.fromkeys(("stochastic_rounding", "bf16_stochastic_round"), _ROUNDING),
    **dict.fromkeys(("lr", "learning_rate"), "it is a setting of the optimizer: optimizer='adam(lr=0.001)'"),
    **dict.fromkeys(("device", "gpu"), "choose a device by runtime=onnxtrain.RuntimeOptions(providers=...)"),
}
"""Options of other tools that onnxtrain does not have, with the replacement."""

ALIASES: Final = {
    "cross_entropy": "softmax_cross_entropy",
    "categorical_crossentropy": "softmax_cross_entropy",
    "sparse_categorical_crossentropy": "softmax_cross_entropy",
    "bce": "binary_cross_entropy",
    "bce_with_logits": "binary_cross_entropy",
    "binary_crossentropy": "binary_cross_entropy",
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
    "smooth_l1": "huber",
    "mape": "mean_absolute_percentage_error",
    "msle": "mean_squared_logarithmic_error",
    "kld": "kl_divergence",
    "kl_div": "kl_divergence",
    "pinball": "quantile",
    "categorical_focal_crossentropy": "focal",
    "binary_focal_crossentropy": "binary_focal",
    "sigmoid_focal_loss": "binary_focal",
    "dice_loss": "dice",
    "ctc_loss": "ctc",
    "rnnt_loss": "transducer",
    "triplet_margin_loss": "triplet",
    "supervised_contrastive": "info_nce",
    "contrastive": "info_nce",
}
"""Names of losses (which are metrics, too) in other tools, mapped to the names here."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most like the given one; ``None`` where none is alike.

    >>> nearest("bach_size", ["batch_size", "epochs"]), nearest("verbose", ["batch_size", "epochs"])
    ('batch_size', None)
    """
    import difflib  # only a mistake needs it

    if len(word) > _LONGEST:
        return None
    plain = {other.lower().replace("-", "_"): other for other in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=_ALIKE)
    return plain[found[0]] if found else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return " The nearest is 'batch_size'." for a misspelt word, or an empty text where no word is alike."""
    found = nearest(word, known)
    return "" if found is None else f" The nearest is {found!r}."


@overload
def checks_arguments(target: T) -> T: ...


@overload
def checks_arguments(*, keywords: Iterable[str] = ()) -> Callable[[T], T]: ...


def checks_arguments(target: Any = None, *, keywords: Iterable[str] = ()) -> Any:
    """Make a function or class suggest the nearest argument when it is called with an unknown one; a decorator.

    The signature does not change. A function with ``**options`` is returned unchanged unless ``keywords`` lists their
    names.

    Args:
        target: The function or class.
        keywords: Names that a parameter ``**options`` takes.

    Raises:
        ArgumentError: The function has no such argument.

    Example:
        >>> @checks_arguments
        ... def scaled(x, factor=1.0):
        ...     return x * factor
        >>> scaled(2, facter=3)
        Traceback (most recent call last):
            ...
        onnxtrain.errors.ArgumentError: scaled has no argument 'facter'; the nearest is 'factor'.
    """
    if target is None:
        return functools.partial(checks_arguments, keywords=tuple(keywords))
    if isinstance(target, type):
        target.__init__ = _checked(target.__init__, target.__name__, keywords)  # type: ignore[misc]
        return target
    return _checked(target, target.__name__, keywords)


def _checked(function: T, label: str, keywords: Iterable[str]) -> T:
    code = getattr(inspect.unwrap(function), "__code__", None)
    keywords = tuple(keywords)
    if code is None or (code.co_flags & inspect.CO_VARKEYWORDS and not keywords):
        return function
    names = (*code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount], *keywords)
    known = frozenset(names) - {"self", "cls"}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not known.issuperset(kwargs):
            raise ArgumentError(_unknown(next(name for name in kwargs if name not in known), label, names))
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _unknown(name: str, label: str, names: Iterable[str]) -> str:
    """Return the error message for an unknown argument."""
    known = [other for other in names if other not in ("self", "cls")]
    if name in ELSEWHERE:
        return f"There is no option {name!r}: {ELSEWHERE[name]}."
    found = nearest(name, known)
    if found is not None:
        return f"{label} has no argument {name!r}; the nearest is {found!r}."
    return f"{label} has no argument {name!r}; it has {', '.join(known) or 'none'}."
