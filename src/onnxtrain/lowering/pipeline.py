"""List of passes that turn a graph into one that a session runs, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.errors import GradientError
from onnxtrain.errors.registries import Registry
from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN, TRAINING_DOMAIN
from onnxtrain.graph.passes import clean, remove_unused
from onnxtrain.lowering.build_gradients import Derivative, build_gradients
from onnxtrain.lowering.counter_based_dropout import counter_based_dropout
from onnxtrain.lowering.fuse.fold_batch_norm import fold_batch_norm
from onnxtrain.lowering.fuse.fuse_activations import fuse_activations
from onnxtrain.lowering.fuse.fuse_additions import fuse_additions
from onnxtrain.lowering.fuse.fuse_attention import fuse_attention
from onnxtrain.lowering.fuse.fuse_batch_norm import fuse_batch_norm
from onnxtrain.lowering.fuse.fuse_elementwise import fuse_elementwise
from onnxtrain.lowering.fuse.fuse_gates import fuse_gates
from onnxtrain.lowering.fuse.fuse_gather import fuse_gather
from onnxtrain.lowering.fuse.fuse_linear import fuse_linear
from onnxtrain.lowering.fuse.fuse_norms import fuse_norms
from onnxtrain.lowering.fuse.fuse_padding import fuse_padding
from onnxtrain.lowering.fuse.fuse_relu import fuse_relu
from onnxtrain.lowering.fuse.fuse_rotary import fuse_rotary
from onnxtrain.lowering.fuse.fuse_scatter import fuse_scatter
from onnxtrain.lowering.fuse.fuse_silu import fuse_silu
from onnxtrain.lowering.fuse.fuse_slices import fuse_slices
from onnxtrain.lowering.fuse.fuse_updates import fuse_updates
from onnxtrain.lowering.fuse.pack_attention import pack_attention
from onnxtrain.lowering.fuse.skip_unread_columns import skip_unread_columns
from onnxtrain.lowering.join_scans import join_scans
from onnxtrain.lowering.kernels.lower_without_kernel import lower_without_kernel
from onnxtrain.lowering.kernels.multiply_in_bfloat16 import multiply_in_bfloat16
from onnxtrain.lowering.kernels.read_last_state import read_last_state
from onnxtrain.lowering.kernels.resolve_fused import resolve_fused
from onnxtrain.lowering.kernels.split_cross_entropy import split_cross_entropy
from onnxtrain.lowering.kernels.use_convolution_kernels import use_convolution_kernels
from onnxtrain.lowering.kernels.use_half_weights import use_half_weights
from onnxtrain.lowering.kernels.use_low_bit_kernels import use_low_bit_kernels
from onnxtrain.lowering.kernels.use_mask_kernels import use_mask_kernels
from onnxtrain.lowering.kernels.use_normalization_kernels import use_normalization_kernels
from onnxtrain.lowering.kernels.use_resize_kernels import use_resize_kernels
from onnxtrain.lowering.kernels.use_softmax_kernels import use_softmax_kernels
from onnxtrain.lowering.memory.number_layers import number_layers
from onnxtrain.lowering.memory.optimizer_in_backward import optimizer_in_backward
from onnxtrain.lowering.memory.recompute import check_patterns, recompute
from onnxtrain.lowering.memory.rematerialize_dequantized import rematerialize_dequantized
from onnxtrain.lowering.memory.reuse_activations import reuse_activations
from onnxtrain.lowering.memory.skip_ignored_rows import skip_ignored_rows
from onnxtrain.lowering.portable.provider_bodies import Portable
from onnxtrain.lowering.portable.shield_padded_weights import shield_padded_weights
from onnxtrain.lowering.round_states import check_states, round_states
from onnxtrain.lowering.synchronize_batch_norm import synchronize_batch_norm

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
    without Gradient nodes there is nothing to recompute, without optimizers nothing to update, and passes for recurrent
    layers, and for graphs that any runtime runs, are imported only where they are needed.

    Requires: a sorted graph with the wanted outputs. Ensures: a sorted graph of standard operators that any runtime
    runs; with ``kernels`` also of operators that the native library has.

    Args:
        model: A working copy. Its metadata holds the options of gradients
            (:class:`~onnxtrain.autodiff.options.GradientOptions`).
        kernels: True if the session loads the native kernels.
        derivative: A derivative to append as graph outputs ``{x}_grad``.
        portable: The provider that the graph is for, where it is not the CPU.
        updates: The optimizers that stay nodes although the rest is standard operators, since the session loads kernels
            of theirs for its provider (:mod:`onnxtrain.runtime.cuda_updates`).

    Raises:
        GradientError: A gradient cannot be built; matmuls are to be computed in bfloat16, which standard operators
            do not.
        OperatorError: An optimizer node has inputs, outputs or attributes that its operator does not accept.
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
    recurrent = any(node.op_type in ("GRU", "LSTM", "RNN") for node in all_nodes(graph))
    if recurrent:
        from onnxtrain.lowering.fuse.fuse_recurrent import fuse_recurrent
        from onnxtrain.lowering.kernels.split_recurrent_gradients import split_recurrent_gradients
        from onnxtrain.lowering.portable.write_activation_defaults import write_activation_defaults

        write_activation_defaults(model)  # of recurrent layers: ONNX Runtime has others
    counter_based_dropout(model)  # masks from counters that are states: a repeated step draws the same
    if kernels:
        skip_ignored_rows(graph)  # whose labels are ignored: their logits are not computed
        fold_batch_norm(model)  # of frozen layers, into their convolutions
        fuse_batch_norm(model)  # in training mode, with the activation behind it
        fuse_activations(model)  # Gelu: one node for five
        fuse_norms(model)  # RMS norm: one node for seven
        fuse_rotary(model)  # rotary embedding: one node for seven
        fuse_slices(model)  # consecutive slices: one Split, whose gradient is one Concat
        fuse_padding(model)  # zeros before a convolution: its own padding
        fuse_scatter(model)  # rows added at indices: one node that sorts them
        fuse_attention(model)  # scores, mask, softmax and matmul: one node
        pack_attention(graph)  # that reads queries, keys and values where one layer wrote them
        fuse_linear(model, frozen=rounds)  # matmul, transposition, bias and Relu: one node
        if recurrent:
            read_last_state(model)  # of a recurrent layer: its gradient is one step
            fuse_recurrent(model)  # LSTM, GRU, RNN that keep what their gradients read
    backward = Backward()
    for gradient in build_gradients(model, derivative):  # a Gradient node becomes the nodes that compute it
        backward += gradient
    join_scans(graph)  # sums over chunks in one pass with their gradient
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
        if recurrent:
            split_recurrent_gradients(model)  # values that their matmuls do not read are released before them
        split_cross_entropy(graph)  # the loss in parts that have kernels
        use_convolution_kernels(model)
        use_normalization_kernels(model)  # batch normalization in training mode that is not fused
        use_resize_kernels(model)  # bilinear and bicubic
        use_softmax_kernels(model)  # of the classes of every pixel
        use_low_bit_kernels(model)
        use_half_weights(model)  # matmuls read weights in 16 bits as they are stored
        multiply_in_bfloat16(model, wanted=rounds)  # linear layers, where asked for
        remove_unused(model)
        skip_unread_columns(graph)  # of a gradient that is split, where one part is wanted
        fuse_relu(graph)  # the gradient of Relu inside that of the matmul behind it
        fuse_gates(graph)  # the gradient of a gated unit: one node for four
        fuse_additions(graph)  # an adapter's output by its matmul, an embedding's or a norm's gradient in place
        fuse_gather(graph)  # rows that are only added up are read where they lie
        use_mask_kernels(graph)  # linear layers under masks skip what stays zero
        fuse_elementwise(graph)  # chains of elementwise operators: one node
        rematerialize_dequantized(graph)  # frozen low-bit weights are in float only while they are read
        optimizer_in_backward(graph)  # an update for every few layers, in the backward pass
        fuse_updates(model)  # clipping and masks inside the update
        check_states(graph)  # none in 8 bits outside the updates
        round_states(graph)  # those outside the updates
    else:
        from onnxtrain.lowering.portable.keep_provider_optimizers import keep_provider_optimizers
        from onnxtrain.lowering.portable.lower_optimizers import lower_optimizers

        check_states(graph)  # none in 8 bits
        kept = keep_provider_optimizers(model, updates)  # optimizers that the provider has kernels for
        lower_optimizers(model, kept)  # optimizers become their bodies
        round_states(graph)  # states in bfloat16
        clean(model)
        if kept:
            fuse_updates(model)  # clipping and masks inside the update
        graph.sort()
        for domain in (TRAINING_DOMAIN, ONNXTRAIN_DOMAIN):
            _forget_domain(model, domain)
        if portable is not None:
            from onnxtrain.lowering.portable.write_batch_norm import write_batch_norm

            write_batch_norm(model)  # which none of them has in training mode
        if portable == "cuda":
            from onnxtrain.lowering.portable.pad_evenly import pad_evenly

            pad_evenly(model)  # transposed convolutions, which CUDA's provider leaves to the CPU otherwise
        if portable == "webgpu":
            from onnxtrain.lowering.portable.target_webgpu import target_webgpu

            target_webgpu(model)  # only operators that the provider has
    return model


def _forget_domain(model: ir.Model, domain: str) -> None:
    """Drop the import of a domain that no node has any more."""
    if domain in model.graph.opset_imports and not any(node.domain == domain for node in all_nodes(model.graph)):
        model.graph.opset_imports.pop(domain)
