"""Drafters that run inside the engine's step: the tokens are those of ``generate`` with the same drafter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.cache_options import CacheOptions
from kda_jax.engine import Engine
from kda_jax.generation import generate
from kda_jax.metadata_builder import Smallest
from kda_jax.options import GenerateOptions, SpeculativeOptions
from kda_jax.speculate.draft_model import DraftModel
from kda_jax.speculate.drafter import Draft
from kda_jax.speculate.seats import Seated
from tests.compiling import quick  # noqa: F401
from tests.drafters import Table, Tree
from tests.test_engine import MODEL, SHARED, check_empty

PROMPTS = (tuple(SHARED[:9]), (1, 2), tuple(SHARED[:5]), (7, 3, 3, 8, 1, 1, 4))
CACHES = {
    "none": CacheOptions(page_size=4),
    "prefixes": CacheOptions("align", 8, page_size=4, prefix_caching=True),
}
NEW = 10


def drafter_of(kind):
    if kind == "itself":  # every draft stands
        return DraftModel(MODEL.config, MODEL.params)
    rng = np.random.default_rng(3)
    return Table(3), jnp.asarray(rng.normal(size=(12, 12)) * 2, jnp.float32)


def run(kind, cache, options, recover=True, warm_up=False, **changes):
    method = "draft" if kind == "itself" else "custom"
    speculative = SpeculativeOptions(method, 3, recover=recover)
    arguments = {"max_requests": 2, "max_tokens_per_step": 8, "max_length": 32} | changes
    drafter = drafter_of(kind)
    arguments["smallest"] = Smallest(rows=4, tokens=8, columns=16)
    engine = Engine(MODEL, cache=cache, speculative=speculative, drafter=drafter, **arguments)
    if warm_up:
        engine.warm_up()
    for i, prompt in enumerate(PROMPTS):
        engine.submit(prompt, options=options, key=jax.random.key(i), request_id=i)
    found = engine.run()
    check_empty(engine)
    assert sorted(engine._scheduler.free_seats) == list(range(arguments["max_requests"]))
    for i, prompt in enumerate(PROMPTS):
        alone = generate(
            MODEL.params,
            MODEL.config,
            np.asarray([prompt]),
            np.asarray([len(prompt)]),
            jax.random.key(i),
            options=options,
            speculative=speculative,
            drafter=drafter,
        )
        assert found[i] == alone.tokens[0, : int(alone.lengths[0])].tolist(), (i, found[i])
    return engine


def test_a_model_that_drafts_for_itself_is_always_right():
    """Its state is kept through steps that others take, through preemption, and in seats that changed hands."""
    engine = run("itself", CACHES["none"], GenerateOptions(NEW))
    stats = engine.stats
    assert stats.accepted == stats.drafted > 0
    assert stats.acceptance_length > 2.5
    assert stats.drafter_bytes == sum(x.nbytes for x in jax.tree.leaves(engine._drafter.seats)) > 0


def test_sampled_tokens_are_those_of_generate():
    run("table", CACHES["none"], GenerateOptions(NEW, temperature=0.8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cache", "recover", "shape"),
    [
        ("itself", "prefixes", True, {}),
        ("itself", "none", False, {"temperature": 0.7, "top_p": 0.9}),
        ("table", "prefixes", False, {"temperature": 0.7, "top_k": 6}),
        ("table", "prefixes", True, {"temperature": 0.7, "top_k": 6, "top_p": 0.9}),
    ],
)
def test_any_cache_and_sampling(kind, cache, recover, shape):
    run(kind, CACHES[cache], GenerateOptions(NEW, **shape), recover)


@pytest.mark.slow
def test_preempted_requests_are_seated_again():
    tight = CacheOptions(page_size=4, num_pages=11)
    engine = run("itself", tight, GenerateOptions(NEW), max_requests=3)
    assert engine.stats.preemptions > 0
    assert engine.stats.accepted == engine.stats.drafted


@pytest.mark.slow
def test_warm_up_leaves_the_seats_alone():
    engine = run("itself", CACHES["none"], GenerateOptions(NEW), warm_up=True)
    assert engine.stats.accepted == engine.stats.drafted
    before = jax.tree.map(np.asarray, engine._drafter.seats)
    engine.warm_up()
    for ours, theirs in zip(jax.tree.leaves(engine._drafter.seats), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@dataclasses.dataclass(frozen=True)
class Keeps(Table):
    """A table whose state has the shape it is told."""

    shape: tuple = ()

    def start(self, params, context):
        return jnp.zeros([context.lengths.shape[0] if x == "B" else x for x in self.shape])


def test_each_row_of_a_state_is_found():
    kept = Seated.of(Keeps(3, ("B", 5)), None, 4, 16), Seated.of(Keeps(3, (2, "B")), None, 4, 16)
    assert [seated.places[0] for seated in kept] == [(0, 0, 1), (1, 0, 1)]
    model, params = DraftModel(MODEL.config, MODEL.params).drafter(MODEL.config, 3, None)
    places = Seated.of(model, params, 4, 16).places
    assert {(place.first, place.per_row) for place in places} >= {(1, 2), (0, 1)}  # slots behind the null one; rows


@pytest.mark.parametrize("shape", [(5,), ("B", "B")])
def test_a_state_that_mixes_its_rows_is_refused(shape):
    with pytest.raises(ValueError, match="drafter must keep a state whose arrays each have one axis that grows"):
        Seated.of(Keeps(3, shape), None, 4, 16)


@dataclasses.dataclass(frozen=True)
class Widens(Table):
    def start(self, params, context):
        return jnp.zeros(context.lengths.shape, jnp.int32)

    def __call__(self, params, state, context, keys):
        tokens = jnp.zeros((state.shape[0], self.num_draft_tokens), jnp.int32)
        return Draft(tokens, None, state.astype(jnp.float32))


REFUSED = {
    "tree": (Tree((0, 0, 1), 12), (jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 8, 3), jnp.int32)), "draft chains"),
    "dtype": (Widens(3), None, "drafter must keep the dtypes of its state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_the_first_step_drafts(case):
    drafter, params, message = REFUSED[case]
    engine = Engine(
        MODEL,
        cache=CacheOptions(page_size=4),
        speculative=SpeculativeOptions("custom", 3),
        drafter=(drafter, params),
        max_requests=1,
        max_tokens_per_step=4,
        max_length=16,
    )
    engine.submit((1, 2), options=GenerateOptions(4))
    with pytest.raises(ValueError, match=message):
        engine.run()
