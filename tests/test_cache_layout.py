"""Declared states, their copyable prefix, and the arrays that hold them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import model
from kda_jax.cache import Cache, copy_prefix, make_pools, no_commit
from kda_jax.cache_layout import CacheLayout, CacheSizes, Persistent, Workspace, copy_slots
from kda_jax.metadata import PrefillRows, SpecRows, StepMetadata
from tests.tiny import TINY, random_params
from tests.tolerances import relative_rms

SIZES = CacheSizes.from_config(TINY)
LAYOUT = CacheLayout.from_sizes(SIZES, window=4, dtype="bfloat16")
COPY = LAYOUT.copy_functions()


def named(*names):
    return [(name, copy_slots) for name in names]


def test_two_copied_of_many_states_are_accepted():
    """The case that stopped a server from starting: fewer copy functions than states."""
    assert len(COPY) < len(LAYOUT.states)
    LAYOUT.check_copy_functions(COPY)
    states = CacheLayout(
        (Persistent("conv", 1, (3, 8), "float32", "slot"), Persistent("state", 1, (2, 4, 3), "float32", "slot")),
        (Workspace("correction", 1, (2, 4, 4), "float32", "row"), Workspace("key", 1, (2, 4, 3), "float32", "row")),
    )
    states.check_copy_functions(named("conv", "state"))


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "got none"),
        (named("conv", "state", "latents", "correction", "key", "raw_gate", "conv_inputs", "conv"), "at most the 7"),
        (named("conv", "state", "latents", "correction"), "must not copy workspace, got one for 'correction'"),
        (named("conv", "state"), r"missing are \['latents'\]"),
        (named("state", "conv", "latents"), "in the order"),
        (named("conv", "conv", "state", "latents"), "in the order"),
        (named("conv", "stat"), "must be one of"),
    ],
)
def test_refused_copy_functions(functions, message):
    with pytest.raises(ValueError, match=message):
        LAYOUT.check_copy_functions(functions)


def test_counting_is_not_enough():
    """A check by number alone, in either form that shipped, lets a wrong order or a workspace state through."""

    def relaxed(functions):
        return 0 < len(functions) <= len(LAYOUT.states)

    for functions in (named("state", "conv", "latents"), named("conv", "state", "correction")):
        assert relaxed(functions)
        with pytest.raises(ValueError, match="functions must"):
            LAYOUT.check_copy_functions(functions)
    assert len(COPY) != len(LAYOUT.states)  # what the check for equal numbers refuses, though it is right


def test_persistent_states_are_a_prefix_by_type():
    assert CacheLayout.from_states(LAYOUT.states) == LAYOUT
    with pytest.raises(ValueError, match="persistent state 'conv' must come before workspace 'conv_inputs'"):
        CacheLayout.from_states(LAYOUT.states[::-1][:1] + LAYOUT.states[:1])
    with pytest.raises(ValueError, match="persistent must hold Persistent"):
        CacheLayout(LAYOUT.workspace, ())
    with pytest.raises(ValueError, match="workspace must hold Workspace"):
        CacheLayout((), LAYOUT.persistent)
    with pytest.raises(ValueError, match="different names"):
        CacheLayout(LAYOUT.persistent * 2, ())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_layout_is_that_of_the_arrays(dtype):
    layout = CacheLayout.from_sizes(SIZES, window=5, dtype=jnp.dtype(dtype).name)
    cache = make_pools(TINY, slots=3, pages=4, page_size=2, dtype=dtype)
    assert 3 * (layout.state("state").nbytes + layout.state("conv").nbytes) == cache.state.nbytes + cache.conv.nbytes
    assert 8 * layout.state("latents").nbytes == sum(x.nbytes for x in cache.latents)
    left = no_commit(TINY, 6, 5, dtype).records
    assert 6 * sum(state.nbytes for state in layout.workspace) == sum(x.nbytes for x in jax.tree.leaves(left))
    assert left.records.correction.dtype == jnp.float32


@pytest.mark.parametrize("rows", [3, 6])  # one by one, and by a scatter
def test_copies_leave_other_slots_alone(rows):
    cache = make_pools(TINY, slots=9, pages=1, page_size=1, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    state, conv = (rng.normal(size=x.shape).astype(np.float32) for x in (cache.state, cache.conv))
    for pool in (state, conv):
        pool[:, 0] = np.nan
    source = np.asarray([3, 0, 4, 3, 0, 0], np.int32)[:rows]
    target = np.asarray([4, 5, 6, 0, 0, 7], np.int32)[:rows]
    after = jax.jit(copy_prefix)(Cache(jnp.asarray(state), jnp.asarray(conv), ()), source, target)
    for name, old in (("state", state), ("conv", conv)):
        new = np.asarray(getattr(after, name))
        np.testing.assert_array_equal(new[:, [4, 6]], old[:, [3, 4]])  # read before slot 4 was written
        np.testing.assert_array_equal(new[:, [0, 1, 2, 3, 5, 7, 8]], old[:, [0, 1, 2, 3, 5, 7, 8]])


@pytest.mark.parametrize("rows", [1, 5])
def test_slots_past_the_pool_write_nothing(rows):
    """However many rows: none is moved back onto the last live slot."""
    pool = jnp.arange(8.0).reshape(1, 4, 2)
    source, target = np.full(rows, 2, np.int32), np.full(rows, 4, np.int32)
    np.testing.assert_array_equal(copy_slots(pool, source, target), pool)


@pytest.mark.parametrize("rows", [4, 8])
def test_every_copy_function_copies_what_the_cache_holds(rows):
    """Slots and pages alike, by the functions that the layout derives; the null unit may hold anything."""
    cache = make_pools(TINY, slots=7, pages=7, page_size=3, dtype=jnp.bfloat16)
    rng = np.random.default_rng(2)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), cache)
    # 1 -> 2 -> 3 at once, a swap, null entries
    source = jnp.asarray([1, 2, 5, 6, 0, 4, 0, 0][:rows])
    target = jnp.asarray([2, 3, 6, 5, 4, 0, 0, 0][:rows])
    axes = {"conv": 1, "state": 1, "latents": 0}
    for name, copy in COPY:
        pools, axis = getattr(cache, name), axes.pop(name)
        null = (slice(None),) * axis + (0,)
        pools = jax.tree.map(lambda x, null=null: x.at[null].set(jnp.nan), pools)
        copied = jax.jit(copy)(pools, source, target)
        assert jax.tree.structure(copied) == jax.tree.structure(pools)
        for before, after in zip(jax.tree.leaves(pools), jax.tree.leaves(copied), strict=True):
            assert after.dtype == before.dtype
            expected = jnp.take(before, jnp.asarray([0, 1, 1, 2, 4, 6, 5]), axis=axis)
            np.testing.assert_array_equal(np.asarray(after).view("u2"), np.asarray(expected).view("u2"))
    assert not axes


def test_a_model_serves_from_states_in_bfloat16():
    """``CacheOptions`` allows them: a prompt, then two verifies and a commit between, near what fp32 states give."""
    params = jax.tree.map(lambda x: x * 0.3, random_params(TINY))
    tokens, slots, pages = jnp.asarray([[5, 6, 7, 8], [9, 10, 11, 0]]), jnp.asarray([2, 1]), jnp.asarray([[1], [2]])
    rows, lengths, accepted = jnp.arange(2), jnp.asarray([4, 3]), jnp.asarray([3, 1])

    def run(dtype):
        cache = make_pools(TINY, slots=3, pages=3, page_size=16, dtype=jnp.float32, state_dtype=dtype)
        prompt = PrefillRows(rows, lengths, lengths * 0, None, slots, pages)
        _, cache, _ = model.step(params, TINY, cache, tokens, StepMetadata(prefill=prompt))
        first = SpecRows(rows, jnp.asarray([3, 3]), lengths, slots, pages=pages, window=3)
        _, cache, left = model.step(params, TINY, cache, tokens, StepMetadata(spec=first))
        cache = model.commit(params, TINY, cache, left, model.plan_rows(first, accepted))
        second = dataclasses.replace(first, computed=lengths + accepted)
        logits, cache, _ = model.step(params, TINY, cache, tokens, StepMetadata(spec=second))
        assert cache.state.dtype == dtype
        return logits

    exact, rounded = run(jnp.float32), run(jnp.bfloat16)
    assert 0 < relative_rms(rounded, exact) < 0.02


def test_a_layout_is_a_value():
    assert hash(LAYOUT) == hash(CacheLayout.from_sizes(SIZES, window=4, dtype="bfloat16"))
    assert dataclasses.is_dataclass(LAYOUT)
