"""Federated learning with Flower: server and clients train one ONNX model.

The data stay with the clients; weights are exchanged under the names of the file's initializers. Flower is an
optional extra; see docs/federated.md.
"""

from __future__ import annotations

from onnxtrain.errors._internal import public_names
from onnxtrain.interop.flower.client import client_app
from onnxtrain.interop.flower.server import server_app
from onnxtrain.plugins.privacy.differential_privacy import DP

__all__ = ["DP", "client_app", "server_app"]

__dir__ = public_names(__name__)
