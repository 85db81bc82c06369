"""The released 48B configuration traces and lowers without weights, tracing each kind of layer once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_jax import generation, generation_loop, model, ops
from kda_jax.cache import make_cache
from kda_jax.layers.params import abstract_params
from kda_jax.presets import load_config

ROWS, WINDOW, TOKENS = 2, 8, 128
PLATFORMS = ("cpu", "cuda", "tpu")
CONFIG = load_config("kimi_linear_48b")
PARAMS = abstract_params(CONFIG)
CACHE = jax.eval_shape(functools.partial(make_cache, CONFIG, batch=ROWS, tokens=TOKENS, dtype=jnp.bfloat16))


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def forward(config, params, tokens, lengths):
    return model.forward(params, config, tokens, lengths)


def prefill(config, params, tokens, lengths, cache, slots):
    return model.prefill(params, config, tokens, lengths, cache, slots)


def decode(config, params, tokens, computed, cache, slots):
    return model.decode(params, config, tokens, computed, cache, slots)


def verify_and_commit(config, params, tokens, lengths, computed, cache, slots, accepted):
    logits, cache, left = model.verify(params, config, tokens, lengths, computed, cache, slots)
    return logits, model.commit(params, config, cache, left, ops.plan_commit(accepted, lengths, slots))


rows = ints(ROWS)
FORMS = {
    "forward": (forward, (PARAMS, ints(ROWS, 64), rows), (ROWS, 64, CONFIG.vocab_size)),
    "prefill": (prefill, (PARAMS, ints(ROWS, 64), rows, CACHE, rows), (ROWS, CONFIG.vocab_size)),
    "decode": (decode, (PARAMS, rows, rows, CACHE, rows), (ROWS, CONFIG.vocab_size)),
    "verify and commit": (
        verify_and_commit,
        (PARAMS, ints(ROWS, WINDOW), rows, rows, CACHE, rows, rows),
        (ROWS, WINDOW, CONFIG.vocab_size),
    ),
}


@pytest.fixture
def mixers(monkeypatch):
    """Names of the mixers traced, one for each time."""
    traced = []
    for kind, names in (("kda", ("prefill", "decode", "verify")), ("mla", ("prefill", "decode"))):
        module = getattr(model, kind)
        for name in names:
            monkeypatch.setattr(module, name, counting(getattr(module, name), f"{kind}.{name}", traced))
    return traced


def counting(f, name, calls):
    @functools.wraps(f)
    def counted(*args, **kwargs):
        calls.append(name)
        return f(*args, **kwargs)

    return counted


def test_it_is_the_released_model():
    assert CONFIG.num_layers == 27
    assert (CONFIG.num_kda_layers, CONFIG.num_mla_layers) == (20, 7)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_lowers_for_every_platform_tracing_a_kind_of_layer_once(form, mixers):
    """27 layers, but three kinds: KDA with a dense layer, KDA with experts, MLA with experts."""
    f, args, shape = FORMS[form]
    # a configuration of its own, of which nothing has been traced yet
    config = dataclasses.replace(CONFIG, max_length=1000 + list(FORMS).index(form))
    traced = jax.jit(f, static_argnums=0).trace(config, *args)
    logits = traced.out_info if form == "forward" else traced.out_info[0]
    assert logits.shape == shape
    assert logits.dtype == jnp.float32
    assert len(mixers) == 3, mixers
    assert sum(name.startswith("kda.") for name in mixers) == 2
    sizes = [len(traced.lower(lowering_platforms=(platform,)).as_text()) for platform in PLATFORMS]
    # the layers are calls: the text grows by a line or so for each, far from 27 copies of what is in them
    assert max(sizes) < 600_000
    assert len(mixers) == 3


def test_state_and_latents_have_the_published_sizes():
    assert CACHE.state.shape == (20, 1 + ROWS, 32, 128, 128)
    assert CACHE.state.dtype == jnp.float32
    assert CACHE.conv.shape == (20, 1 + ROWS, 3, 3 * 4096)
    assert [latents.shape for latents in CACHE.latents] == [(ROWS, TOKENS, 576)] * 7


@pytest.mark.parametrize(
    "speculative",
    [None, kda_jax.SpeculativeOptions("ngram", 7), kda_jax.SpeculativeOptions("ngram", 7, recover=False)],
    ids=["plain", "recover", "native"],
)
def test_the_loop_of_generate_lowers_for_every_platform(speculative, monkeypatch):
    """Prefill and the whole loop, as ``generate`` calls them; nothing runs."""
    programs = {}

    def start(*args, **kwargs):
        programs["start"] = generation_loop.start.trace(*args, **kwargs)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), programs["start"].out_info)

    monkeypatch.setattr(generation, "start", start)
    state, run, _ = generation._prepare(
        PARAMS,
        CONFIG,
        np.zeros((ROWS, 16), np.int32),
        np.full(ROWS, 16, np.int32),
        jax.random.key(0),
        kda_jax.GenerateOptions(64, temperature=0.7, top_p=0.9, stop_tokens=(1,)),
        speculative,
        None,
    )
    params, sampling, drafter_params, program = run.args
    programs["advance"] = generation_loop.advance.trace(
        params, state, sampling, drafter_params, jnp.int32(8), program=program
    )
    states = 1 if speculative is None or speculative.recover else 8
    assert state.cache.state.shape == (20, 1 + ROWS * states, 32, 128, 128)
    for name, traced in programs.items():
        for platform in PLATFORMS:
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert len(text) < 900_000, name
            assert "callback" not in text, name
