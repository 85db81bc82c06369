"""Adaptive verification inside ``generate``: the same tokens, and no draft that doesn't pay."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_jax import GenerateOptions, SpeculativeOptions, generation
from tests.compiling import quick  # noqa: F401
from tests.drafters import Table
from tests.test_engine import MODEL
from tests.test_engine_adaptive import Confident

PROMPTS = np.asarray([[3, 4, 3, 4, 3], [1, 2, 0, 0, 0], [7, 3, 3, 8, 0], [5, 5, 5, 0, 0]], np.int32)
LENGTHS = np.asarray([5, 2, 4, 3], np.int32)
COSTS = {"free": (1.0, 1.0, 1.0), "stairs": (1.0, 1.1, 9.0), "dear": (1.0, 1000.0, 2000.0)}


@functools.cache
def plain():
    found = kda_jax.generate(
        MODEL.params, MODEL.config, PROMPTS, LENGTHS, jax.random.key(0), options=GenerateOptions(16)
    )
    return np.asarray(found.tokens)


def run(speculative, drafter=None, **options):
    options = GenerateOptions(16, **options)
    arguments = PROMPTS, LENGTHS, jax.random.key(0)
    return kda_jax.generate(
        MODEL.params, MODEL.config, *arguments, options=options, speculative=speculative, drafter=drafter
    )


@pytest.mark.parametrize(
    "costs", [pytest.param(costs, marks=pytest.mark.slow) if costs == "free" else costs for costs in COSTS]
)
def test_the_tokens_are_the_same(costs, monkeypatch):
    monkeypatch.setattr(generation, "measured_costs", lambda *a: np.asarray(COSTS[costs], np.float32))
    found = run(SpeculativeOptions("ngram", 3, adaptive=True))
    np.testing.assert_array_equal(found.tokens, plain())
    drafted, steps = np.asarray(found.stats.drafted), np.asarray(found.stats.steps)
    if costs == "dear":
        assert not drafted.any()
        assert (steps == 15).all()
    if costs == "stairs":  # at most four drafts a step of four rows
        assert 0 < drafted.sum() <= 4 * steps.max()
    if costs == "free":
        whole = run(SpeculativeOptions("ngram", 3))
        np.testing.assert_array_equal(drafted, whole.stats.drafted)


@pytest.mark.slow
@pytest.mark.parametrize("recover", [True, False])
@pytest.mark.parametrize("drafter", [Table(3), Confident(3)])
def test_other_drafters_and_measured_times(recover, drafter):
    table = jnp.asarray(np.random.default_rng(3).normal(size=(12, 12)) * 2, jnp.float32)
    speculative = SpeculativeOptions("custom", 3, recover, adaptive=True)
    np.testing.assert_array_equal(run(speculative, (drafter, table)).tokens, plain())
    assert run(speculative, (drafter, table), temperature=0.8).tokens.shape == (4, 16)


@pytest.mark.slow
def test_the_distribution_is_the_models(monkeypatch):
    """The second and third token of many rows under a tight budget, against plain sampling."""
    monkeypatch.setattr(generation, "measured_costs", lambda *a: np.asarray(COSTS["stairs"], np.float32))
    table = jnp.asarray(np.random.default_rng(3).normal(size=(12, 12)) * 2, jnp.float32)
    rows, counts = 2048, []
    prompts = np.tile(np.asarray([[1, 2]], np.int32), (rows, 1)), np.full(rows, 2, np.int32)
    options = GenerateOptions(3, temperature=1.0)
    for speculative in (SpeculativeOptions("custom", 3, adaptive=True), None):
        found = kda_jax.generate(
            MODEL.params,
            MODEL.config,
            *prompts,
            jax.random.key(1),
            options=options,
            speculative=speculative,
            drafter=None if speculative is None else (Confident(3), table),
        )
        tokens = np.asarray(found.tokens)
        counts.append(np.bincount(tokens[:, 1] * 12 + tokens[:, 2], minlength=144).astype(float))
    ours, theirs = counts
    seen = ours + theirs > 10
    chi2 = np.sum((ours - theirs)[seen] ** 2 / (ours + theirs)[seen])
    assert chi2 < seen.sum() + 5 * np.sqrt(2 * seen.sum()), (chi2, seen.sum())


def test_refused():
    with pytest.raises(ValueError, match="adaptive must be False for a tree of drafts"):
        SpeculativeOptions("ngram", 3, branches=(2, 1), adaptive=True)
    traced = jax.jit(lambda params: run_with(params, SpeculativeOptions("ngram", 3, adaptive=True)))
    with pytest.raises(ValueError, match="adaptive must be False where generate is traced"):
        traced(MODEL.params)


def run_with(params, speculative):
    found = kda_jax.generate(
        params, MODEL.config, PROMPTS, LENGTHS, jax.random.key(0), options=GenerateOptions(4), speculative=speculative
    )
    return dataclasses.astuple(found)[0]
