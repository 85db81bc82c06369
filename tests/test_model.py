"""The model's forms agree: verify and commit leave what decoding the same tokens leaves; null rows leave nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax import model, ops
from kda_jax.cache import make_cache
from tests.compiling import quick  # noqa: F401
from tests.ops.harness import assert_same_bits
from tests.small_models import BOUNDED, healthy_params
from tests.tiny import TINY
from tests.tolerances import assert_close, tolerance

LIMIT = tolerance("float32").state
ROWS, PROMPT, WINDOW, TOKENS = 4, 8, 5, 40
CONFIGS = {"softplus gate": TINY, "bounded gate": BOUNDED}
assert all(config.kda_key_dim != config.kda_value_dim for config in CONFIGS.values())
assert all(config.kda_num_value_heads == 2 * config.kda_num_heads for config in CONFIGS.values())


@functools.cache
def compiled(name, config):
    return jax.jit(functools.partial(getattr(model, name), healthy_params(config), config))


def make(config, states_per_row=1, fill=0.0):
    cache = make_cache(config, batch=ROWS + 1, tokens=TOKENS, dtype=jnp.float32, states_per_row=states_per_row)
    rows = tuple(latents[:ROWS] + fill for latents in cache.latents)
    return dataclasses.replace(cache, state=cache.state + fill, conv=cache.conv + fill, latents=rows)


@dataclasses.dataclass
class Run:
    """Tokens of each row, where its state is, and in which steps how many of them are offered and stand."""

    tokens: np.ndarray  # [ROWS, TOKENS]
    prompts: np.ndarray  # [ROWS]
    slots: np.ndarray  # [ROWS]
    steps: list[tuple[np.ndarray, np.ndarray]]  # (offered 0..WINDOW, standing 0..offered), [ROWS] each


@st.composite
def runs(draw, vocab=TINY.vocab_size):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        offered = np.asarray(draw(st.lists(st.integers(0, WINDOW), min_size=ROWS, max_size=ROWS)), np.int32)
        standing = np.asarray([draw(st.integers(0, int(n))) for n in offered], np.int32)
        steps.append((offered, standing))
    slots = np.asarray(draw(st.permutations(range(1, ROWS + 2)))[:ROWS], np.int32)
    tokens = rng.integers(0, vocab, (ROWS, TOKENS)).astype(np.int32)
    return Run(tokens, rng.integers(1, PROMPT + 1, ROWS).astype(np.int32), slots, steps)


def after_prefill(run, config, cache, slots):
    return compiled("prefill", config)(run.tokens[:, :PROMPT], run.prompts, cache, slots)[1]


def windows(run, computed, standing, rng):
    """[ROWS, WINDOW]: the tokens that stand, then others."""
    at = computed[:, None] + np.arange(WINDOW)[None]
    right = np.take_along_axis(run.tokens, np.minimum(at, TOKENS - 1), axis=1)
    wrong = rng.integers(0, TINY.vocab_size, right.shape)
    return np.where(np.arange(WINDOW)[None] < standing[:, None], right, wrong).astype(np.int32)


def by_decoding(run, config):
    """Cache and committed lengths after the tokens that stand, one at a time; and their logits by (row, position)."""
    cache, computed, logits = after_prefill(run, config, make(config), run.slots), run.prompts.copy(), {}
    total = run.prompts + sum(standing for _, standing in run.steps)
    while (computed < total).any():
        live = computed < total
        tokens = np.take_along_axis(run.tokens, computed[:, None], axis=1)[:, 0]
        found, cache = compiled("decode", config)(tokens, computed, cache, np.where(live, run.slots, 0))
        logits |= {(b, computed[b]): np.asarray(found[b]) for b in np.flatnonzero(live)}
        computed = computed + live
    return cache, computed, logits


def check_cache(found, found_slots, reference, computed, slots):
    """What ``found`` keeps of committed tokens in ``found_slots`` [ROWS], against ``reference`` in ``slots``."""
    for layer in range(found.state.shape[0]):
        for b, (ours, slot) in enumerate(zip(found_slots, slots, strict=True)):
            for name in ("state", "conv"):
                left, right = getattr(found, name)[layer, ours], getattr(reference, name)[layer, slot]
                assert_close(left, right, LIMIT, f"{name} of row {b}, layer {layer}")
    for ours, theirs in zip(found.latents, reference.latents, strict=True):
        for b, n in enumerate(computed):
            assert_close(ours[b, :n], theirs[b, :n], LIMIT, f"latents of row {b}")


few = settings(max_examples=8, deadline=None)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_verify_and_commit_leave_what_decoding_leaves(config):
    @few
    @given(runs())
    def check(run):
        rng = np.random.default_rng(0)
        reference, total, expected = by_decoding(run, config)
        cache, computed = after_prefill(run, config, make(config), run.slots), run.prompts.copy()
        for offered, standing in run.steps:
            before = cache
            logits, cache, left = compiled("verify", config)(
                windows(run, computed, standing, rng), offered, computed, cache, run.slots
            )
            assert_same_bits(cache.state, before.state, "states, which verify only reads")
            assert_same_bits(cache.conv, before.conv, "histories, which verify only reads")
            for b, n in enumerate(standing):
                for i in range(n):
                    assert_close(logits[b, i], expected[b, computed[b] + i], LIMIT, f"logits of row {b}, token {i}")
            plan = ops.plan_commit(jnp.asarray(standing), jnp.asarray(offered), jnp.asarray(run.slots))
            cache = compiled("commit", config)(cache, left, plan)
            computed = computed + standing
        np.testing.assert_array_equal(computed, total)
        check_cache(cache, run.slots, reference, computed, run.slots)

    check()


@pytest.mark.parametrize("config", [TINY], ids=["softplus gate"])
def test_a_state_for_each_position_holds_what_decoding_leaves(config):
    @few
    @given(runs())
    def check(run):
        rng = np.random.default_rng(0)
        # the next window overwrites the states of a row of which nothing stands: such a row does not go on
        run.steps = [(np.maximum(offered, 1), np.maximum(standing, 1)) for offered, standing in run.steps]
        reference, _, _ = by_decoding(run, config)
        first = 1 + (run.slots - 1) * WINDOW
        cache, computed = after_prefill(run, config, make(config, WINDOW), first), run.prompts.copy()
        source, targets = first, first[:, None] + np.arange(WINDOW, dtype=np.int32)[None]
        for offered, standing in run.steps:
            _, cache, left = compiled("verify_native", config)(
                windows(run, computed, standing, rng), offered, computed, cache, source, targets
            )
            assert left.records is None
            plan = ops.plan_commit(jnp.asarray(standing), jnp.asarray(offered), jnp.asarray(source))
            plan = dataclasses.replace(plan, final_slot=jnp.asarray(first + standing - 1))
            cache = compiled("commit", config)(cache, left, plan)
            source, computed = first + standing - 1, computed + standing
        check_cache(cache, source, reference, computed, run.slots)

    check()


def nan_elsewhere(cache, slots):
    """The cache with NaN in every slot that is not named, and in every latent not written yet."""
    other = np.setdiff1d(np.arange(cache.conv.shape[1]), slots)
    state = cache.state.at[:, other].set(jnp.nan)
    return dataclasses.replace(cache, state=state, conv=cache.conv.at[:, other].set(jnp.nan)), other


def test_null_rows_change_nothing():
    """Rows 0 and 2 are padding or have ended: their states and histories stay bit for bit, and no NaN spreads."""
    rng = np.random.default_rng(1)
    slots = np.asarray([4, 2, 5, 1], np.int32)
    tokens = rng.integers(0, TINY.vocab_size, (ROWS, TOKENS)).astype(np.int32)
    run = Run(tokens, np.asarray([3, 8, 5, 1], np.int32), slots, [])
    live = np.asarray([False, True, False, True])
    some = np.where(live, slots, 0).astype(np.int32)
    full = after_prefill(run, TINY, make(TINY), slots)
    cache, other = nan_elsewhere(full, some)
    offered = np.full(ROWS, WINDOW, np.int32)
    window = rng.integers(0, TINY.vocab_size, (ROWS, WINDOW)).astype(np.int32)

    def check(logits, after, whole_logits, whole, what, cache=cache):
        assert_same_bits(after.state[:, other], cache.state[:, other], f"states nobody named, {what}")
        assert_same_bits(after.conv[:, other], cache.conv[:, other], f"histories nobody named, {what}")
        assert_close(after.state[:, some[live]], whole.state[:, some[live]], LIMIT, f"states of live rows, {what}")
        assert_close(after.conv[:, some[live]], whole.conv[:, some[live]], LIMIT, f"histories of live rows, {what}")
        assert_close(np.asarray(logits)[live], np.asarray(whole_logits)[live], LIMIT, f"logits of live rows, {what}")
        assert (np.asarray(after.state[:, some[live]]) != np.asarray(cache.state[:, some[live]])).any()

    decode = compiled("decode", TINY)
    check(*decode(window[:, 0], run.prompts, cache, some), *decode(window[:, 0], run.prompts, full, slots), "decode")

    def step(cache, slots):
        logits, cache, left = compiled("verify", TINY)(window, offered, run.prompts, cache, slots)
        plan = ops.plan_commit(jnp.full(ROWS, 3), jnp.asarray(offered), jnp.asarray(slots))
        return logits, compiled("commit", TINY)(cache, left, plan)

    check(*step(cache, some), *step(full, slots), "verify and commit")
    prefilled = compiled("prefill", TINY)
    fresh, _ = nan_elsewhere(make(TINY, fill=0.5), some)
    check(
        *prefilled(tokens[:, :PROMPT], run.prompts, fresh, some),
        *prefilled(tokens[:, :PROMPT], run.prompts, make(TINY), slots),
        "prefill",
        cache=fresh,
    )


def test_a_row_that_commits_nothing_keeps_its_state():
    rng = np.random.default_rng(2)
    run = Run(rng.integers(0, 40, (ROWS, TOKENS)).astype(np.int32), np.full(ROWS, 4, np.int32), np.arange(1, 5), [])
    slots = np.arange(1, 5, dtype=np.int32)
    cache = after_prefill(run, TINY, make(TINY), slots)
    offered, standing = np.asarray([5, 0, 3, 1], np.int32), np.asarray([0, 0, 0, 1], np.int32)
    _, after, left = compiled("verify", TINY)(run.tokens[:, :WINDOW], offered, run.prompts, cache, slots)
    plan = ops.plan_commit(jnp.asarray(standing), jnp.asarray(offered), jnp.asarray(slots))
    after = compiled("commit", TINY)(after, left, plan)
    for name in ("state", "conv"):
        old, new = np.asarray(getattr(cache, name)), np.asarray(getattr(after, name))
        assert_same_bits(new[:, :4], old[:, :4], f"{name} of rows that commit nothing")
        assert (new[:, 4] != old[:, 4]).any()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_padding_of_a_prompt_enters_nothing(config):
    """Other tokens behind a prompt change no bit; a wider array changes only how sums are grouped."""
    rng = np.random.default_rng(3)
    slots = np.asarray([3, 1, 4, 2], np.int32)
    run = Run(rng.integers(0, 40, (ROWS, TOKENS)).astype(np.int32), np.asarray([1, 3, 6, 8], np.int32), slots, [])
    prefill = compiled("prefill", config)
    logits, cache = prefill(run.tokens[:, :PROMPT], run.prompts, make(config), slots)
    real = np.arange(TOKENS)[None] < run.prompts[:, None]
    other = np.where(real, run.tokens, rng.integers(0, 40, run.tokens.shape)).astype(np.int32)
    same_logits, same = prefill(other[:, :PROMPT], run.prompts, make(config), slots)
    assert_same_bits(same_logits, logits, "logits")
    assert_same_bits(same.state, cache.state, "states")
    assert_same_bits(same.conv, cache.conv, "histories")
    for ours, theirs in zip(same.latents, cache.latents, strict=True):
        for b, n in enumerate(run.prompts):
            assert_same_bits(ours[b, :n], theirs[b, :n], "latents")
    wide_logits, wide = prefill(other[:, :24], run.prompts, make(config), slots)
    assert_close(wide_logits, logits, 1e-6, "logits of a wider array")
    assert_close(wide.state, cache.state, 1e-6, "states of a wider array")
    assert_close(wide.conv, cache.conv, 1e-6, "histories of a wider array")


def test_forward_prefill_and_decode_agree():
    """Logits of whole sequences, of prefill, and of decoding after a prompt of one token."""
    rng = np.random.default_rng(4)
    tokens, lengths = rng.integers(0, 40, (ROWS, PROMPT)).astype(np.int32), np.asarray([8, 5, 2, 7], np.int32)
    whole = np.asarray(compiled("forward", TINY)(tokens, lengths))
    slots = np.arange(1, ROWS + 1, dtype=np.int32)
    last, _ = compiled("prefill", TINY)(tokens, lengths, make(TINY), slots)
    assert_close(last, whole[np.arange(ROWS), lengths - 1], LIMIT, "logits of prefill")
    run = Run(np.pad(tokens, [(0, 0), (0, TOKENS - PROMPT)]), np.ones(ROWS, np.int32), slots, [])
    run.steps = [(lengths - 1, lengths - 1)]
    _, _, logits = by_decoding(run, TINY)
    for (b, position), row in logits.items():
        assert_close(row, whole[b, position], LIMIT, f"logits of decode, row {b}, position {position}")
    assert len(logits) == (lengths - 1).sum()


def test_how_often_experts_were_chosen():
    rng = np.random.default_rng(5)
    tokens, lengths = rng.integers(0, 40, (ROWS, PROMPT)).astype(np.int32), np.asarray([8, 5, 2, 7], np.int32)
    _, load = jax.jit(functools.partial(model.forward, return_load=True), static_argnums=1)(
        healthy_params(TINY), TINY, tokens, lengths
    )
    assert load.shape == (2, 4)
    np.testing.assert_array_equal(load.sum(axis=1), [lengths.sum() * 2] * 2)


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (jnp.zeros(3, jnp.int32), None, r"tokens must be integers \[B, T\], got int32 \(3,\)"),
        (jnp.zeros((3, 2)), None, r"tokens must be integers \[B, T\], got float32"),
        (jnp.zeros((3, 0), jnp.int32), None, "tokens must hold at least one column"),
        (jnp.zeros((3, 2), jnp.int32), jnp.zeros(2, jnp.int32), r"lengths must be integers \[B=3\], got int32 \(2,\)"),
        (jnp.zeros((3, 2), jnp.int32), jnp.zeros(3), r"lengths must be integers \[B=3\], got float32"),
    ],
)
def test_bad_input_of_forward_is_named(tokens, lengths, message):
    with pytest.raises(ValueError, match=message):
        model.forward(healthy_params(TINY), TINY, tokens, lengths)
