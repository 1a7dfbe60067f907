"""The training half of ONNX: train, fine-tune and prune ONNX models on stock ONNX Runtime."""
