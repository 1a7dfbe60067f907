"""The default targets include PEFT's: by the names in its table, and on exports of transformers' architectures."""

import re

import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain.adapters.layers import AUTO, Layer, choose_layers
from onnxtrain.graph.patterns import alternatives

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TABLE  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

ATTENTION = "model.layers.0.self_attn"
LAYERS = {
    "t5": "encoder.block.0.layer.0.SelfAttention.{q,k,v,o} decoder.block.0.layer.1.EncDecAttention.{q,k,v,o}",
    "mt5": "encoder.block.0.layer.0.SelfAttention.{q,k,v,o} decoder.block.0.layer.1.EncDecAttention.{q,k,v,o}",
    "bart": "model.encoder.layers.0.self_attn.{q,k,v,out}_proj model.decoder.layers.0.encoder_attn.{q,k,v,out}_proj",
    "gpt2": "transformer.h.0.attn.{c_attn,c_proj}",
    "bloom": "transformer.h.0.self_attention.{query_key_value,dense}",
    "blip-2": "language_model.block.0.layer.0.SelfAttention.{q,k,v,o} language_model.layers.0.self_attn.{q,v}_proj",
    "opt": "model.decoder.layers.0.self_attn.{q,k,v,out}_proj",
    "gptj": "transformer.h.0.attn.{q,k,v,out}_proj",
    "gpt_neox": "gpt_neox.layers.0.attention.{query_key_value,dense}",
    "gpt_neo": "transformer.h.0.attn.attention.{q,k,v,out}_proj",
    "bert": "bert.encoder.layer.0.attention.self.{query,key,value} bert.encoder.layer.0.attention.output.dense",
    "roberta": "roberta.encoder.layer.0.attention.self.{query,key,value}",
    "xlm-roberta": "roberta.encoder.layer.0.attention.self.{query,key,value}",
    "electra": "electra.encoder.layer.0.attention.self.{query,key,value}",
    "deberta-v2": "deberta.encoder.layer.0.attention.self.{query,key,value}_proj",
    "deberta": "deberta.encoder.layer.0.attention.self.in_proj",
    "layoutlm": "layoutlm.encoder.layer.0.attention.self.{query,key,value}",
    "chatglm": "transformer.encoder.layers.0.self_attention.{query_key_value,dense}",
    "gpt_bigcode": "transformer.h.0.attn.{c_attn,c_proj}",
    "mpt": "transformer.blocks.0.attn.{Wqkv,out_proj}",
    "RefinedWebModel": "transformer.h.0.self_attention.{query_key_value,dense}",
    "RefinedWeb": "transformer.h.0.self_attention.{query_key_value,dense}",
    "falcon": "transformer.h.0.self_attention.{query_key_value,dense}",
    "btlm": "transformer.h.0.attn.{c_attn,c_proj} transformer.h.0.mlp.{c_fc,c_fc2,c_proj}",
    "codegen": "transformer.h.0.attn.{qkv_proj,out_proj}",
    "phi": "model.layers.0.self_attn.{q_proj,k_proj,v_proj,dense} model.layers.0.mlp.{fc1,fc2}",
    "gemma4": "model.language_model.layers.0.self_attn.{q,k,v,o}_proj",
    "rwkv": "rwkv.blocks.0.attention.{key,value,receptance,output} rwkv.blocks.0.feed_forward.{key,value,receptance}",
    "rwkv7": "model.layers.0.attn.{r,k,v,o}_proj model.layers.0.ffn.{key,value}",
    **dict.fromkeys(
        ["llama", "llama4", "mistral", "mixtral", "stablelm", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3"],
        f"{ATTENTION}.{{q,k,v,o}}_proj",
    ),
    "nemotron_h": "backbone.layers.0.mixer.{q,k,v,o}_proj",
}
"""The linear layers in and around attention, by architecture of PEFT's table."""


def layer(name):
    """A linear layer of this name, which others follow."""
    x, w, y = (ir.Value(name=f"{name}.{part}") for part in ("x", "weight", "y"))
    node = ir.Node("", "MatMul", [x, w], outputs=[y])
    for _ in range(2):  # two readers, as of any layer within a model
        ir.Node("", "Relu", [y])
    return Layer("MatMul", node, x, y, y, w, (name,), 4, 4)


def peft_chooses(target, name):
    """Return whether PEFT adapts a module for targets, a list of ends of names or a pattern for whole ones."""
    if isinstance(target, str):
        return re.fullmatch(target, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in target)


def test_all_architectures_of_the_table_have_names_here():
    assert set(TABLE) == set(LAYERS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", TABLE)
def test_names_of_the_table_are_default_targets(architecture):
    names = [name for pattern in LAYERS[architecture].split() for name in alternatives(pattern)]
    others = ["lm_head", "model.layers.0.mlp.gate_proj", "transformer.h.0.mlp.dense_h_to_4h", "pooler.dense"]
    wanted = {name for name in names if peft_chooses(TABLE[architecture], name)}
    assert wanted
    targets = TABLE[architecture]
    for target in [] if isinstance(targets, str) else targets:
        if (architecture, target) not in {("rwkv7", "o_proj"), ("blip-2", "q_proj")}:
            assert any(peft_chooses([target], name) for name in names), target
    found = {one.name for one in choose_layers([layer(name) for name in [*names, *others]], AUTO, None)}
    assert wanted <= found
    assert not found & set(others)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
NO_CACHE = {"use_cache": False, "tie_word_embeddings": False}
GPT = {"vocab_size": 40, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
MAKERS = {
    "bert": lambda t: (t.BertConfig(**SMALL, intermediate_size=24), t.BertForSequenceClassification),
    "electra": lambda t: (
        t.ElectraConfig(**SMALL, intermediate_size=24, embedding_size=16), t.ElectraForSequenceClassification,
    ),
    "gpt2": lambda t: (t.GPT2Config(**GPT, n_inner=24), t.GPT2LMHeadModel),
    "bloom": lambda t: (
        t.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2, **NO_CACHE), t.BloomForCausalLM,
    ),
    "gpt_neox": lambda t: (t.GPTNeoXConfig(**SMALL, intermediate_size=24, **NO_CACHE), t.GPTNeoXForCausalLM),
    "opt": lambda t: (
        t.OPTConfig(**SMALL, ffn_dim=24, word_embed_proj_dim=16, max_position_embeddings=16, **NO_CACHE),
        t.OPTForCausalLM,
    ),
    "phi": lambda t: (t.PhiConfig(**SMALL, intermediate_size=24, **NO_CACHE), t.PhiForCausalLM),
    "llama": lambda t: (t.LlamaConfig(**SMALL, intermediate_size=24, **NO_CACHE), t.LlamaForCausalLM),
    "t5": lambda t: (
        t.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, use_cache=False),
        t.T5EncoderModel,
    ),
    "deberta-v2": lambda t: (
        t.DebertaV2Config(**SMALL, intermediate_size=24), t.DebertaV2ForSequenceClassification,
    ),
}  # fmt: skip


class Output(torch.nn.Module):
    """The first output, and nothing else."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(input_ids=x, attention_mask=torch.ones_like(x))[0]


@pytest.mark.parametrize("architecture", MAKERS)
def test_exports_have_the_targets_of_peft(architecture, tmp_path):
    """The layers that PEFT adapts by default, and beside them only layers of attention."""
    config, maker = MAKERS[architecture](transformers)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    network = maker(config).eval()
    x = torch.ones(2, 6, dtype=torch.int64)
    dynamo = architecture in DYNAMO
    torch.onnx.export(Output(network), (x,), tmp_path / "model.onnx", dynamo=dynamo, external_data=False, verbose=False)
    trainer = onnxtrain.Trainer(tmp_path / "model.onnx", loss="mean_squared_error", lora=onnxtrain.Lora(rank=2))
    found = {name.split(".lora_")[0].removeprefix("network.") for name in trainer.parameters}
    adapted = peft.get_peft_model(network, peft.LoraConfig(r=2))
    wanted = {name.removeprefix("base_model.model.") for name, one in adapted.named_modules() if hasattr(one, "lora_A")}
    assert wanted
    assert all(any(name == one or name.endswith(f".{one}") for one in found) for name in wanted)  # OPT loses "model."
    further = {one for one in found if not any(name == one or name.endswith(f".{one}") for name in wanted)}
    assert all("attention" in name.lower() or "attn" in name for name in further), further


DYNAMO = {"gpt2", "llama"}
"""Architectures whose masks the older exporter cannot write."""
