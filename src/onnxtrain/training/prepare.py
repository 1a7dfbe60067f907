"""From a configuration to the objective: the working copy in its modes, the losses, the trainable parameters, hints."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.expand import is_expanded
from onnxtrain.autodiff.missing import missing_rules, missing_rules_message
from onnxtrain.autodiff.path import Forward, Route
from onnxtrain.data.model_inputs import FixedBatch
from onnxtrain.editing.working_copy.attention import separate_head_norms
from onnxtrain.editing.working_copy.inputs import mark_first_axes, mark_image_inputs, mark_token_inputs
from onnxtrain.editing.working_copy.kv_cache import let_caches_grow, remove_cache_inputs
from onnxtrain.editing.working_copy.stops import stop_as_program
from onnxtrain.editing.working_copy.training_modes import Modes, find_layers, set_modes
from onnxtrain.editing.working_copy.widening import hold_rounded, in_file, keep_frozen, rounded, widen
from onnxtrain.errors import GradientError, OptionError
from onnxtrain.errors._internal import gc_paused
from onnxtrain.errors.formatting import listed
from onnxtrain.errors.hints import Hint, warn_of
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.declared_shapes import declared_otherwise
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.patterns import escape
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.losses.base import JointLoss, Loss
from onnxtrain.losses.groups import GroupLoss
from onnxtrain.losses.groups import attach as attach_groups
from onnxtrain.losses.heads import (
    LossHead,
    head_of,
    named_output,
    wrapped,
)
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.losses.probabilities import find_scores
from onnxtrain.lowering.training_info.build import build_training_model
from onnxtrain.lowering.training_info.recipe import Names, free_names
from onnxtrain.model_file.exporters.pytorch import forget_traces
from onnxtrain.model_file.external import with_external_data
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.parameters.groups import group_hints, merged_hints
from onnxtrain.parameters.masks import KEEP, check_masks, zero_masks, zeros_to_keep
from onnxtrain.parameters.ties import (
    Copy,
    choose_copies,
    compute_copies,
    declared_learned,
    find_copies,
    find_repeated,
    train_as_one,
    value_reader,
)
from onnxtrain.parameters.trainable import Initializer, other_tensors, parameter_table
from onnxtrain.training.advice.hints import dropped_biases, find_hints
from onnxtrain.training.advice.unreached import Unreached
from onnxtrain.training.config import ModelOptions, TrainingConfig
from onnxtrain.training.objective import Objective

if TYPE_CHECKING:
    from onnxtrain.adapters.lora import Attached

_BEGINNING = 4096
"""Elements of a frozen weight that are read to see whether it may be pruned."""

_PRUNED_SIZE = 32
"""Elements of weights with zeros from which a model counts as pruned: matrices written by hand are smaller."""


@gc_paused()
def prepare(
    config: TrainingConfig,
    *,
    modes: Modes | None = None,
    copies: Sequence[Copy] | None = None,
    table: Sequence[Initializer] | None = None,
    ignoring: bool = True,
    differentiable: bool = False,
    caches: bool = False,
) -> Objective:
    """Make the objective of a configuration: the working copy in its modes, the losses, the table of initializers.

    Copies and table are those of an earlier preparation. ``ignoring`` provides for ignored labels before data tell,
    ``differentiable`` finds out that there are gradients, and ``caches`` keeps KV caches as inputs, to generate.
    """
    file, loss = config.model, config.loss
    training = modes is None
    modes = config.modes if modes is None else modes
    repeated = None if copies is None else [copy for copy in copies if copy.rows is not None]
    copies = choose_copies(file, config.tie) if copies is None else [copy for copy in copies if copy.rows is None]
    model = file.training_model()
    dropped = dropped_biases(model)
    forget_traces(model)
    if caches:
        let_caches_grow(model.graph)
    else:
        remove_cache_inputs(model)
    mark_token_inputs(model)
    mark_image_inputs(model)
    halves = widen(model)
    model = infer_shapes(model)
    mark_first_axes(model.graph)
    separate_head_norms(model)
    if repeated is None:
        fixed = FixedBatch.of(model.graph)
        repeated = find_repeated(model, None if fixed is None else fixed.size)
    unstopped = stop_as_program(model) if training else ()
    if config.dynamic_batch:
        from onnxtrain.editing.dynamic_batch import dynamic_batch, free_batch_axis

        if table is None:
            dynamic_batch(file.inlined())  # which finds out whether it can be
        free_batch_axis(model)
        infer_shapes(model)
    _set_accuracy(model, config.runtime.accuracy_level)
    layers = find_layers(model)
    compute_copies(model, copies)
    statistics = set_modes(model, modes)
    quantized = None
    if config.qat:
        from onnxtrain.editing.working_copy.quantized_training import train_quantized

        quantized = train_quantized(model)
    adapted: Attached | None = None
    if config.lora is not None:
        output_name, seed = config.output, config.seed
        adapted = config.lora.attach(model, file, output=output_name, seed=seed, training=training)
        halves = {**halves, **{name: ir.tensor(array) for name, array in adapted.initial.items() if name in halves}}
    if isinstance(loss, str):
        output = _loss_output(model.graph, loss)
    else:
        first = None if isinstance(loss, Loss) else loss.parts[0][0]
        output = named_output(model.graph, config.output if first is None else first)
        output = _with_groups(model, output, loss)
    objective = Objective(
        model=model,
        output=output,
        names=Names.beside(model.graph),
        statistics=statistics,
        layers=layers,
        dropped=dropped,
        unstopped=unstopped,
        modes=modes,
        copies=copies,
        table=table or (),
        adapted=adapted,
    )
    if not isinstance(loss, str):
        objective = objective.with_heads(_heads(objective, config, loss, objective.parameters, ignoring=ignoring))
    if table is None:
        learned = [*([] if quantized is None else quantized.learned), *declared_learned(model, repeated)]
        table = in_file(_table(objective, config, learned, differentiable=differentiable), halves)
        objective = replace(objective, table=table)
        relied = {name for head in objective.heads for name in head.scores.relied}
        live = {*objective.parameters, *config.held}
        if not isinstance(loss, str) and relied.intersection(live):
            objective = objective.with_heads(_heads(objective, config, loss, live, ignoring=ignoring))
        tied = {copy.original for copy in copies}
        repeated = [copy for copy in repeated if copy.name in live and copy.name not in tied]
    objective, halves = _as_one(objective, repeated, halves)
    if adapted is not None and (both := set(adapted.weights).intersection(objective.parameters)):
        raise OptionError(
            f"{min(both)!r} is trained in full and has an adapter, which needs it frozen; leave it out of train= or "
            "of the adapter's targets."
        ).about(min(both))
    trained = {*objective.parameters, *config.held, *statistics, *(copy.name for copy in copies)}
    keep_frozen(model, halves, trained)
    wide = {} if config.precision.master_weights else hold_rounded(model, halves, objective.parameters)
    same = {*wide, *(copy.name for copy in copies if copy.original in wide)}
    stored = rounded(halves, trained - same)
    if quantized is not None:
        quantized.keep_frozen(model, trained)
        stored = [*stored, *quantized.stored(trained)]
    return replace(objective, stored=stored, wide=wide)


def _as_one(
    objective: Objective, repeated: Sequence[Copy], halves: Mapping[str, ir.TensorProtocol]
) -> tuple[Objective, dict[str, ir.TensorProtocol]]:
    """Train each tensor that repeats a row for every example as this row."""
    if not repeated:
        return objective, dict(halves)
    train_as_one(objective.model, repeated)
    one = {copy.name: objective.model.graph.initializers[copy.name] for copy in repeated}
    rows = [
        replace(row, shape=shape, size=int(np.prod(shape)))
        if row.name in one and (shape := tuple(map(int, dimensions(one[row.name]) or ())))  # type: ignore[arg-type]
        else row
        for row in objective.table
    ]
    narrow = {
        copy.name: ir.tensor(copy.rows.first(halves[copy.name].numpy()), dtype=halves[copy.name].dtype)
        for copy in repeated
        if copy.name in halves and copy.rows is not None
    }
    return replace(objective, table=rows, copies=[*objective.copies, *repeated]), {**halves, **narrow}


def _with_groups(model: ir.Model, output: ir.Value, loss: Loss | JointLoss) -> ir.Value:
    """Let the model take groups of rows, where the loss compares them; return what the loss reads."""
    if isinstance(loss, GroupLoss):
        return attach_groups(model, output, loss)
    parts = [own for _, own in loss] if isinstance(loss, JointLoss) else []
    for own in parts:
        if isinstance(own, GroupLoss):
            raise OptionError(
                f"The loss {own.name} compares groups of rows, so that it cannot be one of several losses; give it "
                "alone."
            )
    return output


def _heads(
    objective: Objective, config: TrainingConfig, loss: Loss | JointLoss, learned: Collection[str], *, ignoring: bool
) -> list[LossHead]:
    """Return the outputs with losses that the configuration names; nothing is proved by values that are learned."""
    model = objective.model
    if isinstance(loss, Loss):
        declared: list[tuple[ir.Value, Loss, str]] = [(objective.output, loss, objective.names.target)]
    else:
        declared = [
            (named_output(model.graph, name), own, free_names(model.graph, [f"{name}_target"])[0]) for name, own in loss
        ]
    forms = config.forms
    if forms is None:
        found = [
            own.first_form(wrapped(output, model.opset_imports[""]), config.targets) for output, own, _ in declared
        ]
        forms = tuple(replace(form, ignoring=ignoring) for form in found)
    return [
        head_of(model, output, own, form, name, find_scores(model, output, learned, emit=own.probabilities is not None))
        for (output, own, name), form in zip(declared, forms, strict=True)
    ]


def _table(
    objective: Objective, config: TrainingConfig, learned: Sequence[str], *, differentiable: bool
) -> list[Initializer]:
    """Sort the initializers; where the search expands functions, on a copy, since the main graph keeps them."""
    copy, straight_through = objective.model, config.straight_through
    xs = tuple(value for value in copy.graph.initializers.values() if is_float(value))
    predictions = tuple(head.prediction for head in objective.heads) or (objective.prediction,)
    if not is_expanded(Forward.of(copy, straight_through=straight_through), Route(predictions, xs)):
        copy = copy.clone()
    graph = copy.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    ys = [values[str(prediction.name)] for prediction in predictions]
    rows = parameter_table(
        copy,
        ys,
        train=_trained(objective.adapted, config.train),
        freeze=config.freeze,
        straight_through=straight_through,
        learned=learned,
        copies={
            tied.original: [other.name for other in objective.copies if other.original == tied.original]
            for tied in objective.copies
        },
        elsewhere=lambda: other_tensors(config.model.proto),
    )
    if differentiable:
        trained = [graph.initializers[row.name] for row in rows if row.trainable]
        forward = Forward.of(copy, straight_through=straight_through)
        names = [str(prediction.name) for prediction in predictions]
        missing: list[ir.Node] = []
        for name in names:
            values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)  # the search expands functions
            missing += missing_rules(forward, values[name], trained)
        if missing:
            raise GradientError(missing_rules_message(dict.fromkeys(missing), graph.opset_imports))
    return rows + [_copied_row(objective.model.graph, tied) for tied in objective.copies]


def _trained(adapted: Attached | None, train: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if adapted is None:
        return train
    return (*map(escape, (*adapted.parameters, *adapted.resumed)), *(train or ()))


def _copied_row(graph: ir.Graph, copy: Copy) -> Initializer:
    value = next(output for node in graph for output in node.outputs if output.name == copy.name)
    shape = tuple(size for size in dimensions(value) or () if isinstance(size, int))
    assert value.dtype is not None
    uses = tuple(dict.fromkeys(node.op_type for node in value.consumers()))
    reason = f"tied to {copy.original}"
    return Initializer(copy.name, shape, value.dtype.name.lower(), int(np.prod(shape)), False, reason, uses)


def _loss_output(graph: ir.Graph, name: str) -> ir.Value:
    outputs = {value.name: value for value in graph.outputs}
    if name not in outputs:
        raise OptionError(f"loss='output:{name}', but the model's outputs are {', '.join(map(str, outputs))}.")
    value = outputs[name]
    shape = dimensions(value)
    if not is_float(value) or (shape is not None and any(size != 1 for size in shape)):
        raise OptionError(f"loss='output:{name}' needs a floating scalar, but {name!r} has shape {shape}.")
    return value


def with_checked_masks(config: TrainingConfig, objective: Objective) -> TrainingConfig:
    """Return a configuration whose masks are arrays: of the zeros of the model where these are to be kept."""
    if config.masks.keep:
        read = value_reader(config.model, objective.copies)
        config = replace(config, masks=zeros_to_keep(objective.own_weights, read))
    check_masks(config.masks, objective.shapes, objective.optimizers(config))
    return config


def hints_of(objective: Objective, config: TrainingConfig) -> list[Hint]:
    """Return hints about the model and its training; reads the values of the file."""
    file = config.model
    tied = {copy.original for copy in objective.copies}  # on request
    found = find_hints(
        objective.model,
        [name for name in objective.parameters if name not in tied],
        objective.layers,
        find_copies(file, objective.parameters),
        batch_norm=objective.modes.batch_norm,
        dropout=objective.modes.dropout,
        dropped=objective.dropped,
        unstopped=objective.unstopped,
        table=objective.table,
        qat=config.qat,
        straight_through=config.straight_through,
        adapted=config.lora is not None,
    )
    read = {head.output for head in objective.heads} or {objective.output}
    train = _trained(objective.adapted, config.train)
    unreached = Unreached(objective.model, objective.table, train=train, freeze=config.freeze)
    found += unreached.stopped(objective.predictions)
    found += unreached.of_outputs(
        objective.predictions,
        [str(value.name) for value in objective.model.graph.outputs if is_float(value) and value not in read],
        straight_through=config.straight_through,
        chosen=config.output is not None,
        named=isinstance(config.loss, JointLoss),
    )
    texts = [*group_hints(config.groups, objective.table, objective.model), *_merged_zeros(objective, config)]
    texts += _repeated(objective)
    choices = {"train": config.train, "freeze": config.freeze}
    choices |= {repr(group): group.patterns for group in config.groups}
    merged = merged_hints(choices, objective.table, objective.model)
    otherwise = declared_otherwise(objective.model.graph)
    held = () if objective.adapted is None else objective.adapted.hints(file, objective.parameters)
    surprising = [Hint(text, surprising=True) for text in (*merged, *otherwise, *_zeros(objective, config), *held)]
    return found + [Hint(text) for text in texts] + surprising


def _repeated(objective: Objective) -> Iterator[str]:
    """Hint at parameters that the file holds once for each example."""
    found = {copy.name: copy.rows.examples for copy in objective.copies if copy.rows is not None}
    if found:
        yield (
            f"{listed(found)}: equal for each of the {max(found.values())} examples of the fixed batch, as exporters "
            "copy a token; trained as one."
        )


def _zeros(objective: Objective, config: TrainingConfig) -> Iterator[str]:
    """Hint at pruned weights that training without masks makes dense."""
    if config.masks or config.qat or any(optimizer.promotes_sparsity for optimizer in objective.optimizers(config)):
        return
    found = zero_masks(objective.own_weights, value_reader(config.model, objective.copies))
    if zeros := _zeros_of(found):
        yield f"{zeros} are zero, as after pruning, and training changes them; masks={KEEP!r} keeps them zero."


def _merged_zeros(objective: Objective, config: TrainingConfig) -> Iterator[str]:
    """Hint at pruned weights that merging their adapters makes dense."""
    if objective.adapted is None:
        return
    read = config.model.value
    # The beginning of a weight tells whether to read all of it: frozen weights are mapped, perhaps larger than memory.
    begin = zero_masks(dict.fromkeys(objective.adapted.weights), lambda name: read(name).reshape(-1)[:_BEGINNING])
    if zeros := _zeros_of(zero_masks(begin, read)):
        yield (
            f"{zeros} are zero, as after pruning, but not with the adapter merged into them; to keep the zeros, save "
            "the adapter, with a path such as tuned.onnx_adapter."
        )


def _zeros_of(masks: Mapping[str, np.ndarray]) -> str:
    """Name and count the zeros of pruned weights; empty where there are too few."""
    size = sum(mask.size for mask in masks.values())
    zeros = size - sum(int(np.count_nonzero(mask)) for mask in masks.values())
    return "" if size < _PRUNED_SIZE else f"{zeros:,} of {size:,} elements of {listed(masks)}"


def _set_accuracy(model: ir.Model, level: int | None) -> None:
    """Set the accuracy level of MatMulNBits nodes in a working copy, in place; ``None`` changes nothing."""
    if level is None:
        return
    for node in [*all_nodes(model.graph), *(node for function in model.functions.values() for node in function)]:
        if node.op_type == "MatMulNBits" and node.domain == MICROSOFT_DOMAIN:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", level)


@checks_arguments(keywords=ModelOptions.__annotations__)
@refuses_invalid()
def training_model(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    loss: LossLike,
    optimizer: Optimizer | str,
    accumulate: bool = False,
    **options: Unpack[ModelOptions],
) -> onnx.ModelProto:
    """Write a training as standard ONNX: a model with ``training_info``.

    The main graph is the model. The algorithm graph has the inputs ``target`` and ``learning_rate`` and contains the
    loss, one Gradient node and one optimizer node; its initializers are the optimizer states (``{parameter}/V`` ...)
    and the update count ``T``. ``update_binding`` maps every parameter and state to its next value; the initialization
    graph resets the states. Every step returns the output ``loss``.

    Args:
        model: A path or a loaded model; a model below opset 18 is upgraded to 18.
        loss: See :class:`onnxtrain.Trainer`.
        optimizer: ``Adam(...)``, ``AdamW(...)`` or another, or its name, ``"adamw(lr=3e-4)"``.
        accumulate: Write two entries: the first accumulates the gradients of micro-batches, the second applies them.
        **options: Other options of :class:`onnxtrain.Trainer`. ``ema`` becomes states ``{parameter}/average``; each
            rule of ``groups`` gets its own optimizer node; adapters of ``lora`` are initializers of the main graph;
            ``batch_norm="sync"`` means ``"train"`` here. Weights are zero where ``masks`` are false.
            ``precision``: ``RoundStochastic`` of the domain ``onnxtrain`` rounds states in bfloat16;
            ``EncodeBlockwise`` encodes states in 8 bits, with scales ``{parameter}/V_scale``. The Gradient node has no
            attributes for ``straight_through``, ``recompute`` and the compute type; metadata entries
            ``onnxtrain.straight_through``, ``onnxtrain.recompute`` (a JSON list) and ``onnxtrain.compute`` record
            them. A model with ``onnxtrain.compute`` needs native kernels.

    Returns:
        The training model: valid ONNX that can be saved, sent, lowered and resumed; it contains all its data.

    Raises:
        ModelError: The model cannot be read.
        OptionError: An argument has a value that is not accepted; there is nothing to train.

    Warns:
        TrainingHint: Training differs from the likely intent of the caller.
    """
    config = TrainingConfig.of(
        model,
        loss,
        optimizer,
        accumulate=2 if accumulate else 1,  # the model does not depend on the number of micro-batches
        **options,
    )
    file, objective = config.model, prepare(config)
    config = with_checked_masks(config, objective)
    warn_of(hints_of(objective, config))
    return with_external_data(build_training_model(objective.step_spec(config)), file.folder)
