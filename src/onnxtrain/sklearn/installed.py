"""The classes of scikit-learn that the estimators build on, or what says that it is not installed."""

from __future__ import annotations

from typing import Any, Self

from onnxtrain.errors import OptionError


class NotInstalled:
    """Stands for scikit-learn's base class where there is none."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Say what is missing."""
        raise OptionError(
            f"onnxtrain.sklearn.{cls.__name__} needs scikit-learn 1.6 or newer, which is not installed; install it "
            "with pip install 'onnxtrain[sklearn]'."
        )


class Mixin:
    """Stands for those of its classes that are mixed in."""


try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
except ImportError:  # the estimators can be imported without scikit-learn, and say so when they are made
    BaseEstimator, ClassifierMixin, RegressorMixin = NotInstalled, Mixin, Mixin

__all__ = ["BaseEstimator", "ClassifierMixin", "RegressorMixin"]
