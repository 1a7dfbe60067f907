"""One-node models of the optimizer operators on ONNX Runtime."""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime
from onnx import helper

TRAINING = "ai.onnx.preview.training"
GROUPS = {
    "Adagrad": ("XGH", "XH"),
    "Adam": ("XGVH", "XVH"),
    "LAMB": ("XGVH", "XVH"),
    "Momentum": ("XGV", "XV"),
    "SSGD": ("XG", "X"),
}
REQUIRED = {"Momentum": {"alpha": 0.95, "beta": 0.1, "norm_coefficient": 0.0, "mode": "standard"}}

# Operators other than the optimizers are registered for float and for double; what fits neither is refused by the
# runtime, in words of its own.
OTHER_TYPES = r"(no kernel def matches node inputs for Op: |Type Error: Type .* of operator \()%s"


def element_type(array):
    return helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)


def groups(name, attributes):
    return ("XGV", "XV") if name == "SSGD" and attributes.get("alpha") else GROUPS[name]


def node(name, inputs, outputs, **attributes):
    domain = "onnxtrain" if name in ("LAMB", "SSGD") else TRAINING
    return helper.make_node(name, inputs, outputs, domain=domain, **{**REQUIRED.get(name, {}), **attributes})


def session(
    path,
    nodes,
    inputs,
    outputs,
    threads=1,
    value_info=(),
    initializers=(),
    providers=("CPUExecutionProvider",),
    profile=None,
):
    """A session over the nodes; `inputs` and `outputs` are (name, element type, shape)."""
    graph = helper.make_graph(
        nodes,
        "optimizer",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        value_info=value_info,
        initializer=initializers,
    )
    opsets = [helper.make_opsetid(domain, 1) for domain in (TRAINING, "onnxtrain")]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), *opsets], ir_version=8)
    return _opened(model.SerializeToString(), path, threads, tuple(providers), profile)


@functools.lru_cache(maxsize=200)
def _opened(model, path, threads, providers, profile):
    """A session, which takes ten times as long to open as to run: calls of the same graph share one."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # in the way of other sessions
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile
    options.register_custom_ops_library(path)
    return onnxruntime.InferenceSession(model, options, providers=list(providers))


def run_node(path, operator, inputs, outputs, feeds, attributes, threads=1, wanted=None):
    """The outputs of one node by name: inputs that are not fed are left out, as are outputs that are not wanted."""
    names = [name if name in feeds else "" for name in inputs]
    kept = outputs if wanted is None else wanted
    produced = [name if name in kept else "" for name in outputs]
    for listed in (names, produced):
        while listed[-1] == "":
            listed.pop()
    kind = element_type(feeds[names[-1]])  # from which the runtime takes that of the outputs
    made = session(
        path,
        [helper.make_node(operator, names, produced, domain="onnxtrain", **attributes)],
        [(name, element_type(feeds[name]), None) for name in names if name],
        [(name, kind, None) for name in kept],
        threads,
    )
    return dict(zip(kept, made.run(None, {name: feeds[name] for name in names if name}), strict=True))


def optimizer_session(path, name, R, T, variables, threads=1, wanted=None, **attributes):
    """A session with one optimizer node for `variables`, lists of X, G and states; and its feeds.

    Shapes are left open, so that the node has to look for itself. `wanted` lists the outputs to keep.
    """
    inputs, outputs = groups(name, attributes)
    count = len(variables)
    feeds = {"R": np.asarray(R), "T": np.asarray(T)}
    for group, letter in enumerate(inputs):
        feeds |= {f"{letter}{i}": variables[i][group] for i in range(count)}
    produced = [f"{letter}{i}_new" for letter in outputs for i in range(count)]
    typed = [(out, element_type(feeds[out.removesuffix("_new")]), None) for out in produced]
    kept = [value for value in typed if wanted is None or value[0] in wanted]
    names = [out if wanted is None or out in wanted else "" for out in produced]
    made = session(
        path,
        [node(name, list(feeds), names, **attributes)],
        [(key, element_type(value), None) for key, value in feeds.items()],
        kept,
        threads,
    )
    return made, feeds


def run(path, name, R, T, variables, threads=1, wanted=None, **attributes):
    """The node's outputs, out of place."""
    made, feeds = optimizer_session(path, name, R, T, variables, threads, wanted, **attributes)
    return made.run(None, feeds)


def run_in_place(path, name, R, T, variables, threads=1, **attributes):
    """The node's outputs, written over copies of X and the states."""
    variables = [[np.array(array) for array in variable] for variable in variables]
    made, feeds = optimizer_session(path, name, R, T, variables, threads, **attributes)
    binding = made.io_binding()
    for key, array in feeds.items():
        binding.bind_input(key, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    outputs = [value.name for value in made.get_outputs()]
    for out in outputs:
        array = feeds[out.removesuffix("_new")]
        binding.bind_output(out, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    made.run_with_iobinding(binding)
    return [feeds[out.removesuffix("_new")] for out in outputs]
