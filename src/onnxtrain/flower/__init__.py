"""Federated learning with Flower: server and clients train one ONNX model.

The data stay with the clients; weights are exchanged under the names of the file's initializers. Flower is an
optional extra; see docs/federated.md.
"""

from __future__ import annotations

from onnxtrain._internal import public_names
from onnxtrain.flower.client import client_app
from onnxtrain.flower.server import server_app
from onnxtrain.training.differential_privacy import DP

__all__ = ["DP", "client_app", "server_app"]

__dir__ = public_names(__name__)
