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
from kda_jax.layers.packing import pack, spread
from kda_jax.layers.params import MLAParams
from kda_jax.ops._slots import UNROLLED_ROWS
from kda_jax.ops.tree import paths

QUERY_BLOCK = 1024  # tokens whose scores against the whole prompt are held at once
KEY_BLOCK = 1024  # cached tokens that a continued prompt attends to at once


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


def _expand(params: MLAParams, cached, config: ModelConfig):
    """Keys and values of cached tokens: [B, S, r + rope] -> [B, S, heads, nope + rope], [B, S, heads, v]."""
    values, shared_key = jnp.split(cached, [config.kv_lora_rank], axis=-1)
    expanded = rearrange(linear(values, params.kv_b_proj), "b t (h d) -> b t h d", h=config.num_attention_heads)
    k, v = jnp.split(expanded, [config.qk_nope_dim], axis=-1)
    shared_key = jnp.broadcast_to(shared_key[:, :, None], (*k.shape[:3], config.qk_rope_dim))
    return jnp.concatenate([k, shared_key], axis=-1), v


def _scale(config: ModelConfig) -> float:
    return (config.qk_nope_dim + config.qk_rope_dim) ** -0.5


def prefill(params: MLAParams, x, config: ModelConfig):
    """Causal attention over whole sequences ``x`` [B, T, D]; right padding is never seen by a real token.

    Returns the output [B, T, D] and the latents to cache [B, T, r + rope].
    """
    T, dtype = x.shape[1], x.dtype
    precision = matmul_precision(dtype)
    q = jnp.concatenate(_queries(params, x, config), axis=-1)
    cached = latent(params, x, config)
    k, v = _expand(params, cached, config)
    scale = _scale(config)

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


def extend(params: MLAParams, x, cache, computed, lengths, config: ModelConfig, pages=None):
    """The next tokens ``x`` [B, T, D] of sequences that have ``computed`` [B] tokens in the cache.

    The expanded form, a block of ``KEY_BLOCK`` keys at a time with a running softmax; blocks past every row's context
    are not visited. ``cache`` and ``pages`` as in ``decode``.

    Returns the output [B, T, D] and the next cache. Outputs past a row's length are meaningless.
    """
    T, dtype = x.shape[1], x.dtype
    precision = matmul_precision(dtype)
    q = jnp.concatenate(_queries(params, x, config), axis=-1) * _scale(config)
    new = latent(params, x, config)
    new = jnp.where(jnp.isfinite(new), new, 0)
    row = jnp.arange(T)

    def add(carry, latents, seen):
        """Attend to ``latents`` [B, S, d] where ``seen`` [B, T, S]."""
        best, total, out = carry
        k, v = _expand(params, latents, config)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        higher = jnp.maximum(best, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - higher[..., None])
        keep = jnp.exp(best - higher)
        part = jnp.einsum(
            "bhqk,bkhd->bhqd", weights.astype(dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return higher, total * keep + jnp.sum(weights, axis=-1), out * keep[..., None] + part

    B, heads = x.shape[0], config.num_attention_heads
    carry = (
        jnp.full((B, heads, T), jnp.finfo(jnp.float32).min, jnp.float32),
        jnp.zeros((B, heads, T), jnp.float32),
        jnp.zeros((B, heads, T, config.v_head_dim), jnp.float32),
    )
    context = pages.shape[1] * cache.shape[1] if pages is not None else cache.shape[1]
    block = min(KEY_BLOCK, context)

    def cached_block(i, carry):
        first = jnp.minimum(i * block, context - block)  # the last block reaches back over tokens already seen
        position = first + jnp.arange(block)
        seen = (position[None] >= i * block) & (position[None] < computed[:, None])
        latents = _read(cache, computed, pages, first, block)
        return add(carry, latents, jnp.broadcast_to(seen[:, None], (B, T, block)))

    carry = jax.lax.fori_loop(0, -(-jnp.max(computed) // block), cached_block, carry)
    for first in range(0, T, KEY_BLOCK):
        part = new[:, first : first + KEY_BLOCK]
        seen = first + jnp.arange(part.shape[1])[None] <= row[:, None]
        carry = add(carry, part, jnp.broadcast_to(seen[None], (B, *seen.shape)))
    _, total, out = carry
    o = (out / total[..., None]).astype(dtype)
    return linear(rearrange(o, "b h t d -> b t (h d)"), params.o_proj), write_latents(
        cache, new, computed, pages, lengths
    )


def _read(cache, computed, pages, first=0, count: int | None = None):
    """Latents at positions ``first .. first + count - 1`` of each row (default: all): [B, count, d].

    Through ``pages``, what is not one of the row's ``computed`` tokens reads as zero: those pages may hold anything.
    """
    if pages is None:
        return cache if count is None else jax.lax.dynamic_slice_in_dim(cache, first, count, axis=1)
    size = cache.shape[1]
    if count is None:
        count = pages.shape[1] * size
    position = first + jnp.arange(count)
    page = jnp.take(pages, position // size, axis=1)
    latents = cache[page, jnp.broadcast_to(position % size, page.shape)]
    return jnp.where((position[None] < computed[:, None])[..., None], latents, 0)


def write_latents(cache, new, computed, pages=None, lengths=None):
    """``cache`` with ``new`` [B, W, d] at positions ``computed .. computed + W - 1`` of each row.

    Without ``pages`` the cache is [B, S, d], and what is past a row's real tokens is written too: it is overwritten
    before anything reads it; ``computed + W <= S``. With ``pages`` int32 [B, n] it is [pages, size, d], and just the
    row's ``lengths`` tokens are written, none to page 0.
    """
    new = new.astype(cache.dtype)
    positions = computed[:, None] + jnp.arange(new.shape[1])[None]
    if pages is not None:
        count, size = cache.shape[:2]
        column = jnp.minimum(positions // size, pages.shape[1] - 1)
        page = jnp.take_along_axis(pages, column, axis=1)
        real = (jnp.arange(new.shape[1])[None] < lengths[:, None]) & (page > 0) & (positions < pages.shape[1] * size)
        return cache.at[jnp.where(real, page, count), positions % size].set(new, mode="drop")
    if cache.shape[0] <= UNROLLED_ROWS:
        for row in range(cache.shape[0]):
            start = (row, computed[row], 0)
            cache = jax.lax.dynamic_update_slice(cache, new[row : row + 1], start)
        return cache
    return cache.at[jnp.arange(cache.shape[0])[:, None], positions].set(new, mode="drop")


def keep_path(cache, computed, path, count, pages=None):
    """``cache`` with the latents of a tree's path at consecutive positions: that of row ``path[b, i]`` of the window,
    which a verify left at ``computed[b] + path[b, i]``, moves to ``computed[b] + i``.

    ``path`` int [B, W], of which the first ``count`` [B] entries stand: the latents of rejected rows are overwritten,
    or lie past the row's tokens. ``cache`` and ``pages`` as in ``decode``.
    """
    row = jnp.arange(path.shape[1], dtype=path.dtype)[None]
    positions = computed[:, None] + jnp.where(row < count[:, None], path, row)
    if pages is None:
        latents = jnp.take_along_axis(cache, positions[..., None], axis=1)
    else:
        size = cache.shape[1]
        page = jnp.take_along_axis(pages, jnp.minimum(positions // size, pages.shape[1] - 1), axis=1)
        latents = cache[page, positions % size]
    return write_latents(cache, latents, computed, pages, count)


def decode(
    params: MLAParams, x, cache, computed, config: ModelConfig, pages=None, lengths=None, parents=None, packing=None
):
    """Windows ``x`` [B, W, D] on top of ``computed`` [B] cached tokens.

    ``cache`` is [B, S, d], a row's tokens in its own; or with ``pages`` int32 [B, n] a pool [pages, size, d], of which
    row ``b`` has page ``pages[b, i]`` for its tokens from ``i * size``, 0 where none is allocated; then ``lengths`` [B]
    says how many of the window's tokens are kept. With ``parents`` int [B, W] the window is a tree: a token attends to
    the cached ones and to its own path. Latents stay in the order of the window (``keep_path``). With a ``Packing`` of
    the windows ``x`` and the output are packed, [1, N, D].

    Returns the output [B, W, D] and the next cache. Outputs past a row's real tokens are meaningless.
    """
    dtype, precision = x.dtype, matmul_precision(x.dtype)
    # a token that went wrong (NaN) must not reach those that don't attend to it: 0 * NaN is NaN. Its own residual
    # stream still says so.
    new = spread(packing, latent(params, x, config))
    new = jnp.where(jnp.isfinite(new), new, 0)
    old = _read(cache, computed, pages)
    q_nope, q_rope = (spread(packing, q) for q in _queries(params, x, config))
    key_expansion, value_expansion = _expansion(params, config)
    q = jnp.einsum("bwhd,hdr->bwhr", q_nope, key_expansion.astype(dtype), precision=precision)
    q = jnp.concatenate([q, q_rope], axis=-1)
    scale = _scale(config)
    window, cached = jnp.arange(new.shape[1]), jnp.arange(old.shape[1])[None, None, None] < _column(computed)
    causal = (window[None] <= window[:, None])[None, None] if parents is None else paths(parents)[:, None]

    def scores(keys, seen):
        product = jnp.einsum("bwhd,bsd->bhws", q, keys, precision=precision, preferred_element_type=jnp.float32)
        return jnp.where(seen, product * scale, -jnp.inf)

    # the cache is read as it was and the window beside it, so that the update of the cache is its last use
    both = jnp.concatenate([scores(old, cached), scores(new, causal)], axis=-1)
    weights = jnp.split(jax.nn.softmax(both, axis=-1).astype(dtype), [old.shape[1]], axis=-1)
    o = sum(jnp.einsum("bhws,bsr->bwhr", w, c, precision=precision) for w, c in zip(weights, (old, new), strict=True))
    o = jnp.einsum("bwhr,hdr->bwhd", o[..., : config.kv_lora_rank], value_expansion.astype(dtype), precision=precision)
    o = linear(pack(packing, rearrange(o, "b w h d -> b w (h d)")), params.o_proj)
    return o, write_latents(cache, new, computed, pages, lengths)


def _column(x):
    return x[:, None, None, None]
