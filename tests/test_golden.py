"""transformers' Kimi-Linear, by golden files: logits of prefill and of token-by-token decode, and greedy tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_jax.cache import make_cache
from kda_jax.checkpoint import load
from kda_jax.model import decode, prefill
from tests.golden_data import FOLDER, LENGTHS, NEW_TOKENS, load_golden, pad_right, relative_rms

TOLERANCE = 1e-4  # relative RMS of logits, fp32


@pytest.fixture(scope="module")
def model():
    return load(FOLDER, dtype="float32")


def test_the_checkpoint_is_what_transformers_saved(model):
    assert model.config.mixer_kinds == ("kda", "kda", "mla", "kda")
    assert model.config.ffn_kinds == ("dense", "moe", "moe", "moe")
    assert model.stop_tokens == (2,)
    assert load(FOLDER).params.embed.dtype == jnp.bfloat16


def test_the_greedy_tokens_are_not_close_calls():
    assert min(golden.gaps.min() for golden in load_golden().values()) > 1e-3


def logits(model, tokens, lengths):
    return jax.jit(kda_jax.logits, static_argnums=1)(model.params, model.config, tokens, lengths)


def test_logits_of_a_ragged_batch(model):
    golden = load_golden()
    tokens, lengths = pad_right([golden[n].prompt for n in LENGTHS], fill=7)
    found = logits(model, tokens, lengths)
    assert found.dtype == jnp.float32
    assert found.shape == (len(LENGTHS), max(LENGTHS), 250)
    for row, n in zip(found, LENGTHS, strict=True):
        assert relative_rms(row[:n], golden[n].logits) <= TOLERANCE, n


@pytest.mark.parametrize("length", [1, 65])
def test_logits_of_one_prompt_without_padding(model, length):
    golden = load_golden()[length]
    found = logits(model, golden.prompt[None], np.asarray([length], np.int32))
    assert relative_rms(found[0], golden.logits) <= TOLERANCE


def test_token_by_token_decode_logits(model):
    """Prefill a third of each prompt, then feed the rest a token at a time; rows end at different steps."""
    golden = [load_golden()[n] for n in LENGTHS]
    lengths = np.asarray(LENGTHS, np.int32)
    starts = np.maximum(lengths // 3, 1)
    tokens, _ = pad_right([g.prompt[:start] for g, start in zip(golden, starts, strict=True)], fill=7)
    cache = make_cache(model.config, batch=len(LENGTHS), tokens=max(LENGTHS), dtype=jnp.float32)
    slots = 1 + np.arange(len(LENGTHS), dtype=np.int32)
    first, cache = jax.jit(prefill, static_argnums=1)(model.params, model.config, tokens, starts, cache, slots)
    found = [[row] for row in np.asarray(first)]
    step = jax.jit(decode, static_argnums=1)
    for i in range(int((lengths - starts).max())):
        computed = starts + i
        live = computed < lengths
        fed = np.asarray([g.prompt[c] if ok else 7 for g, c, ok in zip(golden, computed, live, strict=True)], np.int32)
        logits, cache = step(model.params, model.config, fed, computed, cache, np.where(live, slots, 0))
        for row, ok, one in zip(found, live, np.asarray(logits), strict=True):
            if ok:
                row.append(one)
    for row, g, start, n in zip(found, golden, starts, LENGTHS, strict=True):
        assert len(row) == n - start + 1
        assert relative_rms(np.stack(row), g.logits[start - 1 :]) <= TOLERANCE, n


def test_greedy_tokens(model):
    golden = load_golden()
    tokens, lengths = pad_right([golden[n].prompt for n in LENGTHS])
    options = kda_jax.GenerateOptions(max_new_tokens=NEW_TOKENS)
    result = kda_jax.generate(model.params, model.config, tokens, lengths, jax.random.key(0), options=options)
    for row, n in zip(np.asarray(result.tokens), LENGTHS, strict=True):
        np.testing.assert_array_equal(row, golden[n].greedy, err_msg=f"prompt of {n}")
