"""Model configurations: what is read, what is written, and what is refused by name."""

import dataclasses
import json

import pytest

from kda_jax import presets
from kda_jax.config import ModelConfig
from tests.golden_data import FOLDER
from tests.tiny import TINY, TINY_HF


def changed(**changes):
    """TINY's keys with changes; None removes a key, ``linear`` changes linear_attn_config."""
    raw = TINY.to_hf()
    linear = changes.pop("linear", {})
    for target, values in ((raw, changes), (raw["linear_attn_config"], linear)):
        for key, value in values.items():
            target.pop(key, None) if value is None else target.update({key: value})
    return raw


def refused(words, raw):
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_hf(raw)


def test_kimi_linear_48b():
    config = presets.load_config("kimi_linear_48b")
    mla = {4, 8, 12, 16, 20, 24, 27}
    assert config.mixer_kinds == tuple("mla" if i in mla else "kda" for i in range(1, 28))
    assert config.ffn_kinds == ("dense",) + ("moe",) * 26
    assert (config.kda_num_heads, config.kda_num_value_heads) == (32, 32)
    assert (config.kda_key_dim, config.kda_value_dim, config.kda_gate_rank) == (128, 128, 128)
    assert config.conv_channels == 12288
    assert config.latent_dim == 576
    assert config.gate_lower_bound is None
    assert config.routed_scaling_factor == 2.446
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (163584, (163586,), 163839)
    assert config.max_length == 1048576
    assert config.latent_norm_eps == 1e-6
    assert hash(config) == hash(presets.load_config("kimi_linear_48b"))


def test_what_transformers_writes_is_read():
    config = ModelConfig.from_file(FOLDER / "config.json")
    assert config.mixer_kinds == ("kda", "kda", "mla", "kda")
    assert config.ffn_kinds == ("dense", "moe", "moe", "moe")
    assert (config.kda_num_heads, config.kda_key_dim, config.kda_value_dim, config.conv_width) == (2, 32, 32, 4)
    assert (config.num_experts, config.num_experts_per_token, config.num_shared_experts) == (8, 2, 1)
    assert (config.max_length, config.moe_renormalize, config.dtype) == (512, True, "bfloat16")


CONFIGS = {
    "tiny": TINY,
    "tiny-hf": TINY_HF,
    "bounded": dataclasses.replace(TINY, gate_lower_bound=-5.0),
    "dense": dataclasses.replace(TINY, ffn_kinds=("dense",) * 3, num_experts=0, num_experts_per_token=0),
    "moe-first": dataclasses.replace(TINY, ffn_kinds=("moe", "dense", "moe")),
    "biased": dataclasses.replace(TINY, router_weight_uses_bias=True, latent_norm_eps=1e-5),
    "many-stops": dataclasses.replace(TINY, eos_token_ids=(2, 3)),
    "no-stops": dataclasses.replace(TINY, eos_token_ids=(), bos_token_id=None, pad_token_id=None),
    "grouped": dataclasses.replace(TINY, num_experts=8, num_expert_group=4, topk_group=2, moe_renormalize=False),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_written_and_read_back(tmp_path, config):
    if "moe" not in config.ffn_kinds:  # what only MoE layers have is not written without them
        config = dataclasses.replace(config, num_shared_experts=0, moe_intermediate_size=0, routed_scaling_factor=1.0)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert ModelConfig.from_file(tmp_path / "config.json") == config


ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


@pytest.mark.parametrize("key", ALIASES)
def test_both_spellings_are_read_and_must_agree(key):
    value = TINY.to_hf()[key]
    assert ModelConfig.from_hf(changed(**{key: None, ALIASES[key]: value})) == TINY
    assert ModelConfig.from_hf(changed(**{ALIASES[key]: value})) == TINY
    refused(f"{key}: two spellings disagree", changed(**{ALIASES[key]: value + 1}))


@pytest.mark.parametrize(
    ("key", "alias"),
    [
        ("num_heads", "linear_num_heads"),
        ("head_dim", "linear_head_dim"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    ],
)
def test_linear_attention_keys_at_the_top_level(key, alias):
    value = TINY.to_hf()["linear_attn_config"][key]
    assert ModelConfig.from_hf(changed(linear={key: None}, **{alias: value})) == TINY
    refused(f"{key}: two spellings disagree", changed(**{alias: value + 1}))


def test_layers_by_list_by_type_or_by_rule():
    without_lists = changed(linear={"kda_layers": None, "full_attn_layers": None})
    without_types = changed(layer_types=None, mlp_layer_types=None)
    assert ModelConfig.from_hf(without_lists) == ModelConfig.from_hf(without_types) == TINY
    by_rule = ModelConfig.from_hf(changed(mlp_layer_types=None, first_k_dense_replace=0, moe_layer_freq=2))
    assert by_rule.ffn_kinds == ("moe", "dense", "moe")


def test_a_text_config_inside_another():
    assert ModelConfig.from_hf({"model_type": "outer", "text_config": TINY.to_hf()}) == TINY
    refused("quantised weights", {"text_config": TINY.to_hf(), "quantization_config": {"format": "mxfp4"}})


def test_model_type_and_vestigial_keys_switch_nothing():
    raw = changed(model_type="anything", rope_theta=1e4, rope_scaling={"type": "yarn"}, head_dim=72, use_cache=False)
    assert ModelConfig.from_hf(raw) == TINY


FEATURES = {
    "q_lora_rank": (1536, "q-LoRA"),
    "mla_use_output_gate": (True, "MLA output gate"),
    "attn_res_block_size": (12, "attention residuals"),
    "routed_expert_hidden_size": (3584, "latent MoE"),
    "latent_moe_use_norm": (True, "latent MoE"),
    "hidden_act": ("situ", "SiTU"),
    "activation_situ_beta": (4.0, "SiTU"),
    "quantization_config": ({"format": "x"}, "quantised weights"),
    "attention_bias": (True, "attention biases"),
    "tie_word_embeddings": (True, "tied embeddings"),
    "mla_use_nope": (False, "rotary positions"),
    "moe_router_activation_func": ("softmax", "router activation"),
    "topk_method": ("greedy", "expert selection"),
    "num_nextn_predict_layers": (1, "multi-token prediction"),
    "allow_neg_eigval": (True, "negative eigenvalues"),
    "use_full_rank_gate": (True, "full-rank KDA output gate"),
}


@pytest.mark.parametrize("key", FEATURES)
def test_features_that_do_not_exist_are_refused_by_name(key):
    value, feature = FEATURES[key]
    refused(f"{key}=.*{feature}.*not implemented", changed(**{key: value}))


@pytest.mark.parametrize("key", ["use_full_rank_gate", "allow_neg_eigval"])
def test_features_of_the_linear_attention_too(key):
    refused(f"linear_attn_config.{key}=True asks for", changed(linear={key: True}))
    assert ModelConfig.from_hf(changed(linear={key: False})) == TINY


@pytest.mark.parametrize(
    "key",
    [
        *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"),
        *("num_experts_per_token", "moe_intermediate_size"),
    ],
)
def test_missing_keys_are_named(key):
    refused(f"{key} is missing", changed(**{key: None}))


def test_missing_linear_attention_is_named():
    refused("linear_attn_config.num_heads is missing", changed(linear_attn_config=None))
    refused("num_experts is missing", changed(num_experts=None))
    refused("kda_layers", changed(linear={"kda_layers": None}, layer_types=None))


@pytest.mark.parametrize(
    ("words", "raw"),
    [
        ("num_key_value_heads must equal", changed(num_key_value_heads=1)),
        ("each of the layers 1..3 once", changed(linear={"kda_layers": [1, 2, 3]}, layer_types=None)),
        ("each of the layers 1..3 once", changed(linear={"kda_layers": [1]}, layer_types=None)),
        ("kda_layers must be an integer in \\[1, 3\\]", changed(linear={"kda_layers": [0, 1]}, layer_types=None)),
        ("kda_layers must be a list", changed(linear={"kda_layers": 3}, layer_types=None)),
        ("disagree about which layers", changed(layer_types=["full_attention"] + ["linear_attention"] * 2)),
        ("layer_types must be a list of num_hidden_layers=3", changed(layer_types=["full_attention"])),
        ("layer_types must be one of", changed(layer_types=["sliding"] * 3)),
        ("mlp_layer_types must be one of", changed(mlp_layer_types=["fat"] * 3)),
        ("mlp_layer_types disagrees", changed(mlp_layer_types=["sparse"] * 3)),
        ("linear_attn_config must be an object", changed(linear_attn_config=[1])),
        ("use_grouped_topk", changed(use_grouped_topk=False, num_expert_group=2)),
        ("num_hidden_layers must be an integer", changed(num_hidden_layers="3")),
    ],
)
def test_contradictions_are_named(words, raw):
    refused(words, raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", "24"),
        ("kda_key_dim", 6.0),
        ("kda_num_value_heads", 3),
        ("conv_width", 1),
        ("qk_rope_dim", -1),
        ("gate_lower_bound", -5.5),
        ("gate_lower_bound", 0.0),
        ("gate_lower_bound", float("nan")),
        ("gate_lower_bound", True),
        ("num_experts_per_token", 5),
        ("num_expert_group", 3),
        ("num_expert_group", 4),
        ("topk_group", 2),
        ("rms_norm_eps", 0),
        ("routed_scaling_factor", float("inf")),
        ("moe_renormalize", "yes"),
        ("dtype", "float8"),
        ("eos_token_ids", (-1,)),
        ("bos_token_id", 1.5),
        ("mixer_kinds", ()),
        ("mixer_kinds", ("kda", "mamba", "kda")),
        ("ffn_kinds", ("dense", "moe")),
    ],
)
def test_fields_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(TINY, **{field: value})


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff\xfe"])
def test_a_damaged_file_is_named(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_file(file)
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        ModelConfig.from_file(tmp_path / "nowhere.json")


def test_a_refusal_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed(q_lora_rank=3)))
    with pytest.raises(ValueError, match=r"config\.json: q_lora_rank=3"):
        ModelConfig.from_file(tmp_path / "config.json")
