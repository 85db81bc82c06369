"""The parameter pytree: what each block owns, with its shapes.

Linear weights are stored ``[out, in]`` and applied as ``y = x W^T``; there are no biases except where named.
Symbols: ``D`` hidden size, ``H`` query/key heads, ``HV`` value heads, ``K`` key head dim, ``V`` value head dim,
``Wc`` width of the short convolution, ``r`` MLA latent rank, ``E`` experts, ``I`` expert width, ``F`` dense width.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kda_jax.config import ModelConfig

Array = jax.Array | jax.ShapeDtypeStruct


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KDAParams:
    """One Kimi Delta Attention layer. ``A_log`` and ``dt_bias`` are fp32 whatever the model dtype."""

    q_proj: Array  # [H*K, D]
    k_proj: Array  # [H*K, D]
    v_proj: Array  # [HV*V, D]
    conv: Array  # [2*H*K + HV*V, Wc]: q, k, v channels in this order
    f_a_proj: Array  # [rank, D]
    f_b_proj: Array  # [HV*K, rank]
    A_log: Array  # [HV] fp32
    dt_bias: Array  # [HV, K] fp32
    b_proj: Array  # [HV, D]
    g_a_proj: Array  # [rank, D]
    g_b_proj: Array  # [HV*V, rank]
    o_norm: Array  # [V]
    o_proj: Array  # [D, HV*V]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MLAParams:
    """One multi-head latent attention layer without positions (NoPE)."""

    q_proj: Array  # [Hm*(nope+rope), D]
    kv_a_proj: Array  # [r+rope, D]
    kv_a_norm: Array  # [r]
    kv_b_proj: Array  # [Hm*(nope+v), r]
    o_proj: Array  # [D, Hm*v]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MLPParams:
    """A gated MLP: the dense feed-forward block, and the shared experts fused into one."""

    gate_proj: Array  # [F, D]
    up_proj: Array  # [F, D]
    down_proj: Array  # [D, F]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEParams:
    """Routed experts. ``router`` and ``router_bias`` are fp32 whatever the model dtype."""

    router: Array  # [E, D] fp32
    router_bias: Array  # [E] fp32, used for selection (and for weights only on request)
    w1: Array  # [E, I, D] gate
    w3: Array  # [E, I, D] up
    w2: Array  # [E, D, I] down
    shared: MLPParams | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerParams:
    input_norm: Array  # [D]
    mixer: KDAParams | MLAParams
    post_norm: Array  # [D]
    ffn: MLPParams | MoEParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelParams:
    embed: Array  # [vocab, D]
    layers: tuple[LayerParams, ...]
    norm: Array  # [D]
    lm_head: Array  # [vocab, D], never tied


def abstract_params(config: ModelConfig, dtype=jnp.bfloat16) -> ModelParams:
    """The parameter pytree of ``config`` as ``jax.ShapeDtypeStruct`` leaves; no memory is taken."""

    def leaf(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def fp32(*shape):
        return leaf(*shape, dtype=jnp.float32)

    D = config.hidden_size

    def kda() -> KDAParams:
        H, HV, K, V = config.kda_num_heads, config.kda_num_value_heads, config.kda_key_dim, config.kda_value_dim
        rank = config.kda_gate_rank
        return KDAParams(
            q_proj=leaf(H * K, D),
            k_proj=leaf(H * K, D),
            v_proj=leaf(HV * V, D),
            conv=leaf(config.conv_channels, config.conv_width),
            f_a_proj=leaf(rank, D),
            f_b_proj=leaf(HV * K, rank),
            A_log=fp32(HV),
            dt_bias=fp32(HV, K),
            b_proj=leaf(HV, D),
            g_a_proj=leaf(rank, D),
            g_b_proj=leaf(HV * V, rank),
            o_norm=leaf(V),
            o_proj=leaf(D, HV * V),
        )

    def mla() -> MLAParams:
        heads, nope, rope, v = config.num_attention_heads, config.qk_nope_dim, config.qk_rope_dim, config.v_head_dim
        r = config.kv_lora_rank
        return MLAParams(
            q_proj=leaf(heads * (nope + rope), D),
            kv_a_proj=leaf(r + rope, D),
            kv_a_norm=leaf(r),
            kv_b_proj=leaf(heads * (nope + v), r),
            o_proj=leaf(D, heads * v),
        )

    def mlp(width: int) -> MLPParams:
        return MLPParams(gate_proj=leaf(width, D), up_proj=leaf(width, D), down_proj=leaf(D, width))

    def moe() -> MoEParams:
        E, width = config.num_experts, config.moe_intermediate_size
        shared = mlp(width * config.num_shared_experts) if config.num_shared_experts else None
        return MoEParams(
            router=fp32(E, D),
            router_bias=fp32(E),
            w1=leaf(E, width, D),
            w3=leaf(E, width, D),
            w2=leaf(E, D, width),
            shared=shared,
        )

    layers = tuple(
        LayerParams(
            input_norm=leaf(D),
            mixer=kda() if mixer == "kda" else mla(),
            post_norm=leaf(D),
            ffn=mlp(config.intermediate_size) if ffn == "dense" else moe(),
        )
        for mixer, ffn in zip(config.mixer_kinds, config.ffn_kinds, strict=True)
    )
    return ModelParams(
        embed=leaf(config.vocab_size, D),
        layers=layers,
        norm=leaf(D),
        lm_head=leaf(config.vocab_size, D),
    )
