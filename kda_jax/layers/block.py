"""What is around the mixers: embedding, feed-forward block, head."""

import jax.numpy as jnp

from kda_jax.config import ModelConfig
from kda_jax.layers.linear import linear, rms_norm
from kda_jax.layers.moe import mlp, moe
from kda_jax.layers.params import LayerParams, MLPParams, ModelParams


def embed(params: ModelParams, tokens):
    """[B, T] -> [B, T, D]."""
    return params.embed[tokens]


def head(params: ModelParams, x, config: ModelConfig):
    """Final norm and logits: [B, T, D] -> fp32 [B, T, vocab]."""
    return linear(rms_norm(x, params.norm, config.rms_norm_eps), params.lm_head, output_dtype=jnp.float32)


def feed_forward(layer: LayerParams, x, config: ModelConfig):
    """Adds the feed-forward block to ``x`` [B, T, D]; also the experts chosen, int32 [B, T, k], or None if dense."""
    y = rms_norm(x, layer.post_norm, config.rms_norm_eps)
    if isinstance(layer.ffn, MLPParams):
        return x + mlp(layer.ffn, y), None
    y, index = moe(layer.ffn, y, config)
    return x + y, index
