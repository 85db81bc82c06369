"""Sampled speculation has the target's distribution: by counting draws, and by exact enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.speculate.rejection import accepted_length, next_weights, thresholds
from tests.speculate import toy
from tests.statistics import FALSE_ALARM, p_value, sample_size

KINDS = {True: toy.PROBABILISTIC, False: toy.DETERMINISTIC}
# per method, drafter and shape: the joint of three tokens and three marginals
TESTS = 2 * (len(toy.PROBABILISTIC) + len(toy.DETERMINISTIC)) * len(toy.SHAPES) * 4
DRAWS = sample_size(toy.VOCAB**3, TESTS)


@pytest.fixture(scope="module")
def drawn():
    """Outcomes of ``toy.run`` by (method, probabilistic), each run once."""
    outcomes = {}

    def get(method, probabilistic, **options):
        if (method, probabilistic) not in outcomes:
            tables = np.stack(list(KINDS[probabilistic].values()))
            out = toy.run(tables, jax.random.key(11), DRAWS, method, probabilistic, **options)
            outcomes[method, probabilistic] = jax.tree.map(np.asarray, out)
        return outcomes[method, probabilistic]

    return get


def p_values(tokens: np.ndarray, shape: toy.Shape) -> list[float]:
    """Of the joint of the three tokens, and of each alone. ``tokens`` ``[draws, 3]``."""
    counts = np.zeros((toy.VOCAB,) * 3)
    np.add.at(counts, tuple(tokens.T), 1)
    expected = toy.joint(shape)
    others = [tuple(a for a in range(3) if a != axis) for axis in range(3)]
    return [p_value(counts, expected)] + [p_value(counts.sum(o), expected.sum(o)) for o in others]


@pytest.mark.parametrize("probabilistic", [True, False])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_next_tokens_are_distributed_as_plain_sampling(drawn, method, probabilistic):
    tokens, accepted, judged, _ = drawn(method, probabilistic)
    for k, kind in enumerate(KINDS[probabilistic]):
        for s, shape in enumerate(toy.SHAPES):
            values = p_values(tokens[k, s], shape)
            assert min(values) > FALSE_ALARM / TESTS, (kind, shape, values)
            # the least likely token never stands where top-k drops it
            dropped = kind == "adversarial" and not probabilistic and shape.top_k < toy.VOCAB
            assert accepted[k, s].any() != dropped, (kind, shape)
            if kind == "right" and probabilistic:
                # nothing to reject, up to the rounding of p / q
                assert (accepted[k, s] < judged[k, s]).mean() < 1e-3
            else:
                assert (accepted[k, s] < judged[k, s]).any(), (kind, shape)


def test_a_method_that_ignores_the_target_is_noticed(drawn):
    tokens, *_ = drawn("synthetic", False, synthetic_rates=(0.2, 0.1, 0.1))
    found = [min(p_values(tokens[k, s], shape)) for k in range(4) for s, shape in enumerate(toy.SHAPES)]
    assert max(found) < FALSE_ALARM / TESTS


@pytest.mark.parametrize("probabilistic", [True, False])
def test_block_accepts_at_least_as_many_as_standard_on_the_same_draws(drawn, probabilistic):
    *_, standard = drawn("standard", probabilistic)
    *_, block = drawn("block", probabilistic)
    difference = block.astype(float) - standard
    mean, error = difference.mean(-1), difference.std(-1) / np.sqrt(DRAWS)
    assert (mean >= -4 * error).all()
    if probabilistic:
        wrong = list(toy.PROBABILISTIC).index("wrong")
        assert (mean[wrong] > 4 * error[wrong]).all()


# exact enumeration: uniforms are integrated, drafts are summed over


def distribution(rng, *leading, vocab=3):
    """Some random distributions, some of them with an impossible token, fp32 ``[*leading, vocab]``."""
    p = rng.dirichlet(np.ones(vocab), leading) * (rng.random((*leading, vocab)) < 0.8)
    p[..., 0] += 1e-3
    return (p / p.sum(-1, keepdims=True)).astype(np.float32)


def length_probabilities(h: np.ndarray, method: str) -> np.ndarray:
    """Probability ``[B, m + 1]`` of every accepted length, uniforms integrated out over all patterns of passing."""
    h = np.minimum(h.astype(np.float64), 1)
    out = np.zeros((h.shape[0], h.shape[1] + 1))
    for pattern in itertools.product([False, True], repeat=h.shape[1]):
        passed = np.array(pattern)
        weight = np.prod(np.where(passed, h, 1 - h), axis=1)
        length = np.asarray(accepted_length(jnp.broadcast_to(passed, h.shape), method))
        out[np.arange(h.shape[0]), length] += weight
    return out


def enumerate_block(p0, p1, p2, q1, q2, count, method):
    """Joint ``[3, 3, 3]`` of three tokens and the mean accepted length, for two drafts of which ``count`` are used.

    ``p0 [3]``, ``p1 [3, 3]``, ``p2 [3, 3, 3]`` and ``q1 [3]``, ``q2 [3, 3]`` are indexed by the tokens before. With
    ``q1`` None the drafts are ``q2``: two tokens, known beforehand.
    """
    if q1 is None:
        drafts = np.array([q2])
        weight, probs = np.ones(1), None
    else:
        drafts = np.array(list(itertools.product(range(3), repeat=2)))
        weight = q1[drafts[:, 0]].astype(np.float64) * q2[drafts[:, 0], drafts[:, 1]]
        probs = jnp.stack([jnp.broadcast_to(q1, (9, 3)), q2[drafts[:, 0]]], axis=1)
    first, second = drafts.T
    with np.errstate(divide="ignore"):
        rows = np.stack([np.broadcast_to(p0, (len(drafts), 3)), p1[first], p2[first, second]], axis=1)
        log_probs = jnp.asarray(np.log(rows))
    counts = jnp.full(len(drafts), count)
    drafts = jnp.asarray(drafts, jnp.int32)
    h, scale = thresholds(log_probs, drafts, counts, probs, method)
    lengths = weight[:, None] * length_probabilities(np.asarray(h), method)
    assert (lengths[:, count + 1 :] == 0).all()
    out = np.zeros((3, 3, 3))
    for length in range(count + 1):
        accepted = jnp.full(len(drafts), length)
        following = np.exp(np.asarray(next_weights(log_probs, drafts, counts, probs, scale, accepted), np.float64))
        following /= following.sum(-1, keepdims=True)
        for i in range(len(drafts)):
            a, b = first[i], second[i]
            mass = lengths[i, length]
            if length == 0:
                out += mass * following[i][:, None, None] * p1[:, :, None].astype(np.float64) * p2
            elif length == 1:
                out[a] += mass * following[i][:, None] * p2[a]
            else:
                out[a, b] += mass * following[i]
    return out, (lengths.sum(0) * np.arange(3)).sum()


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("kind", ["random", "right", "disjoint", "one-hot"])
def test_enumerated_output_is_the_target(method, kind, count):
    rng = np.random.default_rng(3)
    for _ in range(4):
        p0, p1, p2 = distribution(rng), distribution(rng, 3), distribution(rng, 3, 3)
        q1, q2 = distribution(rng), distribution(rng, 3)
        if kind == "right":
            q1, q2 = p0, p1
        elif kind == "disjoint":
            p0, q1 = np.array([[0.5, 0.5, 0], [0, 0, 1]], np.float32)
        elif kind == "one-hot":
            q1, q2 = None, tuple(rng.integers(0, 3, 2))
        out, _ = enumerate_block(p0, p1, p2, q1, q2, count, method)
        expected = p0[:, None, None].astype(np.float64) * p1[:, :, None] * p2
        np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("one_hot", [False, True])
def test_enumerated_acceptance_of_block_is_at_least_that_of_standard(one_hot):
    rng = np.random.default_rng(4)
    gains = []
    for _ in range(8):
        p = distribution(rng), distribution(rng, 3), distribution(rng, 3, 3)
        q = (None, tuple(rng.integers(0, 3, 2))) if one_hot else (distribution(rng), distribution(rng, 3))
        (_, standard), (_, block) = (enumerate_block(*p, *q, 2, method) for method in ("standard", "block"))
        gains.append(block - standard)
    assert min(gains) > -1e-6
    # a known draft leaves block verification nothing to gain
    assert max(np.abs(gains)) < 1e-6 if one_hot else max(gains) > 1e-3


def test_the_example_of_the_block_verification_paper():
    # two tokens, target (1/3, 2/3), drafter (2/3, 1/3), independent of context, two drafts: 10/9 against 11/9 accepted
    p, q = np.array([1 / 3, 2 / 3, 0], np.float32), np.array([2 / 3, 1 / 3, 0], np.float32)
    rows = p, np.tile(p, (3, 1)), np.tile(p, (3, 3, 1)), q, np.tile(q, (3, 1))
    assert enumerate_block(*rows, 2, "standard")[1] == pytest.approx(10 / 9, abs=1e-6)
    assert enumerate_block(*rows, 2, "block")[1] == pytest.approx(11 / 9, abs=1e-6)
