"""Latent attention: the absorbed form on a cache, the expanded form on prompts, and plain numpy."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.layers import mla
from kda_jax.layers.params import MLAParams
from tests.compiling import quick  # noqa: F401
from tests.ops.harness import assert_same_bits
from tests.tiny import TINY
from tests.tolerances import assert_close, tolerance

B, T, D = 3, 11, TINY.hidden_size
CONFIGS = {"shared key": TINY, "no shared key": dataclasses.replace(TINY, qk_rope_dim=0)}
LIMIT = tolerance("float32").output


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request):
    return request.param


def make(config, dtype=np.float32) -> MLAParams:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(1.5 * rng.standard_normal(shape) / np.sqrt(shape[-1]), dtype)

    heads, r = config.num_attention_heads, config.kv_lora_rank
    return MLAParams(
        q_proj=normal(heads * (config.qk_nope_dim + config.qk_rope_dim), D),
        kv_a_proj=normal(config.latent_dim, D),
        kv_a_norm=jnp.asarray(1 + 0.3 * rng.standard_normal(r), dtype),
        kv_b_proj=normal(heads * (config.qk_nope_dim + config.v_head_dim), r),
        o_proj=normal(D, heads * config.v_head_dim),
    )


def inputs(tokens=T, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((B, tokens, D)), jnp.float32)


def reference(params: MLAParams, x, config):
    """fp64, head by head: output [B, T, D] and what is cached [B, T, r + rope]."""
    p = {f.name: np.asarray(getattr(params, f.name)).astype(np.float64) for f in dataclasses.fields(params)}
    x = np.asarray(x).astype(np.float64)
    nope, rope, v, r = config.qk_nope_dim, config.qk_rope_dim, config.v_head_dim, config.kv_lora_rank
    raw = x @ p["kv_a_proj"].T
    latent, shared = raw[..., :r], raw[..., r:]
    latent = latent / np.sqrt((latent**2).mean(-1, keepdims=True) + config.latent_norm_eps) * p["kv_a_norm"]
    heads = []
    for h in range(config.num_attention_heads):
        q = x @ p["q_proj"][h * (nope + rope) : (h + 1) * (nope + rope)].T
        both = latent @ p["kv_b_proj"][h * (nope + v) : (h + 1) * (nope + v)].T
        k = np.concatenate([both[..., :nope], shared], axis=-1)
        scores = q @ k.swapaxes(1, 2) / np.sqrt(nope + rope)
        scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ both[..., nope:])
    return np.concatenate(heads, axis=-1) @ p["o_proj"].T, np.concatenate([latent, shared], axis=-1)


def test_the_expanded_form_is_the_reference(config):
    params, x = make(config), inputs()
    prefill = jax.jit(functools.partial(mla.prefill, config=config))
    for found, expected in zip(prefill(params, x), reference(params, x, config), strict=True):
        assert_close(found, expected, LIMIT, "output and latents")


@pytest.mark.parametrize("window", [1, 4])
def test_the_absorbed_form_continues_the_expanded_one(config, window):
    """Rows at places of their own, in windows, from a cache that holds garbage past what was computed."""
    params, x = make(config), inputs()
    expected, latents = reference(params, x, config)
    computed = np.asarray([0, 3, 6], np.int32)
    cache = np.random.default_rng(2).standard_normal((B, T + window, config.latent_dim)).astype(np.float32) * 9
    for b, n in enumerate(computed):
        cache[b, :n] = latents[b, :n]
    cache = jnp.asarray(cache)
    decode = jax.jit(functools.partial(mla.decode, config=config))
    for _ in range(8 // window):
        at = jnp.asarray(computed)[:, None] + jnp.arange(window)[None]
        rows = jnp.take_along_axis(x, jnp.minimum(at, T - 1)[..., None], axis=1)
        out, after = decode(params, rows, cache, jnp.asarray(computed))
        for b, n in enumerate(computed):
            real = min(window, T - n)
            if real <= 0:
                continue
            assert_close(out[b, :real], expected[b, n : n + real], LIMIT, f"output of row {b} at {n}")
            assert_close(after[b, : n + real], latents[b, : n + real], LIMIT, f"latents of row {b}")
            np.testing.assert_array_equal(after[b, n + window :], cache[b, n + window :])
            np.testing.assert_array_equal(after[b, :n], cache[b, :n])
        cache, computed = after, np.minimum(computed + window, T)


@pytest.mark.parametrize("rows", [2, 40])  # written one by one, and by a scatter
def test_latents_are_written_where_they_belong(rows):
    rng = np.random.default_rng(3)
    cache = rng.standard_normal((rows, 9, 4)).astype(np.float32)
    new = rng.standard_normal((rows, 3, 4)).astype(np.float32)
    computed = rng.integers(0, 7, rows)
    expected = cache.copy()
    for b, n in enumerate(computed):
        expected[b, n : n + 3] = new[b]
    assert_same_bits(mla.write_latents(jnp.asarray(cache), jnp.asarray(new), jnp.asarray(computed)), expected, "cache")


@pytest.mark.parametrize("tokens", [8, 11])
def test_a_prompt_in_blocks_of_queries_is_the_whole(tokens, monkeypatch):
    """Outputs, latents and gradients."""
    config = TINY
    params, x = make(config), inputs(tokens)
    target = inputs(tokens, seed=5)

    def both(params, x):
        def loss(params, x):
            out, latents = mla.prefill(params, x, config)
            return jnp.sum(out * target) + jnp.sum(latents**2), (out, latents)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    whole = jax.jit(both)(params, x)
    called = []
    original = jax.lax.map
    monkeypatch.setattr(jax.lax, "map", lambda *args: called.append(1) or original(*args))
    monkeypatch.setattr(mla, "QUERY_BLOCK", 4)
    blocks = jax.jit(lambda *args: both(*args))(params, x)
    assert called
    chex.assert_tree_all_finite(blocks)
    for (path, found), expected in zip(
        jax.tree_util.tree_leaves_with_path(blocks), jax.tree.leaves(whole), strict=True
    ):
        assert_close(found, expected, LIMIT, jax.tree_util.keystr(path))


@pytest.mark.parametrize("block", [4, 1024])
def test_right_padding_is_never_seen(block, monkeypatch):
    monkeypatch.setattr(mla, "QUERY_BLOCK", block)
    params, x = make(TINY), inputs()
    prefill = jax.jit(functools.partial(mla.prefill, config=TINY))
    out, latents = prefill(params, x)
    changed, other = prefill(params, x.at[:, 6:].set(1e3))
    assert_same_bits(changed[:, :6], out[:, :6], "outputs before the padding")
    assert_same_bits(other[:, :6], latents[:, :6], "latents before the padding")
    assert (np.asarray(changed[:, 6:]) != np.asarray(out[:, 6:])).any()


def test_bfloat16_keeps_softmax_in_fp32(config):
    params, x = make(config, jnp.bfloat16), inputs().astype(jnp.bfloat16)
    expected, latents = reference(params, x, config)
    out, cached = jax.jit(functools.partial(mla.prefill, config=config))(params, x)
    assert out.dtype == cached.dtype == jnp.bfloat16
    assert_close(out, expected, 4 * tolerance(jnp.bfloat16).output, "output")
    assert_close(cached, latents, 4 * tolerance(jnp.bfloat16).output, "latents")
