"""The n-gram drafter against brute force, and the drafter protocol."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax.options import SpeculativeOptions
from kda_jax.speculate import drafter as drafter_module
from kda_jax.speculate.drafter import DraftContext, Drafter, count_drafts
from kda_jax.speculate.lookup import Lookup
from kda_jax.speculate.ngram import NgramDrafter, propose, propose_tree
from kda_jax.speculate.rejection import accept
from kda_jax.speculate.sampling import row_keys

SIZE, DRAFTS = 14, 5
propose_jit = jax.jit(propose, static_argnums=(2, 3, 4))


def brute_force(tokens, num_draft, ngram_max, ngram_min):
    """Drafts for one row, a list; empty without a match."""
    for n in range(ngram_max, ngram_min - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n < len(tokens) and tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(num_draft):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=SIZE), min_size=3, max_size=3),
    st.sampled_from([(4, 1), (3, 2), (1, 1), (4, 4)]),
    st.sampled_from([-1, 0, 1]),
)
def test_ngram_agrees_with_brute_force(rows, lengths, beyond):
    tokens = np.full((3, SIZE), beyond, np.int32)
    for b, r in enumerate(rows):
        tokens[b, : len(r)] = r
    drafts, counts = propose_jit(tokens, np.array([len(r) for r in rows], np.int32), DRAFTS, *lengths)
    for b, r in enumerate(rows):
        expected = brute_force(r, DRAFTS, *lengths)
        assert drafts[b].tolist() == (expected or [-1] * DRAFTS)
        assert counts[b] == len(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5, 6]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2, 8, 1]),  # the latest of two
        ([3, 1, 2, 7, 4, 2, 8, 1, 2], [7, 4, 2, 8, 1]),  # the longest before the latest
        ([4, 4], [4, 4, 4, 4, 4]),  # an overlapping copy
        ([1, 2, 3], None),
        ([1], None),
        ([], None),
    ],
)
def test_ngram_examples(text, expected):
    tokens = jnp.zeros((1, 16), jnp.int32).at[0, : len(text)].set(jnp.array(text, jnp.int32))
    drafts, counts = propose(tokens, jnp.array([len(text)]), 5)
    assert drafts[0].tolist() == (expected or [-1] * 5)
    assert counts.tolist() == [5 if expected else 0]
    assert drafts.dtype == counts.dtype == jnp.int32


def test_ngram_longer_than_the_buffer():
    drafts, _ = propose(jnp.array([[1, 1, 1]]), jnp.array([3]), 9, 8)
    assert drafts.tolist() == [[1] * 9]


def test_ngram_errors():
    tokens, lengths = jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)
    for arguments, message in (
        ((tokens[0], lengths, 2), r"tokens must be integers \[B, T\], got int32 \[4\]"),
        ((tokens.astype(float), lengths, 2), "tokens must be integers"),
        ((tokens, lengths[:1], 2), r"lengths must have shape \[2\], got \[1\]"),
        ((tokens, lengths, 0), "num_draft must be at least 1, got 0"),
        ((tokens, lengths, 2, 2, 3), r"ngram_min must be in \[1, ngram_max=2\], got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            propose(*arguments)


# --- trees -----------------------------------------------------------------------------------------------------------


def brute_force_tree(tokens, branches, ngram_max, ngram_min):
    """Drafts and parents of one row, lists, branch after branch; -1 and 0 for none."""
    depth, length = branches[0], len(tokens)
    matches = []
    for end in range(1, length):
        n = 0
        while n < min(ngram_max, end) and tokens[end - 1 - n] == tokens[length - 1 - n]:
            n += 1
        if n >= ngram_min:
            text = list(tokens)
            for i in range(depth):
                text.append(text[end + i])
            matches.append((n, end, tuple(text[length:])))
    matches.sort(reverse=True)
    row_of = {(): 0}  # the drafts on the way to each row
    drafts, parents = [], []
    for count in branches:
        new = []
        for _, _, text in matches:
            parting = max(n for n in range(depth + 1) if text[:n] in row_of)
            if parting < depth:
                new = [text[: n + 1] for n in range(parting, min(parting + count, depth))]
                break
        first = len(drafts) + 1
        for i, path in enumerate(new):
            row_of[path] = first + i
        drafts += [path[-1] for path in new] + [-1] * (count - len(new))
        parents += [row_of[path[:-1]] for path in new] + [0] * (count - len(new))
    return drafts, parents


propose_tree_jit = jax.jit(propose_tree, static_argnums=(2, 3, 4))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=SIZE), min_size=3, max_size=3),
    st.sampled_from([((3, 2, 1), 4, 1), ((2, 2, 2, 2), 3, 2), ((5,), 4, 1)]),
)
def test_ngram_tree_agrees_with_brute_force(rows, how):
    branches = how[0]
    tokens = np.full((3, SIZE), 1, np.int32)
    for b, r in enumerate(rows):
        tokens[b, : len(r)] = r
    lengths = np.array([len(r) for r in rows], np.int32)
    drafts, parents = propose_tree_jit(tokens, lengths, *how)
    for b, r in enumerate(rows):
        want = brute_force_tree(r, *how)
        assert (drafts[b].tolist(), parents[b].tolist()) == want, (r, branches)
    if len(branches) == 1:
        np.testing.assert_array_equal(drafts, propose_jit(tokens, lengths, *branches, *how[1:])[0])
        assert drafts.dtype == parents.dtype == jnp.int32


def test_ngram_tree_examples():
    # "1 2" went on with 8 4, with 8 5 and with 9: two part at the first draft, two at the second
    text = [1, 2, 9, 0, 1, 2, 8, 5, 1, 2, 8, 4, 1, 2]
    drafts, parents = propose_tree(jnp.array([text]), jnp.array([len(text)]), (3, 2, 2))
    assert drafts.tolist() == [[8, 4, 1, 5, 1, 9, 0]]
    assert parents.tolist() == [[0, 1, 2, 1, 4, 0, 6]]
    with pytest.raises(ValueError, match=r"branches must be numbers of drafts, at least 1 each, got \(2, 0\)"):
        propose_tree(jnp.array([text]), jnp.array([3]), (2, 0))


# --- the protocol ----------------------------------------------------------------------------------------------------


def from_docstring(name):
    """The class ``name`` that the protocol's description holds as an example."""
    text = drafter_module.__doc__
    code = text[text.index("::\n") + 3 : text.index("\nIt is used as")]
    space = {"__name__": "example"}
    exec(compile(textwrap.dedent(code), "docstring", "exec"), space)
    return space[name]


Unigram = from_docstring("Unigram")


def test_the_example_is_short():
    text = drafter_module.__doc__
    assert text[text.index("::\n") : text.index("\nIt is used as")].count("\n") <= 30


@pytest.mark.parametrize("drafter", [Unigram(3), NgramDrafter.from_options(SpeculativeOptions("ngram", 3))])
def test_drafters_run_inside_a_compiled_loop(drafter: Drafter):
    batch, vocab = 2, 6
    params = jnp.arange(vocab, dtype=jnp.float32) if isinstance(drafter, Unigram) else None
    # the target counts down the vocabulary, and starts again
    logits_after = 8 * jax.nn.one_hot((jnp.arange(vocab) - 1) % vocab, vocab)

    @jax.jit
    def loop(tokens, lengths, temperature, keys):
        def step(carry, _):
            tokens, lengths, state = carry
            context = DraftContext(tokens, lengths, temperature)
            draft = drafter(params, state, context, keys)
            last = jnp.take_along_axis(tokens, lengths[:, None] - 1, 1)
            logits = logits_after[jnp.concatenate([last, jnp.maximum(draft.tokens, 0)], axis=1)]
            out = accept(logits, draft.tokens, count_drafts(draft.tokens), draft.probs, keys, temperature)
            place = jnp.where(
                jnp.arange(out.tokens.shape[1])[None] < out.num_emitted[:, None],
                lengths[:, None] + jnp.arange(out.tokens.shape[1])[None],
                tokens.shape[1],
            )
            tokens = tokens.at[jnp.arange(batch)[:, None], place].set(out.tokens, mode="drop")
            return (tokens, lengths + out.num_emitted, draft.state), out.num_accepted_drafts

        state = drafter.start(params, DraftContext(tokens, lengths, temperature))
        return jax.lax.scan(step, (tokens, lengths, state), None, length=12)

    tokens = jnp.zeros((batch, 64), jnp.int32).at[:, 0].set(jnp.array([5, 2]))
    (tokens, lengths, _), accepted = loop(
        tokens, jnp.ones(batch, jnp.int32), jnp.zeros(2), row_keys(jax.random.key(0), 2)
    )
    for first, row, length in zip((5, 2), tokens.tolist(), lengths.tolist(), strict=True):
        assert row[:length] == [(first - i) % vocab for i in range(length)]
    assert accepted.sum() > 0
    assert (lengths == 13 + accepted.sum(0)).all()


def test_count_drafts_of_a_tree():
    tokens = jnp.array([[1, 2, 3], [1, -1, 3], [-1, -1, -1], [0, 0, -1]])
    assert count_drafts(tokens, jnp.zeros_like(tokens)).tolist() == [3, 3, 0, 2]


def test_count_drafts():
    assert count_drafts(jnp.array([[1, 2, 3], [1, -1, 3], [-1, 0, 0], [0, 0, -1]])).tolist() == [3, 1, 0, 2]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 30),
)
def test_the_lookup_of_the_host_drafts_the_same(tokens, count, size, other, split):
    """Whatever the text, and however it came."""
    longest, shortest = max(size, other), min(size, other)
    lookup = Lookup(longest, shortest)
    lookup.extend(tokens[:split])
    lookup.extend(tokens[split:])
    assert lookup.propose(count) == brute_force(tokens, count, longest, shortest)
