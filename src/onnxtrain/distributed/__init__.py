"""Data-parallel training: communicators, MPI, and gradient compression.

>>> from onnxtrain.distributed import Single
>>> import numpy as np
>>> total = np.ones(3)
>>> Single().all_reduce_(total)
>>> total
array([1., 1., 1.])
"""

from __future__ import annotations

from onnxtrain.distributed.communicator import Communicator as Communicator
from onnxtrain.distributed.communicator import Single as Single
from onnxtrain.distributed.compression import TopK as TopK
from onnxtrain.distributed.mpi import MPI as MPI
from onnxtrain.errors._internal import public_names

__all__ = ["MPI", "Communicator", "Single", "TopK"]

__dir__ = public_names(__name__)
