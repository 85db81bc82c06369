"""Acceptance of trees: greedy rows exactly, chains as chains, sampled rows by enumeration, bad logits, errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax.speculate.rejection import accept
from kda_jax.speculate.sampling import row_keys
from kda_jax.speculate.tree import accept_tree, walk
from tests.compiling import quick  # noqa: F401
from tests.speculate.test_exactness import distribution
from tests.speculate.test_rejection import example

ROWS, DRAFTS, VOCAB = 4, 5, 4
accept_tree_jit = jax.jit(accept_tree)
accept_jit = jax.jit(accept, static_argnames="method")
walk_jit = jax.jit(walk)


def greedy_reference(logits, drafts, parents, count):
    """(rows of the path, tokens, nan) of one row, by following every path: the longest one, of equals the first."""
    vocab = logits.shape[-1]
    best = (0,), logits[0]

    def follow(path):
        nonlocal best
        if len(path) > len(best[0]):
            best = path, logits[path[-1]]
        here = logits[path[-1]]
        if not np.isfinite(here.max()):
            return
        for i in range(count):
            if parents[i] == path[-1] and 0 <= drafts[i] < vocab and drafts[i] == np.argmax(here):
                follow((*path, i + 1))

    follow((0,))
    path, last = best
    tokens = [int(drafts[i - 1]) for i in path[1:]]
    nan = not np.isfinite(last.max())
    return list(path), tokens if nan else [*tokens, int(np.argmax(last))], nan


tree_row = st.tuples(
    st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, -np.inf]), min_size=VOCAB, max_size=VOCAB),
        min_size=DRAFTS + 1,
        max_size=DRAFTS + 1,
    ),
    st.lists(st.sampled_from(["right", "right", -1, 0, 1, 2, VOCAB]), min_size=DRAFTS, max_size=DRAFTS),
    st.tuples(*(st.integers(0, i) for i in range(DRAFTS))),
    st.integers(0, DRAFTS),
    st.sampled_from([None, None, *range(DRAFTS + 1)]),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(tree_row, min_size=ROWS, max_size=ROWS), st.booleans())
def test_greedy_rows_take_the_longest_matching_path(rows, with_sampled_row):
    logits = np.array([r[0] for r in rows], np.float32)
    parents = np.array([r[2] for r in rows], np.int32)
    drafts = np.zeros((ROWS, DRAFTS), np.int32)
    for b, (_, wanted, _, _, bad_row) in enumerate(rows):
        for i, d in enumerate(wanted):
            drafts[b, i] = np.argmax(logits[b, parents[b, i]]) if d == "right" else d
        if bad_row is not None:
            logits[b, bad_row, b] = np.nan
    count = np.array([r[3] for r in rows], np.int32)
    temperature = np.zeros(ROWS, np.float32)
    temperature[-1] = with_sampled_row
    out = accept_tree_jit(logits, drafts, parents, count, None, row_keys(jax.random.key(0), ROWS), temperature)
    for b in range(ROWS - with_sampled_row):
        path, tokens, nan = greedy_reference(logits[b], drafts[b], parents[b], count[b])
        assert out.path[b].tolist() == path + [0] * (DRAFTS + 1 - len(path))
        assert out.num_accepted_drafts[b] == len(path) - 1
        assert out.tokens[b].tolist() == tokens + [0] * (DRAFTS + 1 - len(tokens))
        assert out.num_emitted[b] == len(tokens)
        assert bool(out.nan[b]) == nan


@pytest.mark.parametrize("probabilistic", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_a_chain_is_judged_as_a_chain(probabilistic, seed):
    """Bit for bit, and with the same random numbers."""
    logits, drafts, count, *rest = example(seed, rows=60, probabilistic=probabilistic)
    logits = logits.at[7, 2].set(jnp.nan).at[11, 0].set(jnp.nan)
    chain = jnp.broadcast_to(jnp.arange(drafts.shape[1])[None], drafts.shape)
    want = accept_jit(logits, drafts, count, *rest, method="standard")
    got = accept_tree_jit(logits, drafts, chain, count, *rest)
    for name in ("num_accepted_drafts", "tokens", "nan", "num_emitted"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    assert len(np.unique(want.num_accepted_drafts)) > 2
    rows = np.arange(drafts.shape[1] + 1)[None]
    np.testing.assert_array_equal(got.path, np.where(rows <= want.num_accepted_drafts[:, None], rows, 0))


def tree_example(rows=64):
    logits, drafts, _, probs, keys, temperature, top_k, _ = example(3, rows=rows)
    parents = jnp.broadcast_to(jnp.array([0, 0, 1, 2])[None], drafts.shape)
    return [logits, drafts, parents, jnp.arange(rows) % 5, probs, keys, temperature, top_k]


def test_a_rows_outcome_does_not_depend_on_its_batch():
    arguments = tree_example()
    together = accept_tree_jit(*arguments)
    shuffled = np.random.default_rng(0).permutation(64)
    again = accept_tree_jit(*(x[shuffled] for x in arguments))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x)[shuffled], y), together, again)


def test_what_is_not_there_is_not_looked_at():
    logits, drafts, parents, count, probs, *rest = tree_example()
    want = accept_tree_jit(logits, drafts, parents, count, probs, *rest)
    past = jnp.arange(4)[None] >= count[:, None]
    logits = logits.at[:, 1:].set(jnp.where(past[..., None], jnp.nan, logits[:, 1:]))
    got = accept_tree_jit(
        logits, jnp.where(past, -1, drafts), parents, jnp.full(64, 4), jnp.where(past[..., None], jnp.nan, probs), *rest
    )
    jax.tree.map(np.testing.assert_array_equal, want, got)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("kind", ["silent", "not numbers"])
def test_a_draft_that_is_not_there_hides_what_is_behind_it(place, kind):
    logits, drafts, parents, _, probs, *rest = tree_example()
    drafts = jnp.where(drafts < 0, 0, drafts)
    if kind == "silent":
        drafts = drafts.at[:, place].set(-1)
    else:
        probs = probs.at[:, place].set(jnp.nan)
        rest[1] = jnp.full(64, 0.8)
    out = accept_tree_jit(logits, drafts, parents, jnp.full(64, 4), probs, *rest)
    assert not (np.asarray(out.path) == place + 1).any()
    assert not out.nan.any()
    # and leaves the others alone
    assert {tuple(p) for p in np.asarray(out.path)} - {(0, 0, 0, 0, 0)}


# --- sampled rows: uniforms are integrated, drafts are summed over ---------------------------------------------------


TREES = {
    "siblings": (0, 0, 0),
    "two pairs": (0, 0, 1, 1),
    "depth first": (0, 1, 0, 3),
    "chain and sibling": (0, 1, 1, 0),
    "interleaved": (0, 0, 2, 1),
}


def context_of(row, drafts, parents):
    """The drafts on the way to a row of the window."""
    tokens = []
    while row > 0:
        tokens.append(int(drafts[row - 1]))
        row = parents[row - 1]
    return tuple(tokens[::-1])


def enumerate_tree(parents, target, drafter, replacement, vocab=3, length=3):
    """Joint ``[vocab] * length`` of the tokens that come out, and the mean number of accepted drafts.

    ``target`` and ``drafter`` map a context (a tuple of tokens) to probabilities ``[vocab]``. ``drafter`` may be a
    tuple instead: drafts that are known beforehand.
    """
    m = len(parents)
    known = isinstance(drafter, tuple)
    trees, weights, rows, probs, there = [], [], [], [], []
    for drafts in [drafter] if known else itertools.product(range(vocab), repeat=m):
        weight, qs = 1.0, []
        for i in range(0 if known else m):
            q = drafter(context_of(parents[i], drafts, parents)).astype(np.float64)
            if not replacement:
                for j in range(i):
                    if parents[j] == parents[i]:
                        q = np.where(np.arange(vocab) == drafts[j], 0, q)
            if q.sum() > 0:
                q = q / q.sum()
                weight *= q[drafts[i]]
            else:  # the elder siblings have taken all the drafter would draw: no draft, which 0 stands for
                weight *= drafts[i] == 0
            qs.append(q)
        if weight > 0:
            trees.append(drafts)
            weights.append(weight)
            rows.append([target(context_of(i, drafts, parents)) for i in range(m + 1)])
            probs.append(qs)
            there.append([True] * m if known else [q.sum() > 0 for q in qs])
    patterns = list(itertools.product([0.0, np.inf], repeat=m))
    n, k = len(trees), len(patterns)

    def each(x, dtype):
        return jnp.asarray(np.repeat(np.asarray(x), k, axis=0).astype(dtype))

    with np.errstate(divide="ignore"):
        log_probs = each(np.log(np.asarray(rows, np.float32)), np.float32)
    uniforms = np.tile(np.asarray(patterns, np.float32), (n, 1))
    ends, following, h = walk_jit(
        log_probs,
        each(trees, np.int32),
        jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], (n * k, m)),
        each(there, bool),
        None if known else each(probs, np.float32),
        jnp.asarray(uniforms),
    )
    h, ends = np.asarray(h, np.float64), np.asarray(ends)
    following = np.exp(np.asarray(following, np.float64))
    following /= following.sum(-1, keepdims=True)
    # a pattern weighs what its tried drafts say; of patterns that differ in others only one counts
    tried = ~np.isnan(h)
    share = np.where(tried, np.where(uniforms == 0, np.minimum(h, 1), 1 - np.minimum(h, 1)), uniforms == 0)
    mass = np.prod(share, axis=1) * np.repeat(weights, k)
    assert mass.sum() == pytest.approx(1)
    out, accepted = np.zeros((vocab,) * length), 0.0
    for i in np.flatnonzero(mass):
        context = context_of(ends[i], trees[i // k], parents)
        accepted += mass[i] * len(context)
        for tokens in itertools.product(range(vocab), repeat=length):
            if tokens[: len(context)] != context:
                continue
            p = mass[i] * following[i, tokens[len(context)]]
            for t in range(len(context) + 1, length):
                p *= target(tokens[:t])[tokens[t]]
            out[tokens] += p
    return out, accepted


def tables(rng):
    """A function from contexts of up to two tokens to random probabilities, some of them zero."""
    made = {}

    def look_up(context):
        return made[context]

    for n in range(3):
        for context in itertools.product(range(3), repeat=n):
            made[context] = distribution(rng)
    return look_up


@pytest.mark.parametrize("kind", ["random", "with replacement", "right", "known", "known, one twice"])
@pytest.mark.parametrize("name", TREES)
def test_enumerated_output_is_the_target(name, kind):
    rng = np.random.default_rng(5)
    parents = TREES[name]
    for _ in range(3):
        target = tables(rng)
        drafter = target if kind == "right" else tables(rng)
        if kind.startswith("known"):
            drafter = tuple(map(int, rng.permutation(3)[[0, 1, 2, 0][: len(parents)]]))
            if kind == "known, one twice":
                drafter = (drafter[0], *drafter[:-1])
        out, accepted = enumerate_tree(parents, target, drafter, kind == "with replacement")
        first, second, third = np.indices((3, 3, 3))
        expected = np.vectorize(lambda a, b, c, t=target: float(t(())[a]) * t((a,))[b] * t((a, b))[c])(
            first, second, third
        )
        np.testing.assert_allclose(out, expected, rtol=0, atol=5e-7)
        assert accepted > 0


def test_a_wrong_rule_would_be_noticed():
    """Probabilities of drafts drawn with replacement, given for drafts drawn without, are another distribution."""
    rng = np.random.default_rng(6)
    target, drafter = tables(rng), tables(rng)
    out, _ = enumerate_tree((0, 0, 0), target, drafter, replacement=False)
    wrong = np.zeros(3)
    for drafts in itertools.permutations(range(3)):
        q, weight, left = drafter(()).astype(float), 1.0, 1.0
        for d in drafts:
            weight, left = weight * q[d] / max(left, 1e-9), left - q[d]
        if weight <= 0:
            continue
        r, reached = target(()).astype(float), 1.0
        for d in drafts:
            stands = min(1, r[d] / q[d])
            wrong[d] += weight * reached * stands
            reached *= 1 - stands
            r = np.maximum(r - q, 0)
            if r.sum() <= 0:
                break
            r /= r.sum()
        wrong += weight * reached * (r / r.sum() if r.sum() > 0 else 0)
    assert np.abs(wrong - target(())).max() > 1e-2
    np.testing.assert_allclose(out.sum((1, 2)), target(()), atol=1e-6)


def test_a_second_sibling_helps():
    """Two known drafts stand as often as the target takes either."""
    rng = np.random.default_rng(8)
    for _ in range(5):
        target = tables(rng)
        _, one = enumerate_tree((0,), target, (1,), False)
        _, two = enumerate_tree((0, 0), target, (1, 2), False)
        assert one == pytest.approx(target(())[1], abs=1e-6)
        assert two == pytest.approx(target(())[1] + target(())[2], abs=1e-6)


# --- bad logits, errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits(temperature):
    # the target is sure of token 2; two branches of 2s behind each other, and logits that are not numbers in row b
    logits = jnp.full((6, 5, 4), -jnp.inf).at[:, :, 2].set(0.0)
    for b in range(5):
        logits = logits.at[b, b, 0].set(jnp.nan)
    drafts = jnp.broadcast_to(jnp.array([1, 2, 2, 2])[None], (6, 4))
    parents = jnp.broadcast_to(jnp.array([0, 0, 2, 3])[None], (6, 4))
    keys = row_keys(jax.random.key(0), 6)
    out = accept_tree_jit(logits, drafts, parents, jnp.full(6, 4), None, keys, jnp.full(6, temperature))
    assert out.nan.tolist() == [True, False, True, True, True, False]
    assert out.num_accepted_drafts.tolist() == [0, 3, 1, 2, 3, 3]
    assert out.num_emitted.tolist() == [0, 4, 1, 2, 3, 4]
    assert out.path[2].tolist() == [0, 2, 0, 0, 0]
    assert (out.tokens.sum(1) == 2 * out.num_emitted).all()


def test_wrong_arguments_are_named():
    arguments = tree_example()
    for index, value, message in (
        (0, jnp.zeros((64, 11)), "logits must be floating"),
        (1, jnp.zeros((64, 3), jnp.int32), r"drafts must have shape \[64, 4\]"),
        (2, jnp.zeros((64, 5), jnp.int32), r"parents must be integers \[64, 4\] as drafts are, got int32 \[64, 5\]"),
        (2, jnp.zeros((64, 4)), "parents must be integers"),
        (4, jnp.zeros((64, 4, 3)), "draft_probs must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            accept_tree(*arguments[:index], value, *arguments[index + 1 :])
