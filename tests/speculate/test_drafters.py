"""The n-gram drafter against brute force, and the drafter protocol."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax.options import SpeculativeOptions
from kda_jax.speculate.drafter import Draft, DraftContext, Drafter, count_drafts
from kda_jax.speculate.ngram import NgramDrafter, propose
from kda_jax.speculate.rejection import accept
from kda_jax.speculate.sampling import row_keys, shape_logits

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


@dataclasses.dataclass(frozen=True)
class Unigram:
    """The example of the protocol's description: drafts tokens by their frequency; params are logits fp32 [V]."""

    num_draft_tokens: int

    def start(self, params, context):
        return None

    def __call__(self, params, state, context, keys):
        rows = jnp.broadcast_to(params, (context.lengths.shape[0], params.shape[0]))
        logp = shape_logits(rows, context.temperature, context.top_k, context.top_p)
        pick = jax.vmap(lambda key, row: jax.random.categorical(key, row, shape=(self.num_draft_tokens,)))
        probs = jnp.broadcast_to(jnp.exp(logp)[:, None], (rows.shape[0], self.num_draft_tokens, rows.shape[1]))
        return Draft(pick(keys, logp).astype(jnp.int32), probs, state)


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


def test_count_drafts():
    assert count_drafts(jnp.array([[1, 2, 3], [1, -1, 3], [-1, 0, 0], [0, 0, -1]])).tolist() == [3, 1, 0, 2]
