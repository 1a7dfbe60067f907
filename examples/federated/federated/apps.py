"""The server and the clients of a federation that trains an ONNX model.

The environment variable FEDERATION names a folder with model.onnx, test.npz and the clients' data, part0.npz and so on;
a real client would have its own data, and a copy of the model. `python examples/federated/mnist.py` makes such a folder
and runs the federation in processes of its own.
"""

import os
from pathlib import Path

from flwr.serverapp.strategy import FedAvg

import onnxtrain.interop.flower

folder = Path(os.environ["FEDERATION"])
rounds = int(os.environ.get("ROUNDS", "6"))
common = {"loss": "softmax_cross_entropy", "threads": 1}


def data(context):
    """The data of this client: its node was started with --node-config 'partition-id=1'."""
    return folder / f"part{context.node_config['partition-id']}.npz"


client = onnxtrain.flower.client_app(
    folder / "model.onnx", data, optimizer="adam(lr=1e-3)", epochs=1, batch_size=64, **common
)

server = onnxtrain.flower.server_app(
    folder / "model.onnx",
    FedAvg(fraction_evaluate=0.0),
    save=folder / "federated.onnx",
    rounds=rounds,
    validation=folder / "test.npz",
    metrics="accuracy",
    history=folder / "history.json",
    timeout=float(os.environ.get("TIMEOUT", "3600")),
    **common,
)
