"""Write transposed convolutions with equal padding at both ends, which CUDA's provider computes."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.windows import END
from onnxtrain.graph import Builder
from onnxtrain.graph.replace import remove_nodes, take_over


def pad_evenly(model: ir.Model) -> None:
    """Give every ConvTranspose whose padding differs between the ends of an axis the smaller one, in place.

    Padding of a transposed convolution cuts its output; a Slice cuts the rest. ONNX Runtime's CUDA provider leaves
    nodes of unequal padding to the CPU, with copies of all their tensors.

    Requires: nothing. Ensures: no ConvTranspose with unequal padding, but those whose padding only the run knows.
    """
    for graph in [model.graph, *model.graph.subgraphs()]:
        assert isinstance(graph, ir.Graph)
        for node in list(graph):
            if node.domain or node.op_type != "ConvTranspose" or "pads" not in node.attributes:
                continue
            if "output_shape" in node.attributes:  # the padding follows from it
                continue
            pads = node.attributes["pads"].as_ints()
            begin, end = pads[: len(pads) // 2], pads[len(pads) // 2 :]
            if tuple(begin) == tuple(end):
                continue
            op = Builder(graph, model.graph.opset_imports[""], before=node)
            op.scope = node.name or "transposed convolution"
            even = [min(ends) for ends in zip(begin, end, strict=True)]
            given = {name: attribute.value for name, attribute in node.attributes.items()} | {"pads": [*even, *even]}
            inputs = [None if value is None else op.wrap(value) for value in node.inputs]
            y = op.ConvTranspose(*inputs, **given)
            starts = [b - e for b, e in zip(begin, even, strict=True)]
            stops = [e - b if b > e else END for b, e in zip(end, even, strict=True)]
            cut = op.Slice(y, op.ints(*starts), op.ints(*stops), op.ints(*range(2, 2 + len(even))))
            take_over(graph, {node.outputs[0]: cut.ir})
            remove_nodes(graph, [node])
