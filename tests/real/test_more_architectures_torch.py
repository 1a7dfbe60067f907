"""Architectures of transformers, opsets, functions and files of ONNX Runtime's tools, trained for three steps.

The trainable parameters equal PyTorch's; the weights after three steps equal PyTorch's in float64 within a hundredth of
their change; the saved file predicts as the trainer does.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from zoo.exported_modules import MODULES, SMALL, WORDS
from zoo.exporting import Exported, differences, export, module_class

torch = pytest.importorskip("torch")
from differential import reference  # noqa: E402
from zoo.gradients import distinct  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
DECODER = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "use_cache": False,
}
TOKENS, IMAGE = ((2, 6), (2, 6)), ((2, 3, 32, 32),)


def architecture(name: str, call: Any, **options: Any) -> Any:
    """Return a function that makes a model of transformers with random, trainable weights."""

    def build(torch: Any) -> Any:
        transformers = pytest.importorskip("transformers")
        kind = getattr(transformers, name)
        config = kind.config_class(**options)
        config._attn_implementation = "eager"
        model = kind(config).eval()
        return module_class(torch, call, model=model.requires_grad_(True))

    return build


def from_ids(self: Any, ids: Any, answers: Any) -> Any:
    return self.model(input_ids=ids, decoder_input_ids=answers, use_cache=False).logits


def from_image(self: Any, pixels: Any) -> Any:
    return self.model(pixel_values=pixels).logits


def detr(torch: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    more = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 4}
    build = architecture("DetrForObjectDetection", from_image, backbone_config=backbone, **more, **DECODER)
    return build(torch)


ARCHITECTURES = {
    "T5": Exported(
        architecture(
            "T5ForConditionalGeneration",
            from_ids,
            **WORDS,
            d_model=16,
            d_ff=32,
            d_kv=8,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        TOKENS,
        30,
    ),
    "BART": Exported(
        architecture("BartForConditionalGeneration", from_ids, **WORDS, **DECODER, max_position_embeddings=16),
        TOKENS,
        30,
        exporters=("dynamo",),  # the older one gives that buffer a number for a name
    ),
    "Whisper": Exported(
        architecture(
            "WhisperForConditionalGeneration",
            lambda self, sound, answers: (
                self.model(input_features=sound, decoder_input_ids=answers, use_cache=False).logits
            ),
            **WORDS,
            **DECODER,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        ((2, 8, 20), (2, 6)),
        30,
        exporters=("dynamo",),
    ),
    "MobileViT": Exported(
        architecture(
            "MobileViTForImageClassification",
            from_image,
            image_size=32,
            patch_size=2,
            hidden_sizes=[8, 12, 16],
            neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16],
            num_attention_heads=2,
        ),
        IMAGE,
    ),
    "EfficientNet": Exported(
        architecture(
            "EfficientNetForImageClassification",
            from_image,
            image_size=32,
            width_coefficient=0.25,
            depth_coefficient=0.25,
            hidden_dim=320,
        ),
        IMAGE,
    ),
    "SegFormer for maps": Exported(
        architecture(
            "SegformerForSemanticSegmentation",
            from_image,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_encoder_blocks=2,
            num_attention_heads=[1, 2],
            sr_ratios=[2, 1],
            patch_sizes=[7, 3],
            strides=[4, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=8,
        ),
        IMAGE,
    ),
    "DETR": Exported(detr, IMAGE),
    "Swin": Exported(
        architecture(
            "SwinForImageClassification",
            from_image,
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=4,
        ),
        ((2, 3, 16, 16),),
        exporters=("dynamo",),  # the older one writes biases of relative positions once for each pair
    ),
    "BEiT": Exported(
        architecture(
            "BeitForImageClassification",
            from_image,
            **SMALL,
            image_size=16,
            patch_size=8,
            use_relative_position_bias=True,
            use_mask_token=False,
        ),
        ((2, 3, 16, 16),),
    ),
    "ConvNeXt V2": Exported(
        architecture("ConvNextV2ForImageClassification", from_image, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
        IMAGE,
    ),
    "CLIP": MODULES["CLIP"],
    "Mamba": MODULES["Mamba"],
}
NO_PARAMETERS = {"BART": "*final_logits_bias", "DETR": "*.normalization.*"}
"""Buffers that a file holds as it holds parameters: its author has to say that they are none."""
NORMALIZED = ("MobileViT", "EfficientNet", "SegFormer for maps")
"""Models whose batch normalization the older exporter folds into weights, unlike PyTorch."""


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def three_steps(
    module: Any, model: onnx.ModelProto, inputs: tuple[np.ndarray, ...], path: Path, **options: Any
) -> None:
    """Compare three steps with PyTorch's, and predictions of the saved file with the trainer's."""
    table = onnxtrain.inspect(model).initializers
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=0.02)", **options)
    start = {name: np.array(array) for name, array in dict(trainer.weights).items()}
    trained = {name: array for name, array in start.items() if name in trainer.parameters}
    assert {row.name for row in table if row.trainable} >= set(trained)
    layout = reference.Layout(module, trained)
    assert layout.wrong == []
    known = {value for parameter in module.parameters() for value in parameter.detach().numpy().reshape(-1).tolist()}
    for name, array in held.items():
        if array.dtype == np.float32 and name not in trained and array.size > 1 and not options.get("tie"):
            assert not known.issuperset(array.reshape(-1).tolist()), f"{name} holds parameters"
    with torch.no_grad():
        shape = module(*map(torch.from_numpy, inputs)).shape
    target = np.random.default_rng(1).normal(size=tuple(shape)).astype(np.float32)
    plan = reference.Plan(
        [(inputs, target, None)] * 3, "mean_squared_error", {}, "SGD", {"momentum": 0.0}, [reference.single(0.02)] * 3
    )
    truth = reference.train(module, layout, trained, plan, torch.float64)
    found = [trainer.train_step(inputs if len(inputs) > 1 else inputs[0], target) for _ in range(3)]
    np.testing.assert_allclose(found, truth.losses, rtol=1e-4)
    after = dict(trainer.weights)
    largest = max(float(np.abs(value - trained[name]).max()) for name, value in truth.tensors.items())
    for name, value in truth.tensors.items():
        moved = float(np.linalg.norm(value - trained[name]))
        assert np.linalg.norm(after[name] - value) <= 0.01 * moved + 1e-4 * largest + 1e-6, name
    trainer.save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {info.name: array for info, array in zip(session.get_inputs(), inputs, strict=True)}
    predicted = trainer.predict(inputs if len(inputs) > 1 else inputs[0])
    np.testing.assert_allclose(session.run(None, feeds)[0], predicted, rtol=1e-3, atol=1e-4)


def three_steps_of_folded(
    parameters: dict[str, np.ndarray], model: onnx.ModelProto, inputs: tuple[np.ndarray, ...], path: Path
) -> None:
    """Take three steps on weights that the exporter folded: the loss falls, and the saved file predicts the same."""
    assert differences(parameters, model) == []
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=0.01)")
    target = 0 * trainer.predict(inputs[0])
    losses = [trainer.train_step(inputs[0], target) for _ in range(3)]
    assert losses[2] < losses[0]
    trainer.save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs[0]})[:1]
    np.testing.assert_allclose(found, trainer.predict(inputs[0]), rtol=1e-3, atol=1e-4)


def check(name: str, exporter: str, free: bool, folder: Path) -> None:
    case = ARCHITECTURES[name]
    torch.manual_seed(0)
    module = distinct(case.build(torch).eval())
    parameters, model = export(
        torch,
        case._replace(build=lambda torch: module),
        folder / "m.onnx",
        exporter,
        free=free,
        fresh=True,
        optimize=False,
    )
    inputs = tuple(tensor.numpy() for tensor in case.example(torch))
    if exporter == "torchscript" and name in NORMALIZED:
        three_steps_of_folded(parameters, model, inputs, folder / "trained.onnx")
        return
    options = {"freeze": NO_PARAMETERS[name]} if name in NO_PARAMETERS and exporter == "dynamo" else {}
    three_steps(module, model, inputs, folder / "trained.onnx", tie=True, **options)


def test_an_architecture_trains_as_in_pytorch(tmp_path):
    check("T5", "torchscript", True, tmp_path)


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize(
    ("name", "exporter"), [(name, exporter) for name, case in ARCHITECTURES.items() for exporter in case.exporters]
)
def test_architectures_train_as_in_pytorch(name, exporter, free, tmp_path):
    check(name, exporter, free and exporter in ARCHITECTURES[name].free, tmp_path)


def small_net() -> Any:
    torch.manual_seed(0)
    nn = torch.nn
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.GELU(),
        nn.Linear(8, 3),
    )
    return distinct(layers.eval())


PIXELS = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)


def exported(module: Any, path: Path, opset: int, **options: Any) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (torch.from_numpy(PIXELS),),
            str(path),
            opset_version=opset,
            verbose=False,
            input_names=["x"],
            **options,
        )
    return onnx.load(path)


@pytest.mark.parametrize(
    "opset", [pytest.param(n, marks=[] if n in (11, 17) else pytest.mark.thorough) for n in range(11, 21)]
)
def test_opsets_of_the_older_exporter(opset, tmp_path):
    module = small_net()
    three_steps(module, exported(module, tmp_path / "m.onnx", opset, dynamo=False), (PIXELS,), tmp_path / "t.onnx")


@pytest.mark.parametrize(
    "opset", [pytest.param(n, marks=[] if n == 23 else pytest.mark.thorough) for n in range(18, 24)]
)
def test_opsets_of_the_newer_exporter(opset, tmp_path):
    module = small_net()
    model = exported(module, tmp_path / "m.onnx", opset, dynamo=True, external_data=False)
    three_steps(module, model, (PIXELS,), tmp_path / "t.onnx")


def test_a_model_with_functions(tmp_path):
    module = distinct(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).eval())
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float[N, 4] x) => (float[N, 2] y) { h = own.Dense(x, w1, b1)  t = Tanh(h)  y = own.Dense(t, w2, b2) }
        <domain: "own", opset_import: ["": 17]> Dense (x, w, b) => (y) { y = Gemm <transB = 1> (x, w, b) }""")
    for name, array in zip(("w1", "b1", "w2", "b2"), module.parameters(), strict=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.detach().numpy(), name))
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    three_steps(module, model, (x,), tmp_path / "t.onnx")


@pytest.mark.parametrize("level", ["ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"])
def test_files_of_the_runtimes_optimizer(level, tmp_path):
    module = small_net()
    exported(module, tmp_path / "m.onnx", 17, dynamo=False)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), options, providers=["CPUExecutionProvider"])
    three_steps(module, onnx.load(tmp_path / "optimized.onnx"), (PIXELS,), tmp_path / "t.onnx")


class Calibration:
    """Two batches for the quantization tool."""

    def __init__(self) -> None:
        self.left = 2

    def get_next(self) -> dict[str, np.ndarray] | None:
        self.left -= 1
        return {"x": PIXELS} if self.left >= 0 else None


@pytest.mark.parametrize("kind", ["QDQ", "QOperator", "dynamic"])
def test_files_of_the_runtimes_quantization_tool(kind, tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    exported(small_net(), tmp_path / "m.onnx", 17, dynamo=False)
    source, path = str(tmp_path / "m.onnx"), str(tmp_path / "q.onnx")
    if kind == "dynamic":
        quantization.quantize_dynamic(source, path)
    else:
        quantization.quantize_static(source, path, Calibration(), quant_format=quantization.QuantFormat[kind])
    target = np.zeros((2, 3), np.float32)
    try:
        trainer = onnxtrain.Trainer(path, loss="mse", optimizer="sgd(lr=0.01)")
    except onnxtrain.errors.OnnxTrainError as error:
        message = str(error)
        assert "quantized" in message, message
    else:
        assert [hint for hint in trainer.hints if "quantized" in hint], trainer.hints
    if kind == "QDQ":
        trained = onnxtrain.Trainer(path, loss="mse", optimizer="sgd(lr=0.01)", qat=True)
        losses = [trained.train_step(PIXELS, target) for _ in range(5)]
        assert losses[-1] < losses[0]
        trained.save(tmp_path / "t.onnx")
