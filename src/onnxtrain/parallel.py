"""Old name of :mod:`onnxtrain.distributed`, for one more version."""

from __future__ import annotations

from onnxtrain.distributed import MPI as MPI
from onnxtrain.distributed import Communicator as Communicator
from onnxtrain.distributed import Single as Single
from onnxtrain.distributed import TopK as TopK
from onnxtrain.public_names import public_names

__all__ = ["MPI", "Communicator", "Single", "TopK"]

__dir__ = public_names(__name__)
