"""Sessions of ONNX Runtime with the states of a training in their buffers, and the native library."""
