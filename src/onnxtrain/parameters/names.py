"""Names of initializers: classify them, and recover the module path of a weight whose name lacks it.

PyTorch's exporters write the weight of a ``Linear`` as ``val_8`` or ``onnx::MatMul_26``. The node that reads it knows
its module: by metadata (the newer exporter), or by its own name, ``/layer.1/head/MatMul`` (the older one).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

import onnx_ir as ir

from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.domains import REPLACED_WEIGHT
from onnxtrain.operators.call_text import read_literal
from onnxtrain.parameters.program import CALL
from onnxtrain.parameters.readers import Functions, arrivals, role_of


class NameOrigin(Enum):
    """Author of an initializer's name."""

    MODULE = "a module path, as in a state dict"
    WORD = "a word"
    EXPORTER = "made by an exporter"


_VARIABLE = r"/(ReadVariableOp|read)(_\d+)?$"  # of TensorFlow

_MADE = (
    r"^/"  # the TorchScript exporter's paths, and those of onnxruntime-genai
    r"|^onnx::|^\d+$"  # its folded tensors, and its numbers of old
    # torch.fx; torch.export puts the path of the module whose code has a literal before its name
    r"|^(c_)?_?(val|tensor|scalar_tensor(_default)?|clone|full|arange)(_\d+)*$"
    r"|(^|\.)(c_)?_?(lifted_tensor|tensor_constant)_?\d*$"
    r"|(^|[/._])const(ant)?([._]?\d+)*$|const_fold_opt|^constantfolding/|__\d+$|/[xy]$"  # TensorFlow, Paddle
    r"|(^|/)constants?/"
    r"|(^|/)(zeros|ones|fill|full)(_like)?(_\d+)*$"
    r"|cst\d*$|^(unity|unit_float_tensor|negate|minus_one|half_scalar|clf_length|prod_operand|const_[np]\d+"  # skl2onnx
    r"|(inverted_)?n_classes(_minus_one)?)\d*$"
    r"|(^|\.)tmp(_\d+)*$|^p2o\.|^(eager_tmp|generated_tensor)_\d+$|^(helper|auto)\.[a-z_]+\.\d+$"  # Paddle
    r"|_output_\d+$"
)

_RESULT = (
    r"^_?(abs|add|addmm|alias|amax|amin|arange|argmax|argmin|argsort|asin|atan|atan2|bartlett_window"
    r"|blackman_window|bmm|broadcast_to|cat|ceil|chunk|clamp|clamp_max|clamp_min|clone|constant_pad_nd"
    r"|contiguous|copy|cos|cosh|cumprod|cumsum|detach|detach_|diag|diag_embed|diagonal|diff|div|einsum"
    r"|embedding|empty_like|eq|erf|exp|exp2|expand|expand_as|expm1|eye|fill|flatten|flip|floor|floor_divide"
    r"|fmod|full_like|ge|getitem|gt|hamming_window|hann_window|hstack|index|index_put|index_select"
    r"|kaiser_window|layer_norm|le|lift_fresh_copy|linalg_norm|linalg_vector_norm|linear|linspace|log|log10"
    r"|log1p|log2|logical_and|logical_not|logical_or|logspace|lt|masked_fill|matmul|max|maximum|mean|meshgrid"
    r"|min|minimum|mm|movedim|mul|ne|neg|ones|ones_like|outer|permute|pow|prod|reciprocal|relu|remainder|repeat"
    r"|repeat_interleave|reshape|roll|rot90|round|rsqrt|rsub|scalar_tensor|scatter|select|sigmoid|sign|sin|sinc"
    r"|sinh|slice|slice_scatter|softmax|softplus|sort|split|sqrt|square|squeeze|stack|std|sub|sum|t|tan|tanh"
    r"|tile|to|topk|transpose|tril|triu|trunc|type_as|unbind|unflatten|unfold|unsafe_view|unsqueeze|view|vstack"
    r"|where|zeros|zeros_like"
    r"|(fft|special)_\w+)(_\d+)?$"
)
"""Names of operation results in torch.fx: the exporter computed an initializer with such a name."""

_MODULE = r"^\w+(\.\w+)+$"

_LITERAL = (
    r"^/.*Constant(_\d+)?_output_\d+$"
    r"|^(c_)?_?tensor_?\d+$"
    r"|(^|\.)(c_)?_?(lifted_tensor|tensor_constant)_?\d+$"
    r"|^(arange|eye|full|(lin|log)space|(bartlett|blackman|hamming|hann|kaiser)_window)(_\d+)?$"  # folded, of numbers
    r"|(^|/)constants/"
    r"|/([xy]|Const(_\d+)?)(:0)?$"  # TensorFlow
)

_TABLE = (
    r"^(\w+_)?(anchors?|anchor_(points|grid|boxes|priors)|prior_boxes|mesh_?grid)(_\d+)?$"
    r"|^(\w+_)?(cos|sin|cosine|sine)s?(_?(cache|cached|table|emb|embed|embedding|pos))?(_\d+)?$"
    r"|^(\w+_)?inv_(freqs?|timescales?)(_\d+)?$"
    r"|^(\w+_)?freqs_(cis|cos|sin|complex)(_\d+)?$"
    r"|^(\w+_)?(alibi(_slopes|_bias)?|coords_table)$"
)

_TRANSFORM = (
    r"^((\w+_)?dft(_(kernel|basis|matrix|pairs))?|(\w+_)?mel_?(basis|filters?|filter_?banks?|matrix)"
    r"|wcos|wsin)(_\d+)?$"  # nnAudio
)

_MASK = r"^(\w+_)?masks?(_\d+)?$"

_BUFFERS = (
    r"^(?!(\w+_)?log_(?!zero_guard))(\w+_)?(eps|epsilon|mean|std|var|variance|masked_bias|embed_scale|norm_factor|scaling|softmax_scale|inv_scale"
    r"|scale_factor|guard|guard_value|zero_point|momentum|num|count|(min|max|fill|pad|padding)(_val|_value)?)(_\d+)?$"
)

_STATISTIC = r"^(running|moving)_(mean|var|variance|std)(_\d+)?$"

_FOLDED_STATISTIC = r"(^|/)batchnorm/Rsqrt(_\d+)?(:0)?$"
"""The name that TensorFlow gives to 1 / sqrt(variance + epsilon) of a batch normalization without a scale."""

_FOLDED_SCALE = r"(^|/)batchnorm/mul(_\d+)?(:0)?$"
"""The name that TensorFlow gives to the scale of a batch normalization times that."""

_PREPROCESSING = r"^(?!(\w+_)?log_)(\w+_)?(means?|std|stds|stddev|var|variance|offset|normalizer|scaler)(_\d+)?$"

_COMPUTED = (
    r"^p2o\.pd_op\.(abs|add|divide|einsum|elementwise_pow|exp|log|log1p|matmul|max|maximum|mean|min|minimum|multiply|pow"
    r"|prod|reciprocal|relu|rsqrt|scale|sigmoid|softmax|softplus|sqrt|square|subtract|sum|tanh)_?\.\d+\.\d+$"
    r"|/(Abs|Add(V2)?|Einsum|Exp|Log(1p)?|MatMul|Max(imum)?|Mean|Min(imum)?|Mul|Neg|Pow|Prod|RealDiv|Reciprocal|Relu"
    r"|Rsqrt|Sigmoid|Softmax|Softplus|Sqrt|Square|Sub|Sum|Tanh|add|l2_normalize|matmul|mul|pow|sub|truediv)(_\d+)?:0$"
)
"""Names of values by operators that give more than another layout of one tensor: of Paddle, and of TensorFlow."""

_LEARNED = (
    r"^(\w+_)?(logit_scale|logit_bias|temperature|temp|tau|alpha|beta|gamma|slope|rezero|resweight|gate|gain)(_?\d+)?$"
)


def origin_of(name: str) -> NameOrigin:
    """Classify the name of an initializer: a module path, a plain word, or an exporter's.

    Example:
        >>> [origin_of(name).name for name in ("text.logit_scale", "logit_scale", "onnx::Mul_123")]
        ['MODULE', 'WORD', 'EXPORTER']
    """
    bare = name.removesuffix(":0")
    if re.search(_VARIABLE, bare):
        return NameOrigin.MODULE
    if re.search(_MADE, bare, re.IGNORECASE) or is_result(bare):
        return NameOrigin.EXPORTER
    return NameOrigin.MODULE if re.match(_MODULE, bare) else NameOrigin.WORD


def origin(value: ir.Value) -> NameOrigin:
    """Classify the name of an initializer, which for TorchScript's exporter is never the result of an operation."""
    name = value.name or ""
    found = origin_of(name)
    is_word = found is NameOrigin.EXPORTER and is_result(name)
    return (
        NameOrigin.WORD if is_word and any((node.name or "").startswith("/") for node in value.consumers()) else found
    )


def last_word(name: str) -> str:
    """Return the last part of a path in lower case: the tensor's name within its module."""
    bare = re.sub(r"(/(ReadVariableOp|read)(_\d+)?)?(:0)?$", "", name)
    return re.split(r"[./:]", bare)[-1].lower()


def is_literal(name: str) -> bool:
    """Return whether an exporter gives this name to a literal in the code, which was not trained."""
    return re.search(_LITERAL, name) is not None


def is_put_together(name: str) -> bool:
    """Return whether tf2onnx gives this name to the biases of a recurrent layer, of which the program has one or none.

    Example:
        >>> [is_put_together(name) for name in ("B0__32", "B__912", "W0__30")]
        [True, True, False]
    """
    return re.fullmatch(r"B\d*__\d+", name) is not None


def is_computed_parameter(name: str) -> bool:
    """Return whether an exporter gives this name to a tensor computed from a module's, not to a literal.

    Example:
        >>> [is_computed_parameter(name) for name in ("onnx::Mul_32", "helper.unsqueeze.0", "helper.constant.0")]
        [True, True, False]
    """
    return re.match(r"^onnx::|^helper\.(?!constant)", name) is not None


def is_table(name: str) -> bool:
    """Return whether a tensor has the name of a position table: cosines, sines, inverse frequencies."""
    return re.match(_TABLE, last_word(name)) is not None


def is_transform(name: str) -> bool:
    """Return whether a tensor has the name of a spectrogram's matrix: a Fourier transform, mel filters."""
    return re.match(_TRANSFORM, last_word(name)) is not None


def is_mask(name: str) -> bool:
    """Return whether a tensor has the name of a mask."""
    return re.match(_MASK, last_word(name)) is not None


def is_buffer(name: str) -> bool:
    """Return whether a scalar has the name of a module's buffer: an epsilon, a scale of attention."""
    return re.match(_BUFFERS, last_word(name)) is not None


def is_result(name: str) -> bool:
    """Return whether PyTorch's newer exporter gives this name to a tensor that it computes."""
    return re.match(_RESULT, name) is not None


def is_statistic_name(name: str) -> bool:
    """Return whether a tensor has the name of a running statistic, or of what TensorFlow computes from one.

    Example:
        >>> [is_statistic_name(name) for name in ("bn.running_mean", "bn_1/batchnorm/Rsqrt:0", "bn_1/batchnorm/mul:0")]
        [True, True, False]
    """
    return re.match(_STATISTIC, last_word(name)) is not None or re.search(_FOLDED_STATISTIC, name) is not None


def is_variable(name: str) -> bool:
    """Return whether TensorFlow gives this name to a variable of the program that is read."""
    return re.search(_VARIABLE, name.removesuffix(":0")) is not None


def is_added_variable(name: str) -> bool:
    """Return whether TensorFlow gives this name to a bias, or to the folded shift of a batch normalization.

    Example:
        >>> names = ("dense/BiasAdd/ReadVariableOp:0", "bn_1/batchnorm/sub:0", "dense/Cast/ReadVariableOp:0")
        >>> [is_added_variable(name) for name in names]
        [True, True, False]
    """
    if re.search(r"(^|/)batchnorm/sub(_\d+)?(:0)?$", name):
        return True
    return is_variable(name) and re.search(r"(^|/)(bias_?)?add(_\d+)?/", name, re.IGNORECASE) is not None


def is_folded_scale(name: str) -> bool:
    """Return whether TensorFlow gives this name to the scale of a batch normalization divided by the deviation."""
    return re.search(_FOLDED_SCALE, name) is not None


def is_computed(name: str) -> bool:
    """Return whether paddle2onnx or tf2onnx gives this name to a value that it computed and stored.

    PaddlePaddle calls results of eager operators, such as the weight of a weight norm, ``eager_tmp_``.

    Example:
        >>> names = ("p2o.pd_op.exp.0.0", "p2o.pd_op.reshape.0.0", "gate_1/Sigmoid_1:0", "a/Reshape:0", "eager_tmp_1")
        >>> [is_computed(name) for name in names]
        [True, False, True, False, True]
    """
    return is_eager_result(name) or (re.search(_COMPUTED, name) is not None and "batchnorm/" not in name)


def is_eager_result(name: str) -> bool:
    """Return whether PaddlePaddle gives this name to the result of an operator outside of the exported function."""
    return re.match(r"^eager_tmp_\d+$", name) is not None


def is_program_tensor(name: str) -> bool:
    """Return whether PaddlePaddle gives this name to a tensor of numbers, or jax2onnx to zeros: it is no parameter."""
    return re.match(r"^(generated_tensor|dot_bias)_\d+$", name) is not None


def is_preprocessing(name: str) -> bool:
    """Return whether a tensor has the name of a mean or deviation of preprocessing."""
    return re.match(_PREPROCESSING, last_word(name)) is not None


def is_learned(name: str) -> bool:
    """Return whether a scalar has the name of a trainable one: a temperature, a slope, a gate."""
    return re.match(_LEARNED, last_word(name)) is not None


_SCOPES = "pkg.torch.onnx.name_scopes"

_KEPT = (_SCOPES, CALL, REPLACED_WEIGHT)

_STOPPING = ("%detach", "aten.embedding.")
"""Parts of calls that stop gradients."""

_BIASES = {("Gemm", 2), ("Conv", 2), ("ConvTranspose", 2), ("Add", 0), ("Add", 1)}


def module_paths(value: ir.Value, functions: Functions | None = None) -> tuple[str, ...]:
    """Return the module paths of an initializer in the exported program; none where its name in the file is its path.

    An initializer of several modules, merged by an exporter or shared by the program, has the paths of all.

    Args:
        value: An initializer.
        functions: Model-local functions.

    Example:
        >>> weight, x = ir.Value(name="onnx::MatMul_26"), ir.Value(name="x")
        >>> node = ir.Node("", "MatMul", [x, weight], name="/encoder/layer.1/query/MatMul")
        >>> module_paths(weight)
        ('encoder.layer.1.query.weight',)
    """
    name = value.name or ""
    is_made = origin_of(name) is NameOrigin.EXPORTER
    word = "" if is_made else name.rpartition(".")[2]
    found: dict[str, None] = {}
    modules: set[str] = set()
    for node, index in arrivals(value, functions):
        module = module_of(node.name or "", node.metadata_props)
        if module:
            modules.add(module)
            if is_made:
                role = "bias" if (node.op_type, index) in _BIASES else role_of(node.op_type, index) or "weight"
            else:
                role = role_in_module(node.op_type, index) or word
            found[f"{module}.{role}"] = None
    if not is_made and ("." not in name or len(modules) < 2):
        return ()
    return tuple(path for path in found if path != name)


_IN_MODULES = {"scale": "weight", "bias": "bias", "running mean": "running_mean", "running variance": "running_var"}


def role_in_module(operator: str, index: int) -> str:
    """Return PyTorch's name of the parameter at an input slot of an operator; "" where it has none.

    Example:
        >>> role_in_module("BatchNormalization", 4), role_in_module("Gemm", 2), role_in_module("Mul", 1)
        ('running_var', 'bias', '')
    """
    role = _IN_MODULES.get(role_of(operator, index), "")
    return role or ("bias" if (operator, index) in _BIASES and operator != "Add" else "")


def forget_traces(model: ir.Model) -> None:
    """Remove node metadata that nothing reads from a working copy, in place.

    PyTorch's exporter writes the source lines of each node, which are most of the bytes of a graph.
    """
    for part in (model.graph, *model.functions.values()):
        for node in all_nodes(part):
            if node.metadata_props:
                kept = {key: node.metadata_props[key] for key in _KEPT if key in node.metadata_props}
                if node.op_type not in ("Mul", "Add") and not any(part in kept.get(CALL, "") for part in _STOPPING):
                    kept.pop(CALL, None)
                node.metadata_props.clear()
                node.metadata_props.update(kept)


def node_names(value: ir.Value, functions: Functions | None = None) -> tuple[str, ...]:
    """Return the names of the nodes that read an initializer, as they are and as module paths."""
    names = [node.name or "" for node, _ in arrivals(value, functions)]
    return tuple(dict.fromkeys(other for name in names if name for other in (name, name.strip("/").replace("/", "."))))


def module_of(name: str, metadata: Mapping[str, str]) -> str:
    """Return the module path of a node by its name and metadata; "" where it is not known."""
    scopes = metadata.get(_SCOPES)
    if scopes is not None:
        try:
            listed = read_literal(scopes)
        except ValueError:
            return ""
        named = [scope for scope in listed if isinstance(scope, str)] if isinstance(listed, list) else []
        return named[-2] if len(named) > 1 else ""
    path: list[str] = []
    for part in name.strip("/").split("/")[:-1] if name.startswith("/") else ():
        if path and part.startswith(f"{path[-1]}."):  # /body/body.2: a call of a Sequential
            path.pop()
        path.append(part)
    return ".".join(path)
