"""Sampled tokens have the model's distribution, with and without speculation.

Thousands of rows with one prompt are one batch of one compiled call, each drawing with its own key; the first three
tokens together are held against exact enumeration by ``kda_jax.logits`` (chi-square, tests.statistics).
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_jax import DraftModel, GenerateOptions, SpeculativeOptions
from kda_jax.config import ModelConfig
from tests.compiling import quick  # noqa: F401
from tests.drafters import Table, TreeTable
from tests.small_models import healthy_params
from tests.speculate.toy import Shape, shaped
from tests.statistics import FALSE_ALARM, p_value, sample_size

VOCAB, LENGTH, DRAFTS = 4, 3, 3
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    mixer_kinds=("kda", "mla"),
    ffn_kinds=("dense", "dense"),
    intermediate_size=12,
    kda_num_heads=1,
    kda_num_value_heads=2,
    kda_key_dim=4,
    kda_value_dim=6,
    num_attention_heads=2,
    qk_nope_dim=4,
    qk_rope_dim=2,
    v_head_dim=4,
    kv_lora_rank=5,
    max_length=64,
    dtype="float32",
)
PARAMS = healthy_params(CONFIG, 3)
# flatter than random parameters give, so that every continuation is likely enough to be counted
PARAMS = dataclasses.replace(PARAMS, lm_head=PARAMS.lm_head * 0.35)
PROMPT = (1, 2, 3, 0, 2, 3, 1, 2)  # "2" and "1 2" were followed by "3": there is something to look up
SHAPES = (Shape(1.0, VOCAB, 1.0), Shape(1.2, 3, 0.9))
METHODS = {
    "plain": None,
    "n-gram, standard": SpeculativeOptions("ngram", DRAFTS),
    "n-gram, block": SpeculativeOptions("ngram", DRAFTS, rejection="block"),
    "table, standard": SpeculativeOptions("custom", DRAFTS),
    "table, block": SpeculativeOptions("custom", DRAFTS, rejection="block"),
    "table, native": SpeculativeOptions("custom", DRAFTS, recover=False),
    "n-gram tree": SpeculativeOptions("ngram", DRAFTS + 2, branches=(DRAFTS, 1, 1)),
    "tree, drawn": SpeculativeOptions("custom", 5),
    "draft model": SpeculativeOptions("draft", DRAFTS),
}
TREE = (0, 0, 1, 2, 1)
DRAFT_CONFIG = dataclasses.replace(CONFIG, kda_key_dim=3, kda_value_dim=5, hidden_size=12)
TESTS = len(METHODS) * len(SHAPES)
DRAWS = sample_size(VOCAB**LENGTH, TESTS)


@functools.cache
def table():
    """Half right: after even tokens what the model says of them behind the prompt, after odd ones something else."""
    contexts = np.asarray([[*PROMPT, t] for t in range(VOCAB)], np.int32)
    true = np.asarray(kda_jax.logits(PARAMS, CONFIG, contexts))[:, -1]
    other = np.random.default_rng(1).uniform(-1.5, 1.5, true.shape)
    return np.where(np.arange(VOCAB)[:, None] % 2 == 0, true, other).astype(np.float32)


def drafter_for(how, drafts=None):
    if how is None or how.method == "ngram":
        return None
    if how.method == "draft":
        params = healthy_params(DRAFT_CONFIG, 4)
        return DraftModel(DRAFT_CONFIG, dataclasses.replace(params, lm_head=params.lm_head * 0.35))
    tree = how.num_draft_tokens == len(TREE)
    return TreeTable(TREE) if tree else Table(how.num_draft_tokens), table() if drafts is None else drafts


@functools.cache
def joint(shape: Shape) -> np.ndarray:
    """Probabilities fp64 ``[VOCAB] * LENGTH`` of the first tokens under plain sampling, by enumeration."""
    sequences = np.asarray([[*PROMPT, *rest] for rest in itertools.product(range(VOCAB), repeat=LENGTH)], np.int32)
    logits = np.asarray(kda_jax.logits(PARAMS, CONFIG, sequences))
    out = np.ones(len(sequences))
    for i in range(LENGTH):
        at = len(PROMPT) + i
        for s, sequence in enumerate(sequences):
            out[s] *= shaped(logits[s, at - 1], shape)[sequence[at]]
    return out.reshape((VOCAB,) * LENGTH)


def run(how, rows, seed=0, new_tokens=LENGTH, shapes=SHAPES, drafts=None):
    """``rows`` rows of each shape; leaves ``[shapes, rows, ...]``."""
    batch = rows * len(shapes)
    options = GenerateOptions(
        new_tokens,
        temperature=np.repeat([s.temperature for s in shapes], rows),
        top_k=np.repeat([s.top_k for s in shapes], rows),
        top_p=np.repeat([s.top_p for s in shapes], rows),
    )
    found = kda_jax.generate(
        PARAMS,
        CONFIG,
        np.tile(np.asarray(PROMPT, np.int32), (batch, 1)),
        np.full(batch, len(PROMPT), np.int32),
        jax.random.key(seed),
        options=options,
        speculative=how,
        drafter=drafter_for(how, drafts),
    )
    return jax.tree.map(lambda x: np.asarray(x).reshape(len(shapes), rows, *x.shape[1:]), found)


def test_the_enumeration_is_of_probabilities():
    for shape in SHAPES:
        assert joint(shape).sum() == pytest.approx(1)
    assert (joint(SHAPES[0]) > 1e-3).all()
    assert (joint(SHAPES[1]) == 0).any()


# five methods with one of the shapes; the others, and with the other shape, where there is time
SLOW = ("n-gram, block", "table, native", "n-gram tree", "draft model")
CASES = [
    pytest.param(how, shape, id=f"{name}, shape {j}", marks=[pytest.mark.slow] * ((i + j) % 2 or name in SLOW))
    for i, (name, how) in enumerate(METHODS.items())
    for j, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("how", "shape"), CASES)
def test_the_first_tokens_have_the_models_distribution(how, shape):
    # prefill gives the first token; two more than are counted leave room for whole windows behind it
    found = jax.tree.map(lambda x: x[0], run(how, DRAWS, shapes=(shape,), new_tokens=LENGTH + 2))
    assert (found.lengths == LENGTH + 2).all()
    counts = np.zeros((VOCAB,) * LENGTH, int)
    np.add.at(counts, tuple(found.tokens[:, :LENGTH].T), 1)
    p = p_value(counts, joint(shape))
    assert p > FALSE_ALARM / TESTS, f"p = {p:.2g} of {DRAWS} draws"
    if how is not None:
        accepted, judged = found.stats.accepted.sum(axis=0), found.stats.drafted.sum(axis=0)
        deepest = 2 if how == METHODS["tree, drawn"] else DRAFTS
        assert (0.01 * judged < accepted)[:deepest].all()
        assert (accepted < 0.95 * judged)[:deepest].all()
        assert not judged[deepest:].any()


def test_the_test_would_notice():
    """Draws that follow another shape's distribution fail it."""
    counts = np.random.default_rng(0).multinomial(DRAWS, joint(SHAPES[0]).ravel()).reshape(joint(SHAPES[0]).shape)
    assert p_value(counts, joint(SHAPES[0])) > FALSE_ALARM
    for shape in SHAPES[1:]:
        assert p_value(counts, joint(shape)) < FALSE_ALARM / TESTS


ROWS, TOKENS = 256, 16


def sampled(how, seed=0):
    return run(how, ROWS // len(SHAPES), seed, TOKENS)


@pytest.mark.parametrize("method", ["custom", pytest.param("ngram", marks=pytest.mark.slow)])
def test_a_state_for_each_draft_gives_the_same_sampled_tokens(method):
    """Records and states differ by rounding, which changes a draw only where it lies that close to a threshold."""
    recover = sampled(SpeculativeOptions(method, DRAFTS))
    native = sampled(SpeculativeOptions(method, DRAFTS, recover=False))
    assert (recover.tokens != native.tokens).any(axis=-1).mean() <= 0.005
    assert 0 < recover.stats.accepted.sum() < recover.stats.drafted.sum()


def test_keys():
    how = SpeculativeOptions("custom", DRAFTS)
    first, again, other = sampled(how), sampled(how), sampled(how, seed=1)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != other.tokens).any(axis=-1).mean() > 0.99
    assert len(np.unique(first.tokens.reshape(ROWS, TOKENS), axis=0)) > 0.95 * ROWS


def test_drafts_sampled_from_the_model_itself_stand():
    """With the target's own probabilities as the drafter's, a draft of the first place is never refused."""
    how = SpeculativeOptions("custom", 1)
    true = np.full((VOCAB, VOCAB), np.nan, np.float32)
    contexts = np.asarray([[*PROMPT, t] for t in range(VOCAB)], np.int32)
    true[:] = np.asarray(kda_jax.logits(PARAMS, CONFIG, contexts))[:, -1]
    found = run(how, ROWS // len(SHAPES), new_tokens=3, drafts=jnp.asarray(true))
    assert (found.stats.drafted == 1).all()
    assert found.stats.accepted.mean() > 0.99
