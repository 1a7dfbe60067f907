"""Old name of :mod:`onnxtrain.distributed`, for one more version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxtrain import distributed
from onnxtrain.public_names import public_names
from onnxtrain.renamed import warn_renamed

if TYPE_CHECKING:
    from onnxtrain.distributed import MPI as MPI
    from onnxtrain.distributed import Communicator as Communicator
    from onnxtrain.distributed import Single as Single
    from onnxtrain.distributed import TopK as TopK

__all__ = ["MPI", "Communicator", "Single", "TopK"]

__dir__ = public_names(__name__)


def __getattr__(name: str) -> Any:
    """Return a name of onnxtrain.distributed, with a warning."""
    if name not in __all__:
        raise AttributeError(f"module 'onnxtrain.parallel' has no attribute {name!r}; it is now onnxtrain.distributed.")
    warn_renamed(f"onnxtrain.parallel.{name}", f"onnxtrain.distributed.{name}")
    return getattr(distributed, name)
