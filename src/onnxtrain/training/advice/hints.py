"""Hints about a model before training, as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.editing.working_copy.kv_cache import cache_hints
from onnxtrain.editing.working_copy.training_modes import LayerCounts, is_batch_norm, normalizes_batches
from onnxtrain.errors.formatting import listed, plural
from onnxtrain.errors.hints import Hint
from onnxtrain.graph.batch_axis import named_time_first
from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.upstream.sessions import mixed_two_bits
from onnxtrain.graph.value import TIME_FIRST
from onnxtrain.model_file.exporters import gives, module_of
from onnxtrain.model_file.exporters.pytorch import (
    CALL,
    folded_norms,
    folded_parameters,
    has_biased_call,
    lost_parameters,
    renormed_tables,
)
from onnxtrain.parameters.classify import BY_VALUES
from onnxtrain.parameters.fixed_values import has_one_value
from onnxtrain.parameters.names import last_word
from onnxtrain.parameters.readers import (
    LINEAR,
    ROUNDING,
    Reader,
    arrivals,
    behind_identity,
    is_statistic,
    is_weight,
    quantized_weights,
    read_through_identity,
    summed_with,
    trains_integers,
    use_of,
)
from onnxtrain.parameters.ties import Copy
from onnxtrain.parameters.trainable import FROZEN, NOT_NAMED, Initializer, shared_parameters

KEEP_BATCH_NORM = (
    "torch.onnx.export(..., optimize=False) keeps it, and with dynamo=False "
    "training=torch.onnx.TrainingMode.PRESERVE does"
)

FOLDED = "The exporter folded batch normalization"
"""Beginning of the hint about folded batch normalization."""

QUANTIZED = "The model is quantized"
"""Beginning of the hint about quantized models."""

_KEEP_DROPOUT = "torch.onnx.export(model.train(), ...) keeps it"

_STAYS = (
    "The saved file stays in training mode, for other tools, too; onnxtrain.inference_mode(path) returns it in "
    "inference mode."
)


def find_hints(
    model: ir.Model,
    parameters: Sequence[str],
    layers: LayerCounts,
    copies: Sequence[Copy] = (),
    *,
    batch_norm: str = "frozen",
    dropout: bool = False,
    dropped: Sequence[str] = (),
    unstopped: Sequence[str] = (),
    table: Sequence[Initializer] = (),
    qat: bool = False,
    straight_through: bool = False,
    adapted: bool = False,
) -> list[Hint]:
    """Find all hints about a model."""
    return [
        *(Hint(text, surprising) for text, surprising in cache_hints(model.graph)),
        *_undecided([row for row in table if row.undecided]),
        *_constants(table),
        *_doubtful(table),
        *_dropped(dropped),
        *_unstopped(unstopped),
        *_folded(model, table),
        *_folded_scales(table),
        *_computed(table),
        *_without_biases(model),
        *_lost(model, dropped),
        *_renormed(model),
        *(() if adapted else _quantized(model, table, qat=qat, straight_through=straight_through)),
        *_two_bits(model),
        *_shared(model, parameters),
        *_copied(copies),
        *_batch_norm(layers, batch_norm),
        *(() if batch_norm == "frozen" else _frozen_norms(model, table)),
        *_dropout(layers, drop=dropout),
        *_random(layers.random),
        *_unread(model.graph),
        *_named_time_first(model.graph),
    ]


def proved_time_first(graph: ir.Graph) -> Iterator[Hint]:
    """Name inputs whose first axis is the time of a recurrent node, which matters where data are cut into batches."""
    for value in graph.inputs:
        if value.meta.get(TIME_FIRST, ("",))[0]:
            yield Hint(
                f"The first axis of the input {value.name!r} is the time of {value.meta[TIME_FIRST][0]}, not the axis "
                "of examples: fit takes ready batches, as an iterable, and no arrays, which it would cut along time. "
                "For arrays, export the model with batch_first=True.",
                surprising=False,
            )


def _named_time_first(graph: ir.Graph) -> Iterator[Hint]:
    """Name inputs whose axes are named as if time came first, and that no recurrent node reads so."""
    for value in graph.inputs:
        names = named_time_first(value)
        if names and TIME_FIRST not in value.meta:
            yield Hint(
                f"The axes of the input {value.name!r} are named {names[0]!r} and {names[1]!r}, as if time came first, "
                "but data are cut into batches along the first axis: export the model with batch_first=True, or give "
                "ready batches, as an iterable.",
                surprising=True,
            )


def _two_bits(model: ir.Model) -> Iterator[Hint]:
    if names := mixed_two_bits(model.graph):
        yield Hint(
            f"ONNX Runtime 1.32 computes matmuls with {len(names)} weights of 2 bits wrongly ({', '.join(names[:2])}"
            f"{', ...' if len(names) > 2 else ''}), whose columns are no multiple of 4. Sessions of onnxtrain avoid "
            'this; other sessions of the file need the entry "session.disable_quant_qdq" with the value "1", which '
            "SessionOptions.add_session_config_entry sets."
        )


def _undecided(rows: Sequence[Initializer]) -> Iterator[Hint]:
    if rows:
        names, scales = [row.name for row in rows], [row.name for row in rows if row.reason == ROUNDING]
        one = len(names) == 1
        logarithms = f" qat=True trains the logarithm of {listed(scales)}, which keeps its sign." if scales else ""
        yield Hint(
            f"{listed(names)} {'is' if one else 'are'} not trained: neither use nor name shows that "
            f"{'it is' if one else 'they are'} learned. {_train(names)}, and freeze={_quoted(names[0])} keeps "
            f"{'it' if one else 'the first'} without this hint.{logarithms}",
            surprising=True,
        )


def _train(names: Sequence[str]) -> str:
    shown = names[:3]
    whom = f"the first {len(shown)}" if len(names) > len(shown) else _several(names, "it", "them")
    return f"train=[{', '.join(map(_quoted, ('*', *shown)))}] trains {whom}"


def _quoted(name: str) -> str:
    return repr(name) if {*name} & {*'"\\'} else f'"{name}"'


def _constants(table: Sequence[Initializer]) -> Iterator[Hint]:
    """Name the tensors that are constants by their values, by kind."""
    kinds: dict[str, list[str]] = {}
    for row in table:
        if row.reason.endswith(BY_VALUES):
            kinds.setdefault(row.reason.removesuffix(BY_VALUES), []).append(row.name)
    names = [name for group in kinds.values() for name in group]
    if not names:
        return
    groups = "; ".join(f"{listed(group)} ({kind})" for kind, group in kinds.items())
    count = _several(names, "1 tensor is", f"{len(names)} tensors are")
    text = f"{count} not trained, by {_several(names, 'its', 'their')} values: {groups}. {_train(names)}."
    yield Hint(text)


def _doubtful(table: Sequence[Initializer]) -> Iterator[Hint]:
    """Name trained parameters that hold what programs seldom train: the file says no more than that they are some."""
    rows = [row for row in table if row.trainable and row.doubt]
    if not rows:
        return
    names = [row.name for row in rows]
    yield Hint(
        f"The file declares {listed(names)} as {_several(names, 'a parameter', 'parameters')}, which "
        f"{_several(names, 'is', 'are')} trained, but the values are those of a constant ({rows[0].doubt}). If the "
        f"program does not train {_several(names, 'it', 'them')} (requires_grad=False), give "
        f"freeze={_quoted(names[0])}."
    )


def _several(names: Sequence[str], one: str, more: str) -> str:
    return one if len(names) == 1 else more


def _dropped(names: Sequence[str]) -> Iterator[Hint]:
    if names:
        one = len(names) == 1
        yield Hint(
            f"The exporter left out {len(names)} bias{'' if one else 'es'} that {'was' if one else 'were'} zero "
            f"({listed(names)}): {'it is' if one else 'they are'} not in the file and cannot be trained. "
            "torch.onnx.export(..., optimize=False) keeps them.",
            surprising=True,
        )


def _folded(model: ir.Model, table: Sequence[Initializer]) -> Iterator[Hint]:
    """Name initializers that the exporter computed from parameters by more than another layout."""
    values = model.graph.initializers
    rows = [row for row in table if row.name in values and row.reason not in (FROZEN, NOT_NAMED)]
    found = {row: sources for row in rows if (sources := folded_parameters(values[row.name]))}
    if not found:
        return
    lost = list(dict.fromkeys(source for sources in found.values() for source in sources))
    trained = [row.name for row in found if row.trainable]
    one = len(lost) == 1
    missing = "parameter is" if one else "parameters are"
    directly = f"; a training changes {listed(trained)} directly, other than PyTorch's" if trained else ""
    yield Hint(
        f"The exporter computed {listed([row.name for row in found])} from the parameter{'' if one else 's'} "
        f"{listed(lost)} and stored the result{'' if len(found) == 1 else 's'}: the {missing} "
        f"not in the file and cannot be trained{directly}. torch.onnx.export(..., optimize=False) keeps "
        f"{'it' if one else 'them'}.",
        surprising=True,
    )


def _folded_scales(table: Sequence[Initializer]) -> Iterator[Hint]:
    """Name scales of batch normalization that tf2onnx divided by the deviation."""
    if names := [row.name for row in table if row.trainable and gives("scale", row.name)]:
        several = len(names) > 1
        yield Hint(
            f"tf2onnx computed {listed(names)} from the scale{'s' if several else ''} and the running variance"
            f"{'s' if several else ''} of batch normalization, and a shift from the rest. A training changes "
            "these directly, so that its steps differ from Keras's."
        )


def _computed(table: Sequence[Initializer]) -> Iterator[Hint]:
    """Name trained values that paddle2onnx or tf2onnx computed, of which it records no more than the operator."""
    if names := [row.name for row in table if row.trainable and gives("computed", row.name)]:
        one = len(names) == 1
        yield Hint(
            f"The exporter computed {listed(names)} from other tensors of the program and stored the "
            f"result{'' if one else 's'}. A training changes {'it' if one else 'these'} directly, other than the "
            f'program would change its parameters; freeze="{names[0]}" keeps {"it" if one else "the first"}.',
            surprising=True,
        )


def _without_biases(model: ir.Model) -> Iterator[Hint]:
    """Say that no layer of a file of tf2onnx has a bias: it leaves out biases of zeros, as of untrained networks."""
    weights = [value for name, value in model.graph.initializers.items() if gives("variable", name)]
    layers = [node for value in weights for node, _ in arrivals(value) if node.op_type in (*_BIASES, "MatMul")]
    if not layers or any(gives("added", name) for name in model.graph.initializers) or any(map(_has_bias, layers)):
        return
    yield Hint(
        "No layer of this TensorFlow file has a bias. tf2onnx leaves out biases of zeros, such as those of an "
        "untrained network, and they cannot be trained: if the program has some, give them small numbers before "
        "the export.",
        surprising=True,
    )


def _lost(model: ir.Model, dropped: Sequence[str]) -> Iterator[Hint]:
    """Name parameters without a trace in the file; not surprising for weights and biases, of layers without use."""
    names = [name for name in lost_parameters(model.graph) if name not in dropped]
    norms = folded_norms(model.graph, names)
    layers = _folded_layers(model.graph)
    others = [name for name in names if name.rpartition(".")[0] not in norms]
    if norms or layers:
        where = f"into the weights of {listed(layers)}" if layers else f"({listed(norms)}) into the weights before it"
        yield Hint(
            f"{FOLDED} {where}: its scales and biases are not in the file and cannot be trained. {KEEP_BATCH_NORM}."
        )
    if others:
        one = len(others) == 1
        yield Hint(
            f"The file lacks {len(others)} parameter{'' if one else 's'} of the PyTorch program ({listed(others)}): no "
            f"output of the file needs {'it' if one else 'them'}, or the exporter left the node out, as it does for "
            "factors of one and terms of zero. torch.onnx.export(..., optimize=False) keeps what the outputs need.",
            surprising=any(last_word(name) not in ("weight", "bias") for name in others),
        )


def _folded_layers(graph: ir.Graph) -> list[str]:
    """Name the convolutions with computed weight and bias: torch.onnx.export(dynamo=False) computes both here only."""
    numbers = any("." in name for name in graph.initializers)  # before PyTorch 1.13, beside names of modules
    folded = {name for name in graph.initializers if gives("folded", name) or (numbers and name.isdecimal())}
    return [
        module_of(node.name or "", node.metadata_props) or str(node.name or node.outputs[0].name)
        for node in all_nodes(graph)
        if node.op_type == "Conv" and len(node.inputs) == 3
        if all((value := behind_identity(given)) is not None and value.name in folded for given in node.inputs[1:])
    ]


def _renormed(model: ir.Model) -> Iterator[Hint]:
    if names := renormed_tables(model.graph):
        yield Hint(
            f"{listed(names)} {'has' if len(names) == 1 else 'have'} max_norm: PyTorch rescales the rows in place at "
            "every lookup and trains them. A step only computes with rescaled rows, and trains none of them. Without "
            "max_norm they are trained.",
            surprising=True,
        )


def _unstopped(names: Sequence[str]) -> Iterator[Hint]:
    if names:
        one = len(names) == 1
        yield Hint(
            f"The PyTorch program detaches inputs of {listed(names)}, but the exporter changed the "
            f"{'node' if one else 'nodes'}, so that it is not known which inputs: gradients pass them all. "
            "torch.onnx.export(..., optimize=False) keeps the nodes.",
            surprising=True,
        )


def _quantized(model: ir.Model, table: Sequence[Initializer], *, qat: bool, straight_through: bool) -> Iterator[Hint]:
    """Return a hint on how much of a quantized model is not trained."""
    rows = {row.name for row in table}
    integers = {name: size for name, size in quantized_weights(model.graph).items() if name in rows}  # not frozen ones
    untrained, counts = sum(integers.values()), Counter(node.op_type for node in model.graph)
    stopped = counts["QuantizeLinear"] and counts["DequantizeLinear"] and not (qat or straight_through)
    text, parts = QUANTIZED, []
    if stopped:
        text += (
            f" ({plural(counts['QuantizeLinear'], 'QuantizeLinear node')}, "
            f"{plural(counts['DequantizeLinear'], 'DequantizeLinear node')})"
        )
        parts.append("no gradient passes its rounding, so that weights in front of it are not trained")
    if untrained:
        total = untrained + sum(row.size for row in table if row.trainable)
        some = listed(integers, counted=False)
        parts.append(f"{untrained:,} of {total:,} elements of its weights are integers ({some}) and not trained")
    if not parts:
        return
    advice = []
    if not qat:
        advice.append(f"qat=True trains {'the quantized weights' if trains_integers(model.graph) else 'their scales'}")
    if stopped:
        advice.append("straight_through=True passes gradients on to float weights")
    if counts["MatMulNBits"]:
        advice.append("lora= trains adapters beside them")
    told = f" {'; '.join(advice)}." if advice else ""
    yield Hint(f"{text}: {'; '.join(parts)}.{told}", surprising=True)


def _shared(model: ir.Model, parameters: Sequence[str]) -> Iterator[Hint]:
    kinds: dict[tuple[bool, bool], list[str]] = {}
    for name, readers in shared_parameters(model, parameters).items():
        value = model.graph.initializers[name]
        read = read_through_identity(value)
        if any(isinstance(use_of(reader), str) and not is_statistic(reader[0].op_type, reader[1]) for reader in read):
            continue  # a quantization scale that is learned
        tensor = value.const_value
        merged = tensor is not None and has_one_value(np.asarray(tensor.numpy())) and not _is_unrolled(read)
        moved = any(is_statistic(node.op_type, index) for node, index in read)
        kinds.setdefault((merged, moved), []).append(f"{name} is shared by {readers}")
    for (merged, moved), shared in kinds.items():
        advice = "; if an exporter merged equal values, untie=True gives each its own" if merged else ""
        also = " A running statistic of batch normalization is among them and moves with the rest." if moved else ""
        # Trained values are not equal by chance: the model shares them on purpose.
        yield Hint(f"{listed(shared)}: training ties them{advice}.{also}", surprising=moved or merged)


def _is_unrolled(readers: Sequence[Reader]) -> bool:
    """Return whether all readers belong to one layer that runs several times, with a single matrix."""
    matrices = {_matrix(reader) for reader in readers}
    return len(matrices) == 1 and None not in matrices


def _matrix(reader: Reader) -> ir.Value | None:
    """Return the weight matrix of the reader's linear layer, or of the layer to which the reader adds a bias."""
    product = summed_with(reader) or reader[0]
    for index in (1, 0):
        if (product.domain, product.op_type) in LINEAR and index < len(product.inputs):
            matrix = behind_identity(product.inputs[index])
            if matrix is not None and matrix.is_initializer():
                return matrix
    return None


def _copied(copies: Sequence[Copy]) -> Iterator[Hint]:
    if not copies:
        return
    shown = [
        f"{copy.name} holds the same values as {copy.original}{', transposed' if copy.transposed else ''}"
        for copy in copies
    ]
    yield Hint(
        f"{listed(shown)}, and they are trained separately; if the model ties them, tie=True keeps them equal.",
        surprising=True,
    )


def _batch_norm(layers: LayerCounts, mode: str) -> Iterator[Hint]:
    count, nested, training = layers.batch_norms, layers.nested_batch_norms, layers.normalizing_batches
    trains = mode != "frozen"
    if trains and not count:
        yield Hint(
            f'batch_norm="{mode}" has nothing to train: the model has no BatchNormalization node. Exporters '
            f"fold it into the weights before it; {KEEP_BATCH_NORM}.",
            surprising=True,
        )
    if trains and nested:
        yield Hint(
            f'batch_norm="{mode}" leaves {plural(nested, "BatchNormalization node")} in bodies of If, Loop or Scan '
            f"frozen: {_its(nested)} statistics cannot be updated from there.",
            surprising=True,
        )
    if count and not trains:
        yield Hint(
            f"{plural(count, 'BatchNormalization node')} {_verb(count, 'keep')} {_its(count)} statistics frozen; "
            'batch_norm="train" trains with batch statistics and writes the running ones back.'
        )
    if training:
        others = count - nested - layers.trained_batch_norms
        rest = f', which batch_norm="{mode}" trains; {others} {_verb(others, "stay")} frozen' if others else ""
        if not trains:
            rest = f"; training and evaluation here use {_its(training)} running statistics"
        yield Hint(
            f"The file sets {plural(training, 'BatchNormalization node')} to training mode{rest}. {_STAYS}", True
        )


def _frozen_norms(model: ir.Model, table: Sequence[Initializer]) -> Iterator[Hint]:
    frozen = {row.name for row in table if row.reason == FROZEN}
    norms = (node for node in all_nodes(model.graph) if is_batch_norm(node) and normalizes_batches(node))
    if count := sum(not {v and v.name for v in node.inputs[1:3]} - frozen for node in norms):
        yield Hint(
            f"freeze keeps the weights of {plural(count, 'BatchNormalization node')}, but {_its(count)} batch "
            'statistics are used and written, as in PyTorch; batch_norm="frozen" keeps the statistics of all nodes.'
        )


def _dropout(layers: LayerCounts, *, drop: bool) -> Iterator[Hint]:
    count, nested, dropping = layers.dropouts, layers.nested_dropouts, layers.dropping
    if drop and nested:
        yield Hint(
            f"{plural(nested, 'Dropout node')} in bodies of If, Loop or Scan {_verb(nested, 'do')} nothing: the "
            "gradient recomputes a body and would drop other elements.",
            surprising=True,
        )
    if drop and not count:
        yield Hint(
            "dropout=True has nothing to drop: the model has no Dropout node. Exporters leave it out of a model in "
            f"evaluation mode; {_KEEP_DROPOUT}.",
            surprising=True,
        )
    if count and not drop:
        yield Hint(
            f"{plural(count, 'Dropout node')} {_verb(count, 'do')} nothing; "
            f"dropout=True lets {'it' if count == 1 else 'them'} drop."
        )
    where = "evaluation here does" if drop else "training and evaluation here do"
    if dropping:
        yield Hint(
            f"The file sets {plural(dropping, 'Dropout node')} to training mode; {where} not drop. {_STAYS}",
            surprising=True,
        )
    if layers.undecided:
        yield Hint(
            f"The file lets a value decide whether {plural(layers.undecided, 'Dropout node')} "
            f"{_verb(layers.undecided, 'drop')}; {where} not ask it."
        )


def _random(operators: Sequence[str]) -> Iterator[Hint]:
    if operators:
        yield Hint(
            f"The model samples random numbers itself ({', '.join(operators)}): its outputs differ from run to run, "
            "in evaluation too, and no seed given here changes that."
        )


def _unread(graph: ir.Graph) -> Iterator[Hint]:
    names = [repr(value.name) for value in graph.inputs if not value.uses() and not value.is_graph_output()]
    if not names:
        return
    text = f"No node reads {_several(names, 'the input', 'the inputs')} {listed(names)}: other values change nothing."
    states = [node.inputs[5:7] for node in graph if node.op_type == "LSTM" and not node.domain]
    mixed = any(len(pair) == 2 and pair[0] is not None and pair[0] is pair[1] for pair in states)
    if mixed:
        text += (
            " An LSTM begins with one value as hidden state and as cell state: PyTorch's newer exporter takes two "
            "inputs for one where the same tensor is their example; export with a tensor for each."
        )
    yield Hint(text, surprising=mixed)


def _verb(count: int, verb: str) -> str:
    if count > 1:
        return verb
    return "does" if verb == "do" else f"{verb}s"


def _its(count: int) -> str:
    return "its" if count == 1 else "their"


_BIASES = {"Gemm": 2, "Conv": 2, "ConvTranspose": 2, "LayerNormalization": 2}
"""Operators with a bias, and its input slot."""


def dropped_biases(model: ir.Model) -> tuple[str, ...]:
    """Name the biases that the exported program has but the file lacks."""
    calls: dict[str, list[ir.Node]] = {}
    norms: dict[bool, list[ir.Node]] = {True: [], False: []}
    for node in all_nodes(model.graph):
        has_bias = has_biased_call(node)
        if has_bias:
            calls.setdefault(node.metadata_props[CALL], []).append(node)
        elif has_bias is None and node.op_type == "LayerNormalization" and not node.domain:
            norms[_has_bias(node)].append(node)
    found = dict.fromkeys(
        f"{module}.bias"
        for nodes in calls.values()
        if not any(map(_has_bias, nodes)) and any(node.op_type in (*_BIASES, "MatMul") for node in nodes)
        for module in [module_of(nodes[-1].name or "", nodes[-1].metadata_props)]
        if module
    )
    if norms[True]:
        found.update(dict.fromkeys(f"the bias of {node.name or node.outputs[0].name}" for node in norms[False]))
    return tuple(found)


def _has_bias(node: ir.Node) -> bool:
    if node.op_type == "Add":
        return any(map(is_weight, node.inputs))
    slot = _BIASES.get(node.op_type)
    return slot is not None and len(node.inputs) > slot and node.inputs[slot] is not None
