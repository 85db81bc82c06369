"""Adaptive verification in the engine: the tokens are the same, and drafts that don't pay aren't verified."""

import dataclasses
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import Engine, GenerateOptions, SpeculativeOptions
from kda_jax.metadata_builder import Smallest
from tests.compiling import quick  # noqa: F401
from tests.drafters import Table
from tests.test_engine import MODEL, MODES, SHARED, alone, check_empty

PROMPTS = (tuple(SHARED[:9]), (1, 2), tuple(SHARED[:5]), (7, 3, 3, 8, 1, 1, 4))
# milliseconds by tokens of a step of 4 windows
COSTS = {
    "free": ((4, 1.0), (8, 1.0), (16, 1.0)),
    "stairs": ((4, 1.0), (8, 1.1), (16, 9.0)),
    "dear": ((4, 1.0), (8, 1000.0), (16, 2000.0)),
}


@dataclasses.dataclass(frozen=True)
class Confident(Table):
    """A table that says how sure it is: surer of later positions, so that survival is not its own order."""

    def __call__(self, params, state, context, keys):
        made = super().__call__(params, state, context, keys)
        sure = jnp.asarray([0.6, 0.7, 0.8])[None] - 0.05 * (context.lengths % 3)[:, None]
        return made._replace(confidence=jnp.broadcast_to(sure, made.tokens.shape))


def make(mode, costs, *, drafter=None, **changes):
    speculative, cache = MODES[mode]
    method = "ngram" if drafter is None else "custom"
    speculative = dataclasses.replace(speculative, adaptive=True, method=method)
    arguments = {"max_requests": 4, "max_tokens_per_step": 24, "max_length": 48} | changes
    engine = Engine(
        MODEL,
        cache=cache,
        speculative=speculative,
        drafter=drafter,
        smallest=Smallest(rows=4, tokens=8, columns=16),
        **arguments,
    )
    if costs is not None:
        table = dict(COSTS[costs])
        engine._adaptive._measure = lambda rows, packed: table[rows * 4 if packed is None else packed]
        engine._adaptive.observe = lambda *args: None
    return engine


def run(engine, options=None):
    options = GenerateOptions(16) if options is None else options
    for i, prompt in enumerate(PROMPTS):
        engine.submit(prompt, options=options, key=jax.random.key(i), request_id=i)
    budgets, learn = [], engine._adaptive.learn

    def watched(work, built, budget, read, ms):
        judged = sum(int(read[row, -3]) for row, item in enumerate(work) if item.drafts is not None)
        budgets.append((budget, judged))
        learn(work, built, budget, read, ms)

    engine._adaptive.learn = watched
    found = engine.run()
    check_empty(engine)
    assert all(judged <= budget.drafts for budget, judged in budgets)
    return found, budgets


def right(found):
    return all(found[i] == alone(prompt) for i, prompt in enumerate(PROMPTS))


@pytest.mark.parametrize("costs", COSTS)
def test_the_tokens_are_the_same(costs):
    engine = make("recover", costs)
    found, budgets = run(engine)
    assert right(found)
    if costs == "dear":
        assert engine.stats.drafted == 0
        assert engine.stats.acceptance_length == 1
    else:
        assert engine.stats.accepted > 0
    packed = {budget.packed for budget, _ in budgets}  # small ones too, where there are few drafts
    assert packed == {"free": {4, 8, None}, "stairs": {4, 8}, "dear": {4}}[costs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "costs", "confident"),
    [
        ("recover", "stairs", True),
        ("native", "stairs", False),
        ("native", "dear", True),
        ("recover, prefixes", "free", True),
        ("recover, prefixes", "stairs", False),
        ("native, prefixes", "stairs", True),
    ],
)
def test_any_mode_and_drafter(mode, costs, confident):
    drafter = (Confident(3), jnp.asarray(np.random.default_rng(3).normal(size=(12, 12)), jnp.float32))
    found, _ = run(make(mode, costs, drafter=drafter if confident else None))
    assert right(found)


@pytest.mark.slow
def test_a_drafter_that_says_how_sure_it_is_decides_who_is_verified():
    drafter = (Confident(3), jnp.zeros((12, 12)))
    engine = make("recover", "stairs", drafter=drafter)
    _, budgets = run(engine)
    # four drafts among four sure requests: not all of anybody's
    full = [judged for budget, judged in budgets if budget.drafts == 4]
    assert full
    assert max(full) == 4
    assert 0 < engine.stats.drafted <= sum(budget.drafts for budget, _ in budgets)


@pytest.mark.slow
def test_measured_costs_leave_no_trace():
    """Times as they are: whatever is chosen, the tokens are right, and measuring changed nothing."""
    engine = make("recover", None)
    engine._cache = jax.tree.map(lambda x: x + 1.5, engine._cache)
    before = jax.tree.map(np.asarray, engine._cache)
    costs = engine._adaptive.costs(4)
    for ours, theirs in zip(jax.tree.leaves(engine._cache), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [tokens for tokens, _ in costs] == [4, 8, 16]
    assert all(0 < a[1] <= b[1] for a, b in itertools.pairwise(costs))
    found, _ = run(engine)
    assert right(found)


@pytest.mark.slow
def test_the_distribution_is_the_models():
    """Under a tight budget, with a drafter that is usually wrong, against plain sampling."""
    drafter = (Confident(3), jnp.asarray(np.random.default_rng(3).normal(size=(12, 12)) * 2, jnp.float32))
    options, draws = GenerateOptions(3, temperature=1.0), 1500
    counts = []
    for engine in (make("recover", "stairs", drafter=drafter), plain()):
        for i in range(draws):
            engine.submit((1, 2), options=options, key=jax.random.key(i), request_id=i)
        found = engine.run()
        counts.append(Counter(tuple(tokens[1:]) for tokens in found.values()))
    names = [name for name, _ in (counts[0] + counts[1]).most_common(40)]
    ours, theirs = (np.asarray([count[name] for name in names], float) for count in counts)
    chi2 = np.sum((ours - theirs) ** 2 / np.maximum(ours + theirs, 1))
    assert chi2 < 2.2 * len(names), chi2  # 40 degrees of freedom: 88 is five standard deviations out


def plain():
    _, cache = MODES["plain"]
    return Engine(
        MODEL,
        cache=cache,
        max_requests=4,
        max_tokens_per_step=24,
        max_length=48,
        smallest=Smallest(rows=4, tokens=8, columns=16),
    )


def test_refused():
    with pytest.raises(ValueError, match="adaptive must be True or False, got 1"):
        SpeculativeOptions("ngram", 3, adaptive=1)
