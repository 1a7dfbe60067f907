"""Classify initializers by name: a module's parameter, a known buffer, or an exporter's constant."""

from __future__ import annotations

import re
from enum import Enum


class Origin(Enum):
    """Origins of a name."""

    MODULE = "a path of modules, as of a state dict"
    WORD = "a word"
    EXPORTER = "made by an exporter"


_VARIABLE = r"/(ReadVariableOp|read)(_\d+)?$"  # of TensorFlow

_MADE = (
    r"^/"  # the TorchScript exporter's paths, and those of onnxruntime-genai
    r"|^onnx::|^\d+$"  # its folded tensors, and its numbers of old
    # torch.fx
    r"|^(c_)?_?(val|tensor|scalar_tensor(_default)?|lifted_tensor|tensor_constant|clone|full|arange)(_\d+)*$"
    r"|(^|[/._])const(ant)?([._]?\d+)*$|const_fold_opt|^constantfolding/|__\d+$|/[xy]$"  # TensorFlow, Paddle
    r"|(^|/)constants?/"
    r"|(^|/)(zeros|ones|fill|full)(_like)?(_\d+)*$"
    r"|cst\d*$"  # skl2onnx
    r"|(^|\.)tmp(_\d+)*$|^p2o\.|^(helper|auto)\.[a-z_]+\.\d+$"  # Paddle
    r"|_output_\d+$"
)

_RESULT = (
    r"^_?(abs|add|addmm|arange|bmm|cat|clone|contiguous|cos|cumsum|div|embedding|exp|expand|eye|flatten|full_like|getitem"
    r"|index|index_select|layer_norm|linear|linspace|log|masked_fill|matmul|mean|mm|mul|neg|ones|ones_like|permute|pow"
    r"|reciprocal|repeat|reshape|rsqrt|scalar_tensor|select|sigmoid|sin|slice|softplus|split|sqrt|squeeze|stack|std|sub"
    r"|t|tanh|transpose|tril|triu|type_as|unsafe_view|unsqueeze|view|where|zeros|zeros_like)(_\d+)?$"
)
"""Names that torch.fx gives to results of operations: an exporter computed an initializer of such a name."""

_MODULE = r"^\w+(\.\w+)+$"

_LITERAL = (
    r"^/.*Constant(_\d+)?_output_\d+$"
    r"|^(c_)?_?(lifted_)?tensor(_constant)?_?\d+$"
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

_MASK = r"^(\w+_)?masks?(_\d+)?$"

_BUFFERS = (
    r"^(?!(\w+_)?log_(?!zero_guard))(\w+_)?(eps|epsilon|mean|std|var|variance|masked_bias|embed_scale|norm_factor|scaling|softmax_scale|inv_scale"
    r"|scale_factor|guard|guard_value|zero_point|momentum|num|count|(min|max|fill|pad|padding)(_val|_value)?)(_\d+)?$"
)

_STATISTIC = r"^(running|moving)_(mean|var|variance|std)(_\d+)?$"

_PREPROCESSING = r"^(?!(\w+_)?log_)(\w+_)?(means?|std|stds|stddev|var|variance|offset|normalizer|scaler)(_\d+)?$"

_LEARNED = (
    r"^(\w+_)?(logit_scale|logit_bias|temperature|temp|tau|alpha|beta|gamma|slope|rezero|resweight|gate|gain)(_?\d+)?$"
)


def origin_of(name: str) -> Origin:
    """Who gave an initializer its name.

    Example:
        >>> [origin_of(name).name for name in ("text.logit_scale", "logit_scale", "onnx::Mul_123")]
        ['MODULE', 'WORD', 'EXPORTER']
    """
    bare = name.removesuffix(":0")
    if re.search(_VARIABLE, bare):
        return Origin.MODULE
    if re.search(_MADE, bare, re.IGNORECASE) or is_result(bare):
        return Origin.EXPORTER
    return Origin.MODULE if re.match(_MODULE, bare) else Origin.WORD


def last_word(name: str) -> str:
    """The last part of a path, in lower case: what its module calls a tensor."""
    bare = re.sub(r"(/(ReadVariableOp|read)(_\d+)?)?(:0)?$", "", name)
    return re.split(r"[./:]", bare)[-1].lower()


def is_literal(name: str) -> bool:
    """Whether it is the name that an exporter gives to a tensor written in the code, which nobody trained."""
    return re.search(_LITERAL, name) is not None


def is_computed_parameter(name: str) -> bool:
    """Return whether an exporter gave the name to a tensor that it computed from a module's, not to a literal.

    Example:
        >>> [is_computed_parameter(name) for name in ("onnx::Mul_32", "helper.unsqueeze.0", "helper.constant.0")]
        [True, True, False]
    """
    return re.match(r"^onnx::|^helper\.(?!constant)", name) is not None


def is_table(name: str) -> bool:
    """Whether a tensor is called like a table of positions: cosines, sines, inverse frequencies."""
    return re.match(_TABLE, last_word(name)) is not None


def is_mask(name: str) -> bool:
    """Whether a tensor is called like a mask."""
    return re.match(_MASK, last_word(name)) is not None


def is_buffer(name: str) -> bool:
    """Whether a scalar is called like one that modules hold but do not train: an epsilon, a scale of attention."""
    return re.match(_BUFFERS, last_word(name)) is not None


def is_result(name: str) -> bool:
    """Return whether PyTorch's newer exporter gave the name of an operation to a tensor that it computed."""
    return re.match(_RESULT, name) is not None


def is_statistic_name(name: str) -> bool:
    """Return whether a tensor is called like a running statistic."""
    return re.match(_STATISTIC, last_word(name)) is not None


def is_preprocessing(name: str) -> bool:
    """Return whether a tensor is called like a mean or a deviation of preprocessing."""
    return re.match(_PREPROCESSING, last_word(name)) is not None


def is_learned(name: str) -> bool:
    """Whether a scalar is called like one that modules learn: a temperature, a slope, a gate."""
    return re.match(_LEARNED, last_word(name)) is not None
