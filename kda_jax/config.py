"""Configurations as frozen dataclasses, and every rule that refuses one."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kda_jax.checks import check_bool, check_choice, check_gate_bound, check_integer, check_number
from kda_jax.hf_config import fields_from_hf, hf_from_config

MIXERS = ("kda", "mla")
FFNS = ("dense", "moe")
DTYPES = ("bfloat16", "float16", "float32")


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
    dtype: str = "bfloat16"  # of the weights, except the few that are fp32 always

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
            if self.num_expert_group > 1 and self.num_experts // self.num_expert_group < 2:
                raise ValueError(f"num_expert_group must leave two experts a group, got {self.num_expert_group}")
            if self.num_experts_per_token > self.topk_group * (self.num_experts // self.num_expert_group):
                raise ValueError(
                    f"num_experts_per_token must fit the {self.topk_group} groups of "
                    f"{self.num_experts // self.num_expert_group} experts kept, got {self.num_experts_per_token}"
                )
        for name in ("latent_norm_eps", "rms_norm_eps", "routed_scaling_factor", "initializer_range"):
            check_number(name, getattr(self, name), above=0)
        for name in ("moe_renormalize", "router_weight_uses_bias"):
            check_bool(name, getattr(self, name))
        check_choice("dtype", self.dtype, DTYPES)
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
        return cls(**fields_from_hf(raw))

    def to_hf(self) -> dict[str, Any]:
        """The keys of a ``config.json`` that ``from_hf`` reads back to an equal configuration.

        transformers reads them too when the value head has the key head's size and number and the gate is unbounded.
        """
        return hf_from_config(self)
