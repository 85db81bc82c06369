"""The keys of a Hugging Face ``config.json``: what they mean here, and which of them are refused.

Two spellings are read, the one of the released Kimi-Linear files and the one transformers writes. Only features are
looked at, never ``model_type``: two models share the type ``kimi_linear`` and differ in their gates.
"""

from collections.abc import Mapping
from typing import Any

from kda_jax.checks import check_choice, check_integer

_ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_LINEAR_ALIASES = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "gate_lower_bound",
}

# key -> (values that leave the feature off, what any other value would switch on)
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "q_lora_rank": ((None,), "low-rank MLA queries (q-LoRA)"),
    "mla_use_output_gate": ((None, False), "the MLA output gate"),
    "attn_res_block_size": ((None, 0), "attention residuals"),
    "routed_expert_hidden_size": ((None,), "latent MoE"),
    "latent_moe_use_norm": ((None, False), "latent MoE"),
    "hidden_act": ((None, "silu"), "another activation than SiLU (SiTU, for one)"),
    "activation_situ_beta": ((None,), "the SiTU activation"),
    "quantization_config": ((None,), "quantised weights"),
    "attention_bias": ((None, False), "attention biases"),
    "tie_word_embeddings": ((None, False), "tied embeddings"),
    "mla_use_nope": ((None, True), "rotary positions in MLA"),
    "moe_router_activation_func": ((None, "sigmoid"), "another router activation than sigmoid"),
    "scoring_func": ((None, "sigmoid"), "another router activation than sigmoid"),
    "topk_method": ((None, "noaux_tc"), "another expert selection than noaux_tc"),
    "num_nextn_predict_layers": ((None, 0), "multi-token prediction layers"),
    "allow_neg_eigval": ((None, False), "write strengths above 1 (negative eigenvalues)"),
    "use_full_rank_gate": ((None, False), "the full-rank KDA output gate"),
}
_UNSUPPORTED_LINEAR = {key: _UNSUPPORTED[key] for key in ("use_full_rank_gate", "allow_neg_eigval")}


def fields_from_hf(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``ModelConfig`` that ``raw`` asks for; ``ValueError`` as ``ModelConfig.from_hf`` says."""
    if isinstance(raw.get("text_config"), Mapping):
        raw = {**raw["text_config"], **{k: raw[k] for k in ("quantization_config",) if k in raw}}
    linear = raw.get("linear_attn_config") or {}
    if not isinstance(linear, Mapping):
        raise ValueError(f"linear_attn_config must be an object, got {linear!r}")
    _refuse_unsupported(raw, _UNSUPPORTED)
    _refuse_unsupported(linear, _UNSUPPORTED_LINEAR, prefix="linear_attn_config.")

    def choose(key: str, found: dict[str, Any], default: tuple) -> Any:
        found = {name: value for name, value in found.items() if value is not None}
        if any(value != next(iter(found.values())) for value in found.values()):
            raise ValueError(f"{key}: two spellings disagree: {found}")
        if found:
            return next(iter(found.values()))
        if default:
            return default[0]
        raise ValueError(f"{key} is missing")

    def get(key: str, *default: Any) -> Any:
        return choose(key, {name: raw.get(name) for name in (key, _ALIASES.get(key, key))}, default)

    def get_linear(key: str, *default: Any) -> Any:
        alias = _LINEAR_ALIASES.get(key)
        found = {f"linear_attn_config.{key}": linear.get(key)} | ({alias: raw.get(alias)} if alias else {})
        return choose(f"linear_attn_config.{key}", found, default)

    layers = get("num_hidden_layers")
    check_integer("num_hidden_layers", layers, 1)
    heads = get("num_attention_heads")
    if get("num_key_value_heads", heads) != heads:
        raise ValueError(
            f"num_key_value_heads must equal num_attention_heads={heads}, got {raw['num_key_value_heads']}"
        )
    kda_heads, key_dim = get_linear("num_heads"), get_linear("head_dim")
    groups = get("num_expert_group", 1)
    if raw.get("use_grouped_topk") is False and groups != 1:
        raise ValueError(f"use_grouped_topk=False needs num_expert_group 1, got {groups!r}")
    has_moe = get("num_experts", None) is not None
    eos = get("eos_token_id", ())
    return {
        "vocab_size": get("vocab_size"),
        "hidden_size": get("hidden_size"),
        "mixer_kinds": _mixer_kinds(raw, linear, layers),
        "ffn_kinds": _ffn_kinds(raw, layers, has_moe),
        "intermediate_size": get("intermediate_size"),
        "kda_num_heads": kda_heads,
        "kda_num_value_heads": get_linear("num_v_heads", kda_heads),
        "kda_key_dim": key_dim,
        "kda_value_dim": get_linear("head_v_dim", key_dim),
        "conv_width": get_linear("short_conv_kernel_size", 4),
        "gate_lower_bound": get_linear("gate_lower_bound", None),
        "num_attention_heads": heads,
        "qk_nope_dim": get("qk_nope_head_dim"),
        "qk_rope_dim": get("qk_rope_head_dim"),
        "v_head_dim": get("v_head_dim"),
        "kv_lora_rank": get("kv_lora_rank"),
        "latent_norm_eps": get("latent_norm_eps", 1e-6),
        "num_experts": get("num_experts") if has_moe else 0,
        "num_experts_per_token": get("num_experts_per_token") if has_moe else 0,
        "num_shared_experts": get("num_shared_experts", 0) if has_moe else 0,
        "moe_intermediate_size": get("moe_intermediate_size") if has_moe else 0,
        "moe_renormalize": get("moe_renormalize", True),
        "routed_scaling_factor": get("routed_scaling_factor", 1.0),
        "num_expert_group": groups,
        "topk_group": get("topk_group", 1),
        "router_weight_uses_bias": get("router_weight_uses_bias", False),
        "rms_norm_eps": get("rms_norm_eps", 1e-5),
        "initializer_range": get("initializer_range", 0.02),
        "max_length": get("model_max_length", 1048576),
        "bos_token_id": get("bos_token_id", None),
        "eos_token_ids": tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        "pad_token_id": get("pad_token_id", None),
        "dtype": choose("dtype", {name: raw.get(name) for name in ("dtype", "torch_dtype")}, ("bfloat16",)),
    }


def hf_from_config(config: Any) -> dict[str, Any]:
    """The keys of a ``config.json`` for a ``ModelConfig``, in the released spelling; see ``ModelConfig.to_hf``."""
    positions = range(1, config.num_layers + 1)
    linear: dict[str, Any] = {
        "num_heads": config.kda_num_heads,
        "head_dim": config.kda_key_dim,
        "short_conv_kernel_size": config.conv_width,
        "full_attn_layers": [i for i in positions if config.mixer_kinds[i - 1] == "mla"],
        "kda_layers": [i for i in positions if config.mixer_kinds[i - 1] == "kda"],
    }
    if config.kda_num_value_heads != config.kda_num_heads:
        linear["num_v_heads"] = config.kda_num_value_heads
    if config.kda_value_dim != config.kda_key_dim:
        linear["head_v_dim"] = config.kda_value_dim
    if config.gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.gate_lower_bound
    eos = config.eos_token_ids
    raw: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "linear_attn_config": linear,
        "layer_types": ["full_attention" if m == "mla" else "linear_attention" for m in config.mixer_kinds],
        "mlp_layer_types": ["sparse" if f == "moe" else "dense" for f in config.ffn_kinds],
        "qk_nope_head_dim": config.qk_nope_dim,
        "qk_rope_head_dim": config.qk_rope_dim,
        "v_head_dim": config.v_head_dim,
        "kv_lora_rank": config.kv_lora_rank,
        "q_lora_rank": None,
        "mla_use_nope": True,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "model_max_length": config.max_length,
        "tie_word_embeddings": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": config.pad_token_id,
        "dtype": config.dtype,
    }
    if config.latent_norm_eps != 1e-6:
        raw["latent_norm_eps"] = config.latent_norm_eps
    if config.num_experts:
        raw |= {
            "num_experts": config.num_experts,
            "num_experts_per_token": config.num_experts_per_token,
            "num_shared_experts": config.num_shared_experts,
            "moe_intermediate_size": config.moe_intermediate_size,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": config.moe_renormalize,
            "routed_scaling_factor": config.routed_scaling_factor,
            "use_grouped_topk": True,
            "num_expert_group": config.num_expert_group,
            "topk_group": config.topk_group,
        }
        dense = config.ffn_kinds.count("dense")
        if all(kind == "moe" for kind in config.ffn_kinds[dense:]):
            raw |= {"first_k_dense_replace": dense, "moe_layer_freq": 1}
        if config.router_weight_uses_bias:
            raw["router_weight_uses_bias"] = True
    return raw


def _refuse_unsupported(raw: Mapping[str, Any], table: Mapping[str, tuple], prefix: str = "") -> None:
    for key, (off, feature) in table.items():
        if key in raw and raw[key] not in off:
            raise ValueError(f"{prefix}{key}={raw[key]!r} asks for {feature}, which is not implemented")


def _kinds(raw: Mapping[str, Any], key: str, names: Mapping[str, str], layers: int) -> tuple[str, ...] | None:
    values = raw.get(key)
    if values is None:
        return None
    if not isinstance(values, list | tuple) or len(values) != layers:
        raise ValueError(f"{key} must be a list of num_hidden_layers={layers} names, got {values!r}")
    for value in values:
        check_choice(key, value, tuple(names))
    return tuple(names[value] for value in values)


def _mixer_kinds(raw: Mapping[str, Any], linear: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    kinds = _kinds(raw, "layer_types", {"linear_attention": "kda", "full_attention": "mla"}, layers)
    kda, full = linear.get("kda_layers"), linear.get("full_attn_layers")
    if kda is None or full is None:
        if kinds is None:
            raise ValueError("linear_attn_config.kda_layers and .full_attn_layers (or layer_types) are missing")
        return kinds
    for name, numbers in (("kda_layers", kda), ("full_attn_layers", full)):
        if not isinstance(numbers, list | tuple):
            raise ValueError(f"linear_attn_config.{name} must be a list of layers counted from 1, got {numbers!r}")
        for number in numbers:
            check_integer(f"linear_attn_config.{name}", number, 1, layers)
    if sorted([*kda, *full]) != list(range(1, layers + 1)):
        raise ValueError(
            f"linear_attn_config: kda_layers and full_attn_layers must name each of the layers 1..{layers} once, "
            f"got {kda} and {full}"
        )
    listed = tuple("kda" if i in kda else "mla" for i in range(1, layers + 1))
    if kinds is not None and kinds != listed:
        raise ValueError("linear_attn_config and layer_types disagree about which layers are KDA")
    return listed


def _ffn_kinds(raw: Mapping[str, Any], layers: int, has_moe: bool) -> tuple[str, ...]:
    first, every = raw.get("first_k_dense_replace"), raw.get("moe_layer_freq")
    first_number, every_number = (1 if first is None else first), (1 if every is None else every)
    check_integer("first_k_dense_replace", first_number, 0)
    check_integer("moe_layer_freq", every_number, 1)
    counted = tuple(
        "moe" if has_moe and i >= first_number and i % every_number == 0 else "dense" for i in range(layers)
    )
    kinds = _kinds(raw, "mlp_layer_types", {"sparse": "moe", "dense": "dense"}, layers)
    if kinds is None:
        return counted
    if "moe" in kinds and not has_moe:
        raise ValueError("num_experts is missing, and mlp_layer_types names sparse layers")
    if first is not None and kinds != counted:
        raise ValueError(f"mlp_layer_types disagrees with first_k_dense_replace={first} (moe_layer_freq={every})")
    return kinds
