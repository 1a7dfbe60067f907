"""Write the files for onnxruntime-web/training 1.18; needs onnxruntime-training-cpu 1.19.2 and PyTorch.

python artifacts.py MODEL FOLDER
"""

import sys

import onnx
from onnxruntime.training import artifacts

model = onnx.load(sys.argv[1])
artifacts.generate_artifacts(
    model,
    requires_grad=[tensor.name for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT],
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory=sys.argv[2],
)
