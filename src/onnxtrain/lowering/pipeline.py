"""List of passes that turn a graph into one that a session runs, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.errors import GradientError
from onnxtrain.errors.registries import Registry
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN, TRAINING_DOMAIN
from onnxtrain.graph.passes import clean, forget_unused_domains, remove_unused
from onnxtrain.lowering.build_gradients import Derivative, build_gradients
from onnxtrain.lowering.logits import skip_ignored_rows
from onnxtrain.lowering.memory.recompute import check_patterns, number_layers, recompute
from onnxtrain.lowering.memory.rematerialize_dequantized import rematerialize_dequantized
from onnxtrain.lowering.memory.reuse_activations import reuse_activations
from onnxtrain.lowering.optimizer_bodies import (
    check_states,
    keep_provider_optimizers,
    lower_optimizers,
    lower_without_kernel,
    round_states,
)
from onnxtrain.lowering.portable import Portable, target_webgpu
from onnxtrain.lowering.rules.activations import fuse_activations, fuse_gates, fuse_norms, fuse_silu
from onnxtrain.lowering.rules.attention import fuse_attention, pack_attention
from onnxtrain.lowering.rules.batch_norm import (
    fold_batch_norm,
    fuse_batch_norm,
    synchronize_batch_norm,
    write_batch_norm,
)
from onnxtrain.lowering.rules.convolutions import fuse_padding, pad_evenly, shield_padded_weights
from onnxtrain.lowering.rules.dropout import counter_based_dropout
from onnxtrain.lowering.rules.elementwise import fuse_elementwise
from onnxtrain.lowering.rules.kernels import multiply_in_bfloat16, resolve_fused, use_kernels
from onnxtrain.lowering.rules.linear import (
    fuse_additions,
    fuse_linear,
    fuse_relu,
    skip_unread_columns,
    use_half_weights,
    use_mask_kernels,
)
from onnxtrain.lowering.rules.recurrent import (
    fuse_recurrent,
    read_last_state,
    split_recurrent_gradients,
    write_activation_defaults,
)
from onnxtrain.lowering.rules.rewritten import write_faster
from onnxtrain.lowering.rules.rotary import fuse_rotary
from onnxtrain.lowering.rules.rows import fuse_gather, fuse_scatter, fuse_slices
from onnxtrain.lowering.rules.scans import join_scans
from onnxtrain.lowering.updates import fuse_updates, optimizer_in_backward

PASSES: Final[Registry[Callable[[ir.Model], object]]] = Registry("pass", callable, "a function that changes a model")
"""Passes of plugins, which run first."""


def lower_graph(
    model: ir.Model,
    *,
    kernels: bool = False,
    derivative: Derivative | None = None,
    portable: Portable | None = None,
    updates: Collection[str] = (),
) -> ir.Model:
    """Run all passes: from a graph with Gradient and optimizer nodes to one that a session runs, in place.

    Step graphs, gradients, evaluation and the ONNX backend all go through it. A pass without work costs nothing:
    without Gradient nodes there is nothing to recompute, and without optimizers nothing to update.

    Requires: a sorted graph with the wanted outputs. Ensures: a sorted graph of standard operators that any runtime
    runs; with ``kernels`` also of operators that the native library has.
    """
    graph = model.graph
    options = GradientOptions.read(model.metadata_props)
    rounds = options.compute == "bfloat16"
    if rounds and not kernels:
        raise GradientError(
            "The training asks for precision='bfloat16', which the native kernels compute and a graph of standard "
            "operators does not; leave compute out for a graph that any runtime runs."
        )
    layers = number_layers(graph, options.recompute)  # known by names, of nodes that are there before any is fused
    check_patterns(graph, options.recompute, layers)
    for change in PASSES.values():  # of plugins
        change(model)
    write_activation_defaults(model)  # of recurrent layers: ONNX Runtime has others
    counter_based_dropout(model)  # masks from counters that are states: a repeated step draws the same
    if kernels:
        write_faster(model)  # Einsum, normalizations of groups: operators that have kernels
        skip_ignored_rows(model)  # whose labels are ignored: their logits are not computed
        fold_batch_norm(model)  # of frozen layers, into their convolutions
        fuse_batch_norm(model)  # in training mode, with the activation behind it
        fuse_activations(model)  # Gelu: one node for five
        fuse_norms(model)  # RMS norm: one node for seven
        fuse_rotary(model)  # rotary embedding: one node for seven
        fuse_slices(model)  # consecutive slices: one Split, whose gradient is one Concat
        fuse_padding(model)  # zeros before a convolution: its own padding
        fuse_scatter(model)  # rows added at indices: one node that sorts them
        fuse_attention(model)  # scores, mask, softmax and matmul: one node
        pack_attention(model)  # that reads queries, keys and values where one layer wrote them
        fuse_linear(model)  # matmul, transposition, bias and Relu: one node
        read_last_state(model)  # of a recurrent layer: its gradient is one step
        fuse_recurrent(model)  # LSTM, GRU, RNN that keep what their gradients read
    backward = Backward()
    for gradient in build_gradients(model, derivative):  # a Gradient node becomes the nodes that compute it
        backward += gradient
    join_scans(model)  # sums over chunks in one pass with their gradient
    if kernels:
        synchronize_batch_norm(model, backward)  # statistics of all processes
    resolve_fused(model, backward, kernels=kernels, portable=portable)  # operators without a kernel become their body
    clean(model)
    if kernels:
        fuse_silu(model, backward)  # the gradient of SiLU: one node for six
    shield_padded_weights(model)  # which ONNX Runtime's optimizer takes for padded images
    recompute(graph, backward, options.recompute, layers)  # activations recomputed instead of kept
    if kernels:
        lower_without_kernel(model)  # optimizers with a registered measure become their bodies
        reuse_activations(graph, backward)  # activations that their gradient recomputes on its way
        split_recurrent_gradients(model)  # values that their matmuls do not read are released before them
        use_kernels(model)  # losses, convolutions, batch normalization, Resize, LogSoftmax, low-bit weights
        use_half_weights(model)  # matmuls read weights in 16 bits as they are stored
        multiply_in_bfloat16(model, wanted=rounds)  # linear layers, where asked for
        remove_unused(model)
        skip_unread_columns(model)  # of a gradient that is split, where one part is wanted
        fuse_relu(model)  # the gradient of Relu inside that of the matmul behind it
        fuse_gates(model)  # the gradient of a gated unit: one node for four
        fuse_additions(model)  # an adapter's output by its matmul, an embedding's or a norm's gradient in place
        fuse_gather(model)  # rows that are only added up are read where they lie
        use_mask_kernels(graph)  # linear layers under masks skip what stays zero
        fuse_elementwise(model)  # chains of elementwise operators: one node
        rematerialize_dequantized(graph)  # frozen low-bit weights are in float only while they are read
        optimizer_in_backward(graph)  # an update for every few layers, in the backward pass
        fuse_updates(model)  # clipping and masks inside the update
        check_states(graph)  # none in 8 bits outside the updates
        round_states(model)  # those outside the updates
    else:
        check_states(graph)  # none in 8 bits
        kept = keep_provider_optimizers(model, updates)  # optimizers that the provider has kernels for
        lower_optimizers(model, kept)  # optimizers become their bodies
        round_states(model)  # states in bfloat16
        clean(model)
        if kept:
            fuse_updates(model)  # clipping and masks inside the update
        graph.sort()
        forget_unused_domains(model, (TRAINING_DOMAIN, ONNXTRAIN_DOMAIN))
        if portable is not None:
            write_batch_norm(model)  # which none of them has in training mode
        if portable == "cuda":
            pad_evenly(model)  # transposed convolutions, which CUDA's provider leaves to the CPU otherwise
        if portable == "webgpu":
            target_webgpu(model)  # only operators that the provider has
    return model
