"""Trees of drafts leave the tokens alone, and a tree that is a chain is that chain bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import kda_jax
from kda_jax import model
from kda_jax.cache import make_pools
from kda_jax.metadata import SpecRows, StepMetadata
from tests.compiling import quick  # noqa: F401
from tests.drafters import AsTree, Table, Tree
from tests.ops.test_tree import path_of, random_parents
from tests.small_models import Ledger, healthy_params
from tests.test_speculative_generation import KEY, NEVER, NEW, PROMPT, ROWS, cases, check_emitted, few
from tests.tiny import TINY
from tests.tolerances import assert_close, tolerance


@pytest.fixture(scope="module")
def ledger():
    ledger = Ledger()
    yield ledger
    ledger.check()


def compare(case, found, plain, ledger, what):
    for b, n in enumerate(plain.lengths):
        prompt, tokens = case.prompts[b, : case.lengths[b]], found.tokens[b, : found.lengths[b]]
        params, reference = healthy_params(case.config), plain.tokens[b, :n]
        ledger.compare(params, case.config, prompt, tokens, reference, f"{what}, row {b}")
    # a step emits the drafts that stand and one token more, except that a stop token may be a draft itself
    extra = 1 + found.stats.steps + found.stats.accepted.sum(axis=1) - found.lengths
    assert np.isin(extra, (0, 1)).all()
    assert not extra[found.lengths == case.new_tokens].any()
    assert (found.stats.accepted <= found.stats.drafted).all()
    assert (np.diff(found.stats.accepted, axis=1) <= 0).all()


TREES = {
    "siblings": (0, 0, 0),
    "binary": (0, 0, 1, 1, 2, 2),
    "trunk and twigs": (0, 1, 2, 0, 4, 1, 3),
}


SLOW = ("siblings", "trunk and twigs")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in TREES])
def test_any_tree_leaves_the_tokens_alone(name, ledger):
    parents = TREES[name]
    accepted = drafted = 0

    @few
    @given(cases())
    def run(case):
        nonlocal accepted, drafted
        rng = np.random.default_rng(case.seed)
        stop_tokens = case.stop_tokens()
        plain = case.generate(stop_tokens)
        sequence = rng.integers(0, TINY.vocab_size, (ROWS, PROMPT + NEW)).astype(np.int32)
        for b, n in enumerate(case.lengths):
            sequence[b, n : n + plain.lengths[b]] = plain.tokens[b, : plain.lengths[b]]
        # several siblings may be right, or none; a draft that is not there has some behind it
        choice = rng.choice(4, (*sequence.shape, len(parents)), p=(0.55, 0.2, 0.15, 0.1)).astype(np.int32)
        drafter = Tree(parents, TINY.vocab_size), (sequence, np.where(choice == 3, -1, choice))
        how = kda_jax.SpeculativeOptions("custom", len(parents))
        found = case.generate(stop_tokens, speculative=how, drafter=drafter)
        check_emitted(found, case, stop_tokens)
        compare(case, found, plain, ledger, name)
        accepted, drafted = accepted + found.stats.accepted.sum(0), drafted + found.stats.drafted.sum(0)

    run()
    deepest = max(len(path_of((-1, *parents), i)) for i in range(len(parents) + 1)) - 1
    assert (accepted[:deepest] > 0).all()
    assert (accepted[:deepest] < drafted[:deepest]).all()
    assert not drafted[deepest:].any()


def test_ngram_trees_leave_the_tokens_alone(ledger):
    accepted = 0

    @few
    @given(cases())
    def run(case):
        nonlocal accepted
        case = dataclasses.replace(case, prompts=case.prompts % 3 + 8)
        stop_tokens = case.stop_tokens()
        plain = case.generate(stop_tokens)
        found = case.generate(stop_tokens, speculative=kda_jax.SpeculativeOptions("ngram", 6, branches=(3, 2, 1)))
        check_emitted(found, case, stop_tokens)
        compare(case, found, plain, ledger, "n-gram tree")
        accepted += found.stats.accepted.sum()

    run()
    assert accepted > 0


def test_a_chain_is_a_tree_bit_for_bit():
    """Greedy and sampled rows: tokens and stats."""
    prompts = np.random.default_rng(3).integers(0, TINY.vocab_size, (ROWS, PROMPT)).astype(np.int32)
    table = 3 * jax.random.normal(jax.random.key(1), (TINY.vocab_size, TINY.vocab_size))
    options = kda_jax.GenerateOptions(NEW, temperature=np.tile([0.0, 2.0], ROWS // 2), stop_tokens=(NEVER, NEVER))
    arguments = healthy_params(TINY), TINY, prompts, np.arange(ROWS, dtype=np.int32) + 5, KEY
    how = {"options": options, "speculative": kda_jax.SpeculativeOptions("custom", 3)}
    chain, tree = (kda_jax.generate(*arguments, **how, drafter=(d, table)) for d in (Table(3), AsTree(Table(3))))
    jax.tree.map(np.testing.assert_array_equal, chain, tree)
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert 0 < chain.stats.accepted[rows].sum() < chain.stats.drafted[rows].sum()


# --- one step --------------------------------------------------------------------------------------------------------


W, STEPS = 6, 3


@pytest.mark.parametrize("paged", [False, True])
def test_the_cache_after_a_path_is_that_of_its_tokens(paged):
    """Several steps of a tree, and of the chain of the rows that stood, on two caches: logits, states, histories and
    latents agree."""
    config, params, rng = TINY, healthy_params(TINY), np.random.default_rng(2)
    rows, size = 4, 7 if paged else 32
    pools = make_pools(config, slots=rows + 1, pages=1 + rows * 5 if paged else rows, page_size=size, dtype=jnp.float32)
    noise = iter(jax.random.split(jax.random.key(0), 20))
    # whatever is in pages nobody wrote must not be seen
    pools = jax.tree.map(lambda x: jax.random.normal(next(noise), x.shape), pools)
    pages = jnp.arange(1, 1 + rows * 5, dtype=jnp.int32).reshape(rows, 5)[:, ::-1] if paged else None
    slots = jnp.array([3, 0, 1, 4], jnp.int32)
    caches = {"tree": pools, "chain": pools}
    computed = np.array([0, 0, 3, 5], np.int32)

    @jax.jit
    def tree_step(cache, tokens, spec, path, count):
        logits, cache, left = model.step(params, config, cache, tokens, StepMetadata(spec=spec))
        cache, left = model.keep_path(cache, left, spec, path, count)
        return logits, model.commit(params, config, cache, left, model.plan_rows(spec, count))

    @jax.jit
    def chain_step(cache, tokens, spec, count):
        logits, cache, left = model.step(params, config, cache, tokens, StepMetadata(spec=spec))
        return logits, model.commit(params, config, cache, left, model.plan_rows(spec, count))

    for _ in range(STEPS):
        parents = random_parents(rng, rows, W)
        tokens = rng.integers(0, config.vocab_size, (rows, W)).astype(np.int32)
        lengths = np.array([W, W, W - 2, W], np.int32)
        path, straight = np.zeros((rows, W), np.int32), np.zeros((rows, W), np.int32)
        count = np.zeros(rows, np.int32)
        for r in range(rows):
            stand = path_of(parents[r], int(rng.integers(0, lengths[r])))
            path[r, : len(stand)], count[r] = stand, len(stand)
            straight[r, : len(stand)] = tokens[r, stand]
        common = {"request_rows": jnp.arange(rows), "computed": jnp.asarray(computed), "slots": slots, "pages": pages}
        spec = SpecRows(**common, lengths=jnp.asarray(lengths), parents=jnp.asarray(parents), window=W)
        logits, caches["tree"] = tree_step(caches["tree"], tokens, spec, path, count)
        spec = SpecRows(**common, lengths=jnp.asarray(count), window=W)
        want, caches["chain"] = chain_step(caches["chain"], straight, spec, count)
        live = np.asarray(slots) > 0
        for r in np.flatnonzero(live):
            stand = path[r, : count[r]]
            assert_close(logits[r, stand], want[r, : count[r]], 1e-5, f"logits, row {r}")
        computed = computed + np.where(live, count, 0)
        limit = tolerance("float32").state
        for name in ("state", "conv"):
            got, expected = (np.asarray(getattr(caches[which], name)) for which in ("tree", "chain"))
            assert_close(got, expected, limit, name)
            np.testing.assert_array_equal(got[:, [0, 2]], np.asarray(getattr(pools, name))[:, [0, 2]])
        for got, expected in zip(caches["tree"].latents, caches["chain"].latents, strict=True):
            for r in np.flatnonzero(live):
                where = np.arange(computed[r])
                page = np.asarray(pages)[r, where // size] if paged else np.full_like(where, r)
                at = page, where % size
                assert_close(np.asarray(got)[at], np.asarray(expected)[at], limit, f"latents, row {r}")


# --- what trees can't be combined with -------------------------------------------------------------------------------


def refuse(message, how, implementation=None):
    drafter = Tree((0, 0), TINY.vocab_size), (np.zeros((1, 20), np.int32), np.zeros((1, 20, 2), np.int32))
    options = kda_jax.GenerateOptions(4, implementation=implementation)
    arguments = healthy_params(TINY), TINY, np.ones((1, 4), np.int32), np.array([4], np.int32), KEY
    with pytest.raises(ValueError, match=message):
        kda_jax.generate(*arguments, options=options, speculative=how, drafter=drafter)


def test_trees_are_refused_where_they_have_no_form():
    options = kda_jax.SpeculativeOptions
    refuse("recover must be True for a tree of drafts", options("custom", 2, recover=False))
    refuse("rejection must be 'standard' for a tree of drafts, got 'block'", options("custom", 2, rejection="block"))
    rows = jnp.zeros(1, jnp.int32)
    spec = SpecRows(rows, rows, rows, rows, target_slots=rows[:, None], parents=rows[:, None] - 1, window=1)
    cache = make_pools(TINY, slots=2, pages=1, page_size=4, dtype=jnp.float32)
    with pytest.raises(ValueError, match="parents: a tree of drafts needs the recover mode"):
        model.step(healthy_params(TINY), TINY, cache, rows[:, None], StepMetadata(spec=spec))
