"""Federated learning with Flower: the server and the clients of a federation train one ONNX model.

The data stay with the clients; weights go to and fro, under the names of the file's own initializers. Flower is an
optional extra; see docs/federated.md.
"""

from __future__ import annotations

from onnxtrain.flower.client import client_app
from onnxtrain.flower.server import server_app
from onnxtrain.public_names import public_names
from onnxtrain.training.differential_privacy import DP

__all__ = ["DP", "client_app", "server_app"]

__dir__ = public_names(__name__)
