"""onnxtrain inside other systems: scikit-learn, Ray, Flower, PyTorch, the Hub, the ONNX Backend API, browsers."""
