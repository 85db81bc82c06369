"""Options as pytrees and as static arguments, and what they refuse."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.options import GenerateOptions, SpeculativeOptions


def test_changing_a_number_does_not_trace_again():
    @jax.jit
    @chex.assert_max_traces(1)
    def f(options):
        rows = options.for_batch(2)
        return rows.temperature + rows.top_k + rows.top_p + rows.stop_tokens.sum()

    first = f(GenerateOptions(4, temperature=1, top_k=3, top_p=0.5, stop_tokens=(7, 8)))
    np.testing.assert_allclose(first, [19.5, 19.5])
    second = f(GenerateOptions(4, temperature=0.25, top_k=np.int64(1), top_p=1, stop_tokens=[1, 0]))
    np.testing.assert_allclose(second, [3.25, 3.25])


@pytest.mark.parametrize(
    "other",
    [
        GenerateOptions(5, stop_tokens=(1,)),
        GenerateOptions(4, stop_tokens=(1, 2)),
        GenerateOptions(4, stop_tokens=(1,), top_k=3),
        GenerateOptions(4, stop_tokens=(1,), implementation="xla"),
    ],
)
def test_what_shapes_the_program_is_static(other):
    options = GenerateOptions(4, stop_tokens=(1,))
    assert jax.tree.structure(options) != jax.tree.structure(other)
    assert jax.tree.structure(options) == jax.tree.structure(dataclasses.replace(options, temperature=3.0))


def test_round_trip_and_placeholders():
    options = GenerateOptions(4, 0.5, 2, 0.9, (3, 1), "xla")
    leaves, tree = jax.tree.flatten(options)
    assert leaves == [0.5, 2, 0.9, 3, 1]
    assert jax.tree.unflatten(tree, leaves) == options
    assert hash(options) == hash(jax.tree.unflatten(tree, leaves))
    # jax builds trees of anything: None, objects, shapes
    assert jax.tree.unflatten(tree, [object()] * 5).max_new_tokens == 4
    assert jax.eval_shape(lambda o: o, options).temperature.shape == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.temperature = 1.0


def test_rows():
    rows = GenerateOptions(1, temperature=[0, 0.5], top_p=jnp.array([1.0, 0.5])).for_batch(2)
    assert rows.temperature.tolist() == [0, 0.5]
    assert rows.top_p.tolist() == [1, 0.5]
    assert rows.top_k is None
    assert rows.stop_tokens.shape == (0,)
    assert rows.stop_tokens.dtype == jnp.int32
    scalar = GenerateOptions(1, temperature=0.7, top_k=5).for_batch(3)
    assert scalar.temperature.shape == scalar.top_k.shape == (3,)
    assert scalar.temperature.dtype == jnp.float32
    assert scalar.top_k.dtype == jnp.int32
    with pytest.raises(ValueError, match=r"temperature must be a scalar or have shape \[3\], got shape \[2\]"):
        GenerateOptions(1, temperature=[0, 0.5]).for_batch(3)


def test_options_made_while_tracing():
    rows = jax.jit(lambda t: GenerateOptions(1, temperature=t, stop_tokens=jnp.array([1, 2])).for_batch(2))(0.5)
    assert rows.temperature.tolist() == [0.5, 0.5]
    assert rows.stop_tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer at least 1, got 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer"),
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": float("inf")}, "temperature must be finite"),
        ({"temperature": None}, "temperature must be finite"),
        ({"temperature": "hot"}, "temperature must be finite and at least 0 .*got 'hot'"),
        ({"temperature": [0.5, -1]}, "temperature must be finite"),
        ({"temperature": np.zeros((2, 2))}, r"temperature must be a scalar or have shape \[B\], got shape \[2, 2\]"),
        ({"temperature": [[0.5], [1, 2]]}, "temperature must be finite"),
        ({"top_k": 0}, r"top_k must be None or in \[1, 2147483647\], got 0"),
        ({"top_k": 2**31}, "top_k must be None or in"),
        ({"top_k": 2.0}, "top_k must be None or in .*int"),
        ({"top_k": True}, "top_k must be None or in .*got True"),
        ({"top_p": 0.0}, r"top_p must be None or in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, "top_p must be None or in"),
        ({"top_p": jnp.array([0.5, jnp.nan])}, "top_p must be None or in"),
        ({"stop_tokens": 5}, "stop_tokens must be a sequence of token ids, got 5"),
        ({"stop_tokens": (-1,)}, r"stop_tokens must be an integer in \[0, 2147483647\], got -1"),
        ({"stop_tokens": (1.0,)}, "stop_tokens must hold token ids"),
        ({"stop_tokens": "ab"}, "stop_tokens must hold token ids"),
        ({"implementation": "cuda"}, "implementation must be one of None, 'xla', 'pallas', got 'cuda'"),
    ],
)
def test_generate_options_refuse(options, message):
    with pytest.raises(ValueError, match=message):
        GenerateOptions(**{"max_new_tokens": 3, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": None}, "method must be one of 'ngram', .* got None"),
        ({"method": "dspark"}, "method 'dspark' is not implemented"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be an integer at least 1, got 0"),
        ({"recover": 1}, "recover must be True or False, got 1"),
        ({"rejection": "typical"}, "rejection must be one of 'standard', 'block', 'synthetic', got 'typical'"),
        ({"ngram_min": 0}, "ngram_min must be an integer at least 1"),
        ({"ngram_max": 2, "ngram_min": 3}, "ngram_max must be an integer at least 3, got 2"),
        ({"synthetic_rates": (0.5, 0.5)}, "synthetic_rates needs rejection='synthetic'"),
        ({"synthetic_length": 2.0}, "synthetic_length needs rejection='synthetic'"),
        ({"rejection": "synthetic"}, "needs one of synthetic_rates and synthetic_length"),
        ({"rejection": "synthetic", "synthetic_rates": (1, 1), "synthetic_length": 2}, "needs one of"),
        ({"rejection": "synthetic", "synthetic_rates": (0.5,)}, "synthetic_rates must be num_draft_tokens=2 numbers"),
        ({"rejection": "synthetic", "synthetic_rates": (0.4, 0.5)}, "not increasing"),
        ({"rejection": "synthetic", "synthetic_rates": (1.5, 0.5)}, "synthetic_rates must be"),
        ({"rejection": "synthetic", "synthetic_length": 3.5}, r"synthetic_length must be in \[1, num_draft_tokens"),
        ({"rejection": "synthetic", "synthetic_length": float("nan")}, "synthetic_length must be in"),
        ({"branches": (1, 2)}, r"branches must sum to num_draft_tokens=2, got \(1, 2\)"),
        ({"branches": ()}, "branches must be numbers of drafts that sum to num_draft_tokens=2"),
        ({"branches": 2}, "branches must be numbers of drafts"),
        ({"branches": (2, 0)}, "branches must be an integer at least 1, got 0"),
        ({"branches": (1, 1), "method": "draft"}, "branches belong to method 'ngram', got method 'draft'"),
        ({"branches": (1, 1), "recover": False}, "recover must be True for a tree of drafts"),
        ({"branches": (1, 1), "rejection": "block"}, "rejection must be 'standard' for a tree of drafts, got 'block'"),
    ],
)
def test_speculative_options_refuse(options, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeOptions(**{"method": "ngram", "num_draft_tokens": 2, **options})


def test_speculative_options_are_hashable():
    options = SpeculativeOptions("ngram", 7, rejection="synthetic", synthetic_rates=[0.9] * 7)
    assert {options: 1}[dataclasses.replace(options)] == 1
    assert options.window == 8
    assert options.acceptance_rates == (0.9,) * 7
    assert SpeculativeOptions("ngram", 7).acceptance_rates is None


@pytest.mark.parametrize("length", [1, 1.3, 2.75, 4])
def test_synthetic_length_becomes_rates(length):
    rates = SpeculativeOptions("ngram", 3, rejection="synthetic", synthetic_length=length).acceptance_rates
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-9)
    assert all(a >= b for a, b in zip((1, *rates), rates, strict=False))
