"""Which tensors of a Hugging Face checkpoint make up which parameter, in every spelling in use.

The first spelling of a parameter is the one of the released Kimi-Linear files, and the one that is written. Linear
weights are ``[out, in]`` on both sides.
"""

import dataclasses
from collections.abc import Mapping

from kda_jax.config import ModelConfig
from kda_jax.layers.params import KDAParams, LayerParams, MLAParams, MLPParams, ModelParams, MoEParams

Shape = tuple[int, ...]
Index = tuple[slice | int, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stored tensor and the part of a parameter that it fills.

    The stored tensor has one of ``shapes`` (the first is written). ``source`` selects what is used of it, ``index``
    what is filled of the parameter; None is all. The selected values are reshaped, never transposed.
    """

    name: str
    shapes: tuple[Shape, ...]
    index: Index | None = None
    source: tuple[slice, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Spellings:
    """The ways in which a parameter may be stored: for each, the pieces that fill it."""

    options: tuple[tuple[Piece, ...], ...]


def canonical_name(name: str) -> str:
    """One spelling for all of a tensor's names: the released one with every feed-forward block called ``mlp``."""
    name = name.removeprefix("language_model.")
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        name = "model." + name
    return name.replace(".block_sparse_moe.", ".mlp.").replace(".forget_gate.", ".")


def is_skipped(name: str, num_layers: int) -> bool:
    """Whether a tensor (canonical name) carries nothing of this model: rotary tables, layers past the last one."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and parts[2:3] != [] and parts[2].isdigit() and int(parts[2]) >= num_layers


def choose_spelling(spellings: Spellings, stored: Mapping[str, object]) -> tuple[tuple[Piece, ...], tuple[str, ...]]:
    """The pieces to use given the canonical names in ``stored``, and the names missing of them (none if complete)."""
    best: tuple[tuple[Piece, ...], tuple[str, ...]] | None = None
    for pieces in spellings.options:
        missing = tuple(piece.name for piece in pieces if canonical_name(piece.name) not in stored)
        if not missing:
            return pieces, ()
        if best is None or len(pieces) - len(missing) > len(best[0]) - len(best[1]):
            best = (pieces, missing)
    assert best is not None
    return best


def tensor_plan(config: ModelConfig) -> ModelParams:
    """The parameter pytree of ``config`` with ``Spellings`` as leaves."""
    D = config.hidden_size
    layers = []
    for i, (mixer, ffn) in enumerate(zip(config.mixer_kinds, config.ffn_kinds, strict=True)):
        p = f"model.layers.{i}."
        layers.append(
            LayerParams(
                input_norm=_one(p + "input_layernorm.weight", (D,)),
                mixer=_kda(config, p + "self_attn.") if mixer == "kda" else _mla(config, p + "self_attn."),
                post_norm=_one(p + "post_attention_layernorm.weight", (D,)),
                ffn=_mlp(p + "mlp.", config.intermediate_size, D)
                if ffn == "dense"
                else _moe(config, p + "block_sparse_moe."),
            )
        )
    vocab = (config.vocab_size, D)
    return ModelParams(
        embed=_one("model.embed_tokens.weight", vocab),
        layers=tuple(layers),
        norm=_one("model.norm.weight", (D,)),
        lm_head=_one("lm_head.weight", vocab),
    )


def _one(name: str, *shapes: Shape) -> Spellings:
    return Spellings(((Piece(name, shapes),),))


def _kda(config: ModelConfig, p: str) -> KDAParams:
    D, HV, width, rank = config.hidden_size, config.kda_num_value_heads, config.conv_width, config.kda_gate_rank
    qk, v, gate = config.kda_num_heads * config.kda_key_dim, HV * config.kda_value_dim, HV * config.kda_key_dim
    channels = config.conv_channels
    parts = {"q": slice(0, qk), "k": slice(qk, 2 * qk), "v": slice(2 * qk, channels)}
    separate = tuple(
        Piece(f"{p}{name}_conv1d.weight", ((n := part.stop - part.start, 1, width), (n, width)), index=(part,))
        for name, part in parts.items()
    )
    joined = (Piece(p + "conv1d.weight", ((channels, 1, width), (channels, width))),)
    return KDAParams(
        q_proj=_one(p + "q_proj.weight", (qk, D)),
        k_proj=_one(p + "k_proj.weight", (qk, D)),
        v_proj=_one(p + "v_proj.weight", (v, D)),
        conv=Spellings((separate, joined)),
        f_a_proj=_one(p + "f_a_proj.weight", (rank, D)),
        f_b_proj=_one(p + "f_b_proj.weight", (gate, rank)),
        A_log=_one(p + "A_log", (1, 1, HV, 1), (HV,)),
        dt_bias=_one(p + "dt_bias", (gate,)),
        b_proj=_one(p + "b_proj.weight", (HV, D)),
        g_a_proj=_one(p + "g_a_proj.weight", (rank, D)),
        g_b_proj=_one(p + "g_b_proj.weight", (v, rank)),
        o_norm=_one(p + "o_norm.weight", (config.kda_value_dim,)),
        o_proj=_one(p + "o_proj.weight", (D, v)),
    )


def _mla(config: ModelConfig, p: str) -> MLAParams:
    D, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    return MLAParams(
        q_proj=_one(p + "q_proj.weight", (heads * (config.qk_nope_dim + config.qk_rope_dim), D)),
        kv_a_proj=_one(p + "kv_a_proj_with_mqa.weight", (config.latent_dim, D)),
        kv_a_norm=_one(p + "kv_a_layernorm.weight", (rank,)),
        kv_b_proj=_one(p + "kv_b_proj.weight", (heads * (config.qk_nope_dim + config.v_head_dim), rank)),
        o_proj=_one(p + "o_proj.weight", (D, heads * config.v_head_dim)),
    )


def _mlp(p: str, width: int, D: int) -> MLPParams:
    return MLPParams(
        gate_proj=_one(p + "gate_proj.weight", (width, D)),
        up_proj=_one(p + "up_proj.weight", (width, D)),
        down_proj=_one(p + "down_proj.weight", (D, width)),
    )


def _moe(config: ModelConfig, p: str) -> MoEParams:
    D, E, width = config.hidden_size, config.num_experts, config.moe_intermediate_size

    def experts(name: str, shape: Shape, stacked: str, stacked_shape: Shape, rows: slice | None) -> Spellings:
        separate = tuple(Piece(f"{p}experts.{e}.{name}.weight", (shape,), index=(e,)) for e in range(E))
        source = None if rows is None else (slice(None), rows)
        return Spellings((separate, (Piece(f"{p}experts.{stacked}", (stacked_shape,), source=source),)))

    both = (E, 2 * width, D)
    return MoEParams(
        router=_one(p + "gate.weight", (E, D)),
        router_bias=_one(p + "gate.e_score_correction_bias", (E,)),
        w1=experts("w1", (width, D), "gate_up_proj", both, slice(0, width)),
        w3=experts("w3", (width, D), "gate_up_proj", both, slice(width, 2 * width)),
        w2=experts("w2", (D, width), "down_proj", (E, D, width), None),
        shared=_mlp(p + "shared_experts.", width * config.num_shared_experts, D) if config.num_shared_experts else None,
    )
