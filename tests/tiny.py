"""Tiny configurations and random parameters for tests. Sizes differ wherever two could be confused (K != V)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.config import ModelConfig
from kda_jax.layers.params import ModelParams, abstract_params

TINY = ModelConfig(
    vocab_size=40,
    hidden_size=24,
    mixer_kinds=("kda", "mla", "kda"),
    ffn_kinds=("dense", "moe", "moe"),
    intermediate_size=28,
    kda_num_heads=2,
    kda_num_value_heads=4,
    kda_key_dim=6,
    kda_value_dim=10,
    num_attention_heads=3,
    qk_nope_dim=5,
    qk_rope_dim=4,
    v_head_dim=7,
    kv_lora_rank=9,
    num_experts=4,
    num_experts_per_token=2,
    num_shared_experts=2,
    moe_intermediate_size=11,
    routed_scaling_factor=1.5,
    max_length=512,
    bos_token_id=1,
    eos_token_ids=(2,),
    pad_token_id=0,
    dtype="float32",
)

# what transformers can hold (K == V, as many value heads as key heads) and run (torch's grouped product wants rows of
# a multiple of 16 bytes)
TINY_HF = dataclasses.replace(TINY, kda_num_value_heads=2, kda_value_dim=6, moe_intermediate_size=12)


def random_params(config: ModelConfig, seed: int = 0) -> ModelParams:
    """Normal values in every leaf of ``config``'s parameters, in its dtypes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype),
        abstract_params(config, config.dtype),
    )
