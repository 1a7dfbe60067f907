"""Language models as onnxruntime-genai's builder writes them, with random weights: two layers of a decoder.

Packed queries, keys and values, GroupQueryAttention with its rotation inside, KV caches as inputs and outputs,
sums and normalizations in one node, weights in single or half precision or in blocks of 4 bits.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

WORDS, WIDTH, HEADS, GROUPS, SIZE, INNER, LAYERS, BLOCK = 40, 32, 2, 1, 16, 48, 2, 16

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class _Decoder:
    def __init__(self, dtype: str, bits: int | None, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype, self.bits = np.dtype(TYPES[dtype]), bits
        self.kind = helper.np_dtype_to_tensor_dtype(self.dtype)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def tensor(self, name: str, array: np.ndarray) -> str:
        self.tensors.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        return name

    def floats(self, name: str, array: np.ndarray) -> str:
        return self.tensor(name, array.astype(self.dtype))

    def node(self, operator: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: object) -> str:
        made = helper.make_node(operator, inputs, outputs, f"/{outputs[0]}/{operator}", domain=domain, **attributes)
        self.nodes.append(made)
        return outputs[0]

    def product(self, x: str, name: str, inputs: int, outputs: int) -> str:
        weight, result = f"model.{name}.MatMul.weight", f"{name}/output_0"
        if self.bits is None:
            array = self.rng.normal(size=(inputs, outputs)) / inputs**0.5
            return self.node("MatMul", [x, self.floats(weight, array)], [result])
        blocks = inputs // BLOCK
        integers = self.rng.integers(0, 256, (outputs, blocks, BLOCK * self.bits // 8), np.uint8)
        scales = self.rng.uniform(0.5, 1.5, (outputs, blocks)) / (inputs**0.5 * 2 ** (self.bits - 2))
        packed = [x, self.tensor(f"{weight}_Q{self.bits}", integers), self.floats(f"{weight}_scales", scales)]
        attributes = {"K": inputs, "N": outputs, "bits": self.bits, "block_size": BLOCK, "accuracy_level": 4}
        return self.node("MatMulNBits", packed, [result], "com.microsoft", **attributes)

    def layer(self, number: int, x: str, total: str) -> tuple[str, str]:
        """Return the normalized input of the next layer, and the residual sum."""
        name = f"layers.{number}"
        packed = self.product(x, f"{name}.attn.qkv_proj", WIDTH, (HEADS + 2 * GROUPS) * SIZE)
        past = [f"past_key_values.{number}.{part}" for part in ("key", "value")]
        present = [f"present.{number}.{part}" for part in ("key", "value")]
        self.node(
            "GroupQueryAttention",
            [packed, "", "", *past, "last_places", "longest", "cos_cache", "sin_cache"],
            [f"{name}/attn/output_0", *present],
            "com.microsoft",
            num_heads=HEADS,
            kv_num_heads=GROUPS,
            do_rotary=1,
            scale=SIZE**-0.5,
        )
        attended = self.product(f"{name}/attn/output_0", f"{name}.attn.o_proj", HEADS * SIZE, WIDTH)
        x, total = self.normalized(attended, total, f"{name}.post_attention_layernorm")
        gate = self.product(x, f"{name}.mlp.gate_proj", WIDTH, INNER)
        up = self.product(x, f"{name}.mlp.up_proj", WIDTH, INNER)
        sigmoid = self.node("Sigmoid", [gate], [f"{name}/sigmoid"])
        swish = self.node("Mul", [gate, sigmoid], [f"{name}/swish"])
        inner = self.node("Mul", [swish, up], [f"{name}/inner"])
        down = self.product(inner, f"{name}.mlp.down_proj", INNER, WIDTH)
        return self.normalized(down, total, f"{name}.output_layernorm")

    def normalized(self, x: str, total: str, name: str) -> tuple[str, str]:
        weight = self.floats(f"model.{name}.weight", self.rng.uniform(0.5, 1.5, WIDTH))
        outputs = [f"{name}/output_0", "", "", f"{name}/output_3"]
        self.node("SkipSimplifiedLayerNormalization", [total, x, weight], outputs, "com.microsoft", epsilon=1e-5)
        return outputs[0], outputs[3]

    def model(self) -> onnx.ModelProto:
        table = self.floats("model.embed_tokens.weight", self.rng.normal(size=(WORDS, WIDTH)))
        angles = np.arange(64)[:, None] * 100.0 ** -(np.arange(SIZE // 2) * 2 / SIZE)
        self.floats("cos_cache", np.cos(angles))
        self.floats("sin_cache", np.sin(angles))
        self.tensor("one", np.array([1]))
        self.node("ReduceSum", ["attention_mask", "one"], ["count"], keepdims=0)
        self.node("Sub", ["count", "one"], ["last"])
        self.node("Cast", ["last"], ["last_places"], to=TensorProto.INT32)
        self.node("Shape", ["attention_mask"], ["sizes"])
        self.node("Gather", ["sizes", self.tensor("place", np.array(1))], ["length"])
        self.node("Cast", ["length"], ["longest"], to=TensorProto.INT32)
        total = self.node("Gather", [table, "input_ids"], ["embedded"])
        weight = self.floats("model.layers.0.input_layernorm.weight", self.rng.uniform(0.5, 1.5, WIDTH))
        attributes = {"axis": -1, "epsilon": 1e-5, "stash_type": 1}
        x = self.node("SimplifiedLayerNormalization", [total, weight], ["normalized"], **attributes)
        for number in range(LAYERS):
            x, total = self.layer(number, x, total)
        self.nodes[-1].output[3] = ""
        head = self.product(x, "lm_head", WIDTH, WORDS)
        if self.kind == TensorProto.FLOAT:
            self.nodes[-1].output[0] = "logits"
        else:
            self.node("Cast", [head], ["logits"], to=TensorProto.FLOAT)
        return self.written()

    def written(self) -> onnx.ModelProto:
        info = helper.make_tensor_value_info
        inputs = [
            info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
            info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
        ]
        outputs = [info("logits", TensorProto.FLOAT, ["batch_size", "sequence_length", WORDS])]
        for number in range(LAYERS):
            for part in ("key", "value"):
                shape = ["batch_size", GROUPS, "past_sequence_length", SIZE]
                inputs.append(info(f"past_key_values.{number}.{part}", self.kind, shape))
                shape = ["batch_size", GROUPS, "total_sequence_length", SIZE]
                outputs.append(info(f"present.{number}.{part}", self.kind, shape))
        graph = helper.make_graph(self.nodes, "main_graph", inputs, outputs, self.tensors)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10, producer_name="onnxruntime-genai")


def language_model(dtype: str = "float32", bits: int | None = None, seed: int = 0) -> onnx.ModelProto:
    """Return a decoder with floating-point tensors of a type; ``bits`` quantizes the weights of linear layers."""
    return _Decoder(dtype, bits, seed).model()
