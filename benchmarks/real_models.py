"""Networks of real size for ``step.py``: built from their configurations, with random weights."""

from __future__ import annotations

from benchmark_model import TEXT, VOCABULARY, BenchmarkModel, architecture

REAL: dict[str, BenchmarkModel] = {
    model.name: model
    for model in (
        BenchmarkModel(
            "bert_base",
            "BERT-base, 12 layers, 768 wide, sequences of 128",
            architecture("bert", layers=12, width=768, heads=12, vocabulary=VOCABULARY),
            TEXT,
            vocabulary=VOCABULARY,
        ),
        BenchmarkModel(
            "gpt2_small",
            "GPT-2 small, 12 layers, 768 wide, sequences of 128",
            architecture("gpt2", layers=12, width=768, heads=12, vocabulary=50257, length=128, tied=True),
            TEXT,
            classes=50257,
            vocabulary=50257,
            labels=(128,),
        ),
        BenchmarkModel(
            "vit_b16",
            "ViT-B/16, 12 layers, 768 wide, 224x224",
            architecture("vit", layers=12, width=768, heads=12, image=224, patch=16, classes=1000),
            {"image": (3, 224, 224)},
            classes=1000,
        ),
        BenchmarkModel(
            "llama_110m",
            "Llama of 110 million, 12 layers, 768 wide, sequences of 128",
            architecture("llama", layers=12, width=768, inner=2048, heads=12, vocabulary=16000, length=128),
            TEXT,
            classes=16000,
            vocabulary=16000,
            labels=(128,),
        ),
        BenchmarkModel(
            "resnet50", "ResNet-50, 224x224", architecture("resnet50"), {"image": (3, 224, 224)}, classes=1000
        ),
    )
}
