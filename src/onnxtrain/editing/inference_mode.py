"""Set a model that was exported in training mode to inference mode."""

import onnx

from onnxtrain.editing.working import Model, Working
from onnxtrain.editing.working_copy.training_modes import set_inference
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.model_file.validity import refuses_invalid


@checks_arguments
@refuses_invalid()
def inference_mode(model: Model) -> onnx.ModelProto:
    """Return a model whose dropout drops nothing and whose batch normalization uses its running statistics.

    This is ``model.eval()`` of PyTorch, for a file: :meth:`onnxtrain.Trainer.save` keeps the modes of the file.

    Args:
        model: A path or a loaded model; it is not changed.

    Returns:
        The model with unchanged weights and names; an input that only sets the mode is left out.

    Raises:
        ModelError: The model cannot be read.

    Example:
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n, 2] x) => (float[n, 2] y) <bool training = {1}> { y = Dropout(x, , training) }''')
        >>> inference_mode(model).graph.node[0].input
        ['x']
    """
    working = Working(model)
    set_inference(working.model)
    return working.finish()
