"""The training half of ONNX: train, fine-tune and prune ONNX models on stock ONNX Runtime.

``__init__.pyi`` lists the public names. Each is imported at its first use, so that importing the package is cheap.
"""

from onnxtrain.start import catch_early_interrupt, check_onnxruntime

catch_early_interrupt()
check_onnxruntime()

import lazy_loader  # noqa: E402 - Ctrl-C may come meanwhile

from onnxtrain.version import __version__ as __version__  # noqa: E402

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
