"""Configurations as frozen dataclasses, and every rule that refuses one.

``ModelConfig.from_hf`` reads the ``config.json`` of a Hugging Face folder. It looks at features, never at
``model_type``: two models share the type ``kimi_linear`` and differ in their gates.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MIXERS = ("kda", "mla")
FFNS = ("dense", "moe")

# transformers writes these under other names than the released files
_ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}

# key -> (values that leave the feature off, what it would switch on)
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "q_lora_rank": ((None,), "low-rank MLA queries (q-LoRA)"),
    "mla_use_output_gate": ((None, False), "the MLA output gate"),
    "attn_res_block_size": ((None, 0), "attention residuals"),
    "routed_expert_hidden_size": ((None,), "latent MoE"),
    "latent_moe_use_norm": ((None, False), "latent MoE"),
    "activation_situ_beta": ((None,), "the SiTU activation"),
    "quantization_config": ((None,), "quantised weights"),
    "attention_bias": ((None, False), "attention biases"),
    "tie_word_embeddings": ((None, False), "tied embeddings"),
    "mla_use_nope": ((None, True), "rotary positions in MLA"),
    "moe_router_activation_func": ((None, "sigmoid"), "another router activation"),
    "hidden_act": ((None, "silu"), "another activation"),
    "num_nextn_predict_layers": ((None, 0), "multi-token prediction layers"),
    "allow_neg_eigval": ((None, False), "write strengths above 1 (negative eigenvalues)"),
}
_UNSUPPORTED_LINEAR: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_full_rank_gate": ((None, False), "the full-rank KDA output gate"),
    "allow_neg_eigval": ((None, False), "write strengths above 1 (negative eigenvalues)"),
}


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ``ValueError`` naming ``name`` unless ``value`` is an integer in ``[low, high]``."""
    bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be an integer {bound}, got {value!r}")


def check_choice(name: str, value: Any, allowed: tuple) -> None:
    """Raise ``ValueError`` naming ``name`` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A KDA/MLA hybrid language model. Hashable, so it can be a static argument of ``jax.jit``.

    Dimensions are counts of elements; ``*_heads`` are counts of heads; token ids are indices below ``vocab_size``.
    """

    vocab_size: int
    hidden_size: int
    mixer_kinds: tuple[str, ...]  # per layer, "kda" or "mla"
    ffn_kinds: tuple[str, ...]  # per layer, "dense" or "moe"
    intermediate_size: int  # width of a dense layer
    # KDA
    kda_num_heads: int
    kda_num_value_heads: int
    kda_key_dim: int
    kda_value_dim: int
    conv_width: int = 4
    gate_lower_bound: float | None = None  # None: softplus gate; else the bounded gate
    # MLA
    num_attention_heads: int = 1
    qk_nope_dim: int = 128
    qk_rope_dim: int = 64
    v_head_dim: int = 128
    kv_lora_rank: int = 512
    latent_norm_eps: float = 1e-6
    # MoE
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    router_weight_uses_bias: bool = False  # True: as the released remote code computes it (an aliasing quirk there)
    # the rest
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_length: int = 1048576
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "bfloat16"  # what the checkpoint stores

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "kda_num_heads", "kda_num_value_heads"):
            check_integer(name, getattr(self, name), 1)
        for name in ("kda_key_dim", "kda_value_dim", "num_attention_heads", "qk_nope_dim", "v_head_dim"):
            check_integer(name, getattr(self, name), 1)
        for name in ("kv_lora_rank", "max_length"):
            check_integer(name, getattr(self, name), 1)
        check_integer("qk_rope_dim", self.qk_rope_dim, 0)
        check_integer("conv_width", self.conv_width, 2)
        if len(self.mixer_kinds) != len(self.ffn_kinds) or not self.mixer_kinds:
            raise ValueError(
                f"mixer_kinds and ffn_kinds must name the same layers, got {len(self.mixer_kinds)} and "
                f"{len(self.ffn_kinds)}"
            )
        for kind in self.mixer_kinds:
            check_choice("mixer_kinds", kind, MIXERS)
        for kind in self.ffn_kinds:
            check_choice("ffn_kinds", kind, FFNS)
        if self.kda_num_value_heads % self.kda_num_heads:
            raise ValueError(
                f"kda_num_value_heads must be a multiple of kda_num_heads={self.kda_num_heads}, "
                f"got {self.kda_num_value_heads}"
            )
        check_gate_bound("gate_lower_bound", self.gate_lower_bound)
        if "moe" in self.ffn_kinds:
            check_integer("num_experts", self.num_experts, 1)
            check_integer("num_experts_per_token", self.num_experts_per_token, 1, self.num_experts)
            check_integer("num_shared_experts", self.num_shared_experts, 0)
            check_integer("moe_intermediate_size", self.moe_intermediate_size, 1)
            check_integer("num_expert_group", self.num_expert_group, 1, self.num_experts)
            check_integer("topk_group", self.topk_group, 1, self.num_expert_group)
            if self.num_experts % self.num_expert_group:
                raise ValueError(
                    f"num_experts must be a multiple of num_expert_group={self.num_expert_group}, "
                    f"got {self.num_experts}"
                )
            if self.num_experts_per_token > self.topk_group * (self.num_experts // self.num_expert_group):
                raise ValueError(
                    f"num_experts_per_token must fit the {self.topk_group} groups of "
                    f"{self.num_experts // self.num_expert_group} experts kept, got {self.num_experts_per_token}"
                )
            if self.num_expert_group > 1 and self.num_experts // self.num_expert_group < 2:
                raise ValueError(f"num_expert_group must leave two experts a group, got {self.num_expert_group}")
        check_choice("dtype", self.dtype, ("bfloat16", "float16", "float32"))
        for name in ("bos_token_id", "pad_token_id"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0)
        for token in self.eos_token_ids:
            check_integer("eos_token_ids", token, 0)

    @property
    def num_layers(self) -> int:
        return len(self.mixer_kinds)

    @property
    def num_kda_layers(self) -> int:
        return self.mixer_kinds.count("kda")

    @property
    def num_mla_layers(self) -> int:
        return self.mixer_kinds.count("mla")

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: ``2*H*K + HV*V``."""
        return 2 * self.kda_num_heads * self.kda_key_dim + self.kda_num_value_heads * self.kda_value_dim

    @property
    def kda_gate_rank(self) -> int:
        """Rank of the low-rank decay and output gates: the value head dimension."""
        return self.kda_value_dim

    @property
    def latent_dim(self) -> int:
        """Values an MLA layer caches per token: normed latent, then the shared key."""
        return self.kv_lora_rank + self.qk_rope_dim

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Read a ``config.json``. Raises ``ValueError`` naming the file when it can't be read."""
        path = Path(path)
        try:
            raw = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a readable config.json ({error})") from None
        if not isinstance(raw, Mapping):
            raise ValueError(f"{path}: a config.json holds an object, got {type(raw).__name__}")
        try:
            return cls.from_hf(raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Make a configuration from the keys of a Hugging Face ``config.json`` (released or transformers' spelling).

        Raises ``ValueError`` naming the key when one is missing, contradicts another, or switches on a feature that
        is not implemented. Keys that switch nothing are ignored.
        """
        if isinstance(raw.get("text_config"), Mapping):
            raw = {**raw["text_config"], **{k: raw[k] for k in ("quantization_config",) if k in raw}}
        linear = raw.get("linear_attn_config") or {}
        _refuse_unsupported(raw, _UNSUPPORTED)
        _refuse_unsupported(linear, _UNSUPPORTED_LINEAR, prefix="linear_attn_config.")

        def get(key: str, *default: Any) -> Any:
            found = {name: raw[name] for name in (key, _ALIASES.get(key)) if raw.get(name) is not None}
            if len(set(map(str, found.values()))) > 1:
                raise ValueError(f"{key}: two spellings disagree: {found}")
            if found:
                return next(iter(found.values()))
            if default:
                return default[0]
            raise ValueError(f"{key} is missing")

        def get_linear(key: str, alias: str | None, *default: Any) -> Any:
            if linear.get(key) is not None:
                return linear[key]
            if alias is not None and raw.get(alias) is not None:
                return raw[alias]
            if default:
                return default[0]
            raise ValueError(f"linear_attn_config.{key} is missing")

        layers = get("num_hidden_layers")
        check_integer("num_hidden_layers", layers, 1)
        heads = get("num_attention_heads")
        if get("num_key_value_heads", heads) != heads:
            raise ValueError(
                f"num_key_value_heads must equal num_attention_heads={heads}, got {raw['num_key_value_heads']}"
            )
        kda_heads, key_dim = get_linear("num_heads", "linear_num_heads"), get_linear("head_dim", "linear_head_dim")
        has_moe = get("num_experts", None) is not None
        eos = get("eos_token_id", ())
        return cls(
            vocab_size=get("vocab_size"),
            hidden_size=get("hidden_size"),
            mixer_kinds=_mixer_kinds(raw, linear, layers),
            ffn_kinds=_ffn_kinds(raw, layers, has_moe),
            intermediate_size=get("intermediate_size"),
            kda_num_heads=kda_heads,
            kda_num_value_heads=get_linear("num_v_heads", None, kda_heads),
            kda_key_dim=key_dim,
            kda_value_dim=get_linear("head_v_dim", None, key_dim),
            conv_width=get_linear("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
            gate_lower_bound=get_linear("gate_lower_bound", "gate_lower_bound", None),
            num_attention_heads=heads,
            qk_nope_dim=get("qk_nope_head_dim"),
            qk_rope_dim=get("qk_rope_head_dim"),
            v_head_dim=get("v_head_dim"),
            kv_lora_rank=get("kv_lora_rank"),
            latent_norm_eps=get("latent_norm_eps", 1e-6),
            num_experts=get("num_experts") if has_moe else 0,
            num_experts_per_token=get("num_experts_per_token") if has_moe else 0,
            num_shared_experts=get("num_shared_experts", 0) if has_moe else 0,
            moe_intermediate_size=get("moe_intermediate_size") if has_moe else 0,
            moe_renormalize=get("moe_renormalize", True),
            routed_scaling_factor=get("routed_scaling_factor", 1.0),
            num_expert_group=get("num_expert_group", 1),
            topk_group=get("topk_group", 1),
            router_weight_uses_bias=get("router_weight_uses_bias", False),
            rms_norm_eps=get("rms_norm_eps", 1e-5),
            initializer_range=get("initializer_range", 0.02),
            max_length=get("model_max_length", 1048576),
            bos_token_id=get("bos_token_id", None),
            eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
            pad_token_id=get("pad_token_id", None),
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "bfloat16",
        )

    def to_hf(self) -> dict[str, Any]:
        """The keys of a ``config.json`` that ``from_hf`` reads back to an equal configuration.

        transformers reads them too when the value head has the key head's size and number.
        """
        positions = range(1, self.num_layers + 1)
        linear: dict[str, Any] = {
            "num_heads": self.kda_num_heads,
            "head_dim": self.kda_key_dim,
            "short_conv_kernel_size": self.conv_width,
            "full_attn_layers": [i for i in positions if self.mixer_kinds[i - 1] == "mla"],
            "kda_layers": [i for i in positions if self.mixer_kinds[i - 1] == "kda"],
        }
        if self.kda_num_value_heads != self.kda_num_heads:
            linear["num_v_heads"] = self.kda_num_value_heads
        if self.kda_value_dim != self.kda_key_dim:
            linear["head_v_dim"] = self.kda_value_dim
        if self.gate_lower_bound is not None:
            linear["gate_lower_bound"] = self.gate_lower_bound
        raw: dict[str, Any] = {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_attention_heads,
            "linear_attn_config": linear,
            "layer_types": ["full_attention" if m == "mla" else "linear_attention" for m in self.mixer_kinds],
            "mlp_layer_types": ["sparse" if f == "moe" else "dense" for f in self.ffn_kinds],
            "qk_nope_head_dim": self.qk_nope_dim,
            "qk_rope_head_dim": self.qk_rope_dim,
            "v_head_dim": self.v_head_dim,
            "kv_lora_rank": self.kv_lora_rank,
            "q_lora_rank": None,
            "mla_use_nope": True,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range,
            "model_max_length": self.max_length,
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None,
            "pad_token_id": self.pad_token_id,
            "dtype": self.dtype,
        }
        if self.latent_norm_eps != 1e-6:
            raw["latent_norm_eps"] = self.latent_norm_eps
        if "moe" in self.ffn_kinds:
            raw |= {
                "num_experts": self.num_experts,
                "num_experts_per_token": self.num_experts_per_token,
                "num_shared_experts": self.num_shared_experts,
                "moe_intermediate_size": self.moe_intermediate_size,
                "moe_router_activation_func": "sigmoid",
                "moe_renormalize": self.moe_renormalize,
                "routed_scaling_factor": self.routed_scaling_factor,
                "num_expert_group": self.num_expert_group,
                "topk_group": self.topk_group,
            }
            if self.router_weight_uses_bias:
                raw["router_weight_uses_bias"] = True
        return raw


def check_gate_bound(name: str, bound: float | None) -> None:
    """Raise ``ValueError`` naming ``name`` unless ``bound`` is None or in ``[-5, 0)``."""
    if bound is not None and not (isinstance(bound, int | float) and math.isfinite(bound) and -5 <= bound < 0):
        raise ValueError(f"{name} must be None or in [-5, 0), got {bound!r}")


def _refuse_unsupported(raw: Mapping[str, Any], table: Mapping[str, tuple], prefix: str = "") -> None:
    for key, (off, feature) in table.items():
        if key in raw and raw[key] not in off:
            raise ValueError(f"{prefix}{key}={raw[key]!r} asks for {feature}, which is not implemented")


def _mixer_kinds(raw: Mapping[str, Any], linear: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    kinds: dict[str, tuple[str, ...]] = {}
    if linear.get("kda_layers") is not None and linear.get("full_attn_layers") is not None:
        kda, full = linear["kda_layers"], linear["full_attn_layers"]
        if sorted([*kda, *full]) != list(range(1, layers + 1)):
            raise ValueError(
                f"linear_attn_config: kda_layers and full_attn_layers must name each of the layers 1..{layers} once, "
                f"got {kda} and {full}"
            )
        kinds["linear_attn_config"] = tuple("kda" if i in kda else "mla" for i in range(1, layers + 1))
    if raw.get("layer_types") is not None:
        names = {"linear_attention": "kda", "full_attention": "mla"}
        for name in raw["layer_types"]:
            check_choice("layer_types", name, tuple(names))
        kinds["layer_types"] = tuple(names[name] for name in raw["layer_types"])
        if len(kinds["layer_types"]) != layers:
            raise ValueError(
                f"layer_types must have num_hidden_layers={layers} entries, got {len(kinds['layer_types'])}"
            )
    if not kinds:
        raise ValueError("linear_attn_config.kda_layers and .full_attn_layers (or layer_types) are missing")
    if len(set(kinds.values())) > 1:
        raise ValueError("linear_attn_config and layer_types disagree about which layers are KDA")
    return next(iter(kinds.values()))


def _ffn_kinds(raw: Mapping[str, Any], layers: int, has_moe: bool) -> tuple[str, ...]:
    if raw.get("mlp_layer_types") is not None:
        names = {"sparse": "moe", "dense": "dense"}
        for name in raw["mlp_layer_types"]:
            check_choice("mlp_layer_types", name, tuple(names))
        kinds = tuple(names[name] for name in raw["mlp_layer_types"])
        if len(kinds) != layers:
            raise ValueError(f"mlp_layer_types must have num_hidden_layers={layers} entries, got {len(kinds)}")
    else:
        first, every = raw.get("first_k_dense_replace", 1), raw.get("moe_layer_freq") or 1
        check_integer("first_k_dense_replace", first, 0)
        check_integer("moe_layer_freq", every, 1)
        kinds = tuple("moe" if has_moe and i >= first and i % every == 0 else "dense" for i in range(layers))
    if "moe" in kinds and not has_moe:
        raise ValueError("num_experts is missing, and mlp_layer_types names sparse layers")
    return kinds
