"""Multi-head latent attention without positions (DeepSeek-V2's MLA, NoPE as in Kimi Linear).

A token caches its normed latent and one key shared by all heads, ``r + rope`` values. Prompts use the expanded form;
decode and verify the absorbed one, where queries and outputs move to the latent space instead of every cached token
moving out of it. Softmax is fp32; the scale is that of the expanded key, ``(nope + rope) ** -0.5``.
"""

import jax
import jax.numpy as jnp
from einops import rearrange

from kda_jax.config import ModelConfig
from kda_jax.layers.linear import linear, matmul_precision, rms_norm
from kda_jax.layers.params import MLAParams
from kda_jax.ops._slots import UNROLLED_ROWS

QUERY_BLOCK = 1024  # tokens whose scores against the whole prompt are held at once


def _queries(params: MLAParams, x, config: ModelConfig):
    """[B, T, D] -> [B, T, heads, nope], [B, T, heads, rope]."""
    q = rearrange(linear(x, params.q_proj), "b t (h d) -> b t h d", h=config.num_attention_heads)
    return jnp.split(q, [config.qk_nope_dim], axis=-1)


def latent(params: MLAParams, x, config: ModelConfig):
    """What the layer caches for each token: [B, T, D] -> [B, T, r + rope], normed latent then raw shared key."""
    values, shared_key = jnp.split(linear(x, params.kv_a_proj), [config.kv_lora_rank], axis=-1)
    return jnp.concatenate([rms_norm(values, params.kv_a_norm, config.latent_norm_eps), shared_key], axis=-1)


def _expansion(params: MLAParams, config: ModelConfig):
    """Key and value halves of the latent expansion: [heads, nope, r], [heads, v, r]."""
    weight = rearrange(params.kv_b_proj, "(h d) r -> h d r", h=config.num_attention_heads)
    return weight[:, : config.qk_nope_dim], weight[:, config.qk_nope_dim :]


def prefill(params: MLAParams, x, config: ModelConfig):
    """Causal attention over whole sequences ``x`` [B, T, D]; right padding is never seen by a real token.

    Returns the output [B, T, D] and the latents to cache [B, T, r + rope].
    """
    T, dtype = x.shape[1], x.dtype
    precision = matmul_precision(dtype)
    q = jnp.concatenate(_queries(params, x, config), axis=-1)
    cached = latent(params, x, config)
    values, shared_key = jnp.split(cached, [config.kv_lora_rank], axis=-1)
    expanded = rearrange(linear(values, params.kv_b_proj), "b t (h d) -> b t h d", h=config.num_attention_heads)
    k, v = jnp.split(expanded, [config.qk_nope_dim], axis=-1)
    shared_key = jnp.broadcast_to(shared_key[:, :, None], (*k.shape[:3], config.qk_rope_dim))
    k = jnp.concatenate([k, shared_key], axis=-1)
    scale = (config.qk_nope_dim + config.qk_rope_dim) ** -0.5

    def attend(q, first):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision, preferred_element_type=jnp.float32) * scale
        seen = jnp.arange(T)[None] <= first + jnp.arange(q.shape[1])[:, None]
        weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1).astype(dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision=precision, preferred_element_type=dtype)

    if T <= QUERY_BLOCK:
        o = attend(q, 0)
    else:
        blocks = -(-T // QUERY_BLOCK)
        q = jnp.pad(q, [(0, 0), (0, blocks * QUERY_BLOCK - T), (0, 0), (0, 0)])
        q = rearrange(q, "b (n q) h d -> n b q h d", q=QUERY_BLOCK)
        o = jax.lax.map(jax.checkpoint(lambda args: attend(*args)), (q, jnp.arange(blocks) * QUERY_BLOCK))
        o = rearrange(o, "n b q h d -> b (n q) h d")[:, :T]
    return linear(rearrange(o, "b t h d -> b t (h d)"), params.o_proj), cached


def write_latents(cache, new, computed):
    """``cache`` [B, S, d] with ``new`` [B, W, d] at positions ``computed .. computed + W - 1`` of each row.

    What is past a row's real tokens is written too: it is overwritten before anything reads it. ``computed + W <= S``.
    """
    new = new.astype(cache.dtype)
    if cache.shape[0] <= UNROLLED_ROWS:
        for row in range(cache.shape[0]):
            start = (row, computed[row], 0)
            cache = jax.lax.dynamic_update_slice(cache, new[row : row + 1], start)
        return cache
    positions = computed[:, None] + jnp.arange(new.shape[1])[None]
    return cache.at[jnp.arange(cache.shape[0])[:, None], positions].set(new, mode="drop")


def decode(params: MLAParams, x, cache, computed, config: ModelConfig):
    """Windows ``x`` [B, W, D] on top of ``computed`` [B] cached tokens.

    Returns the output [B, W, D] and the next cache [B, S, r + rope]. Outputs past a row's real tokens are meaningless.
    """
    dtype, precision = x.dtype, matmul_precision(x.dtype)
    # a token that went wrong (NaN) must not reach those that don't attend to it: 0 * NaN is NaN. Its own residual
    # stream still says so.
    new = latent(params, x, config)
    new = jnp.where(jnp.isfinite(new), new, 0)
    q_nope, q_rope = _queries(params, x, config)
    key_expansion, value_expansion = _expansion(params, config)
    q = jnp.einsum("bwhd,hdr->bwhr", q_nope, key_expansion.astype(dtype), precision=precision)
    q = jnp.concatenate([q, q_rope], axis=-1)
    scale = (config.qk_nope_dim + config.qk_rope_dim) ** -0.5
    window, cached = jnp.arange(x.shape[1]), jnp.arange(cache.shape[1])[None, None, None] < _column(computed)
    causal = (window[None] <= window[:, None])[None, None]

    def scores(keys, seen):
        product = jnp.einsum("bwhd,bsd->bhws", q, keys, precision=precision, preferred_element_type=jnp.float32)
        return jnp.where(seen, product * scale, -jnp.inf)

    # the cache is read as it was and the window beside it, so that the update of the cache is its last use
    both = jnp.concatenate([scores(cache, cached), scores(new, causal)], axis=-1)
    weights = jnp.split(jax.nn.softmax(both, axis=-1).astype(dtype), [cache.shape[1]], axis=-1)
    o = sum(jnp.einsum("bhws,bsr->bwhr", w, c, precision=precision) for w, c in zip(weights, (cache, new), strict=True))
    o = jnp.einsum("bwhr,hdr->bwhd", o[..., : config.kv_lora_rank], value_expansion.astype(dtype), precision=precision)
    return linear(rearrange(o, "b w h d -> b w (h d)"), params.o_proj), write_latents(cache, new, computed)


def _column(x):
    return x[:, None, None, None]
