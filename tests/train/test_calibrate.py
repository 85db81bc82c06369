"""Calibration: logits scale with the final norm, and the first scale that repeats little enough is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_jax.train import calibrate
from tests.tiny import TINY, random_params


def test_logits_are_linear_in_the_scale():
    params = random_params(TINY)
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    plain = kda_jax.logits(params, TINY, tokens)
    scaled = kda_jax.logits(calibrate.scale_logits(params, 0.8), TINY, tokens)
    np.testing.assert_allclose(scaled, 0.8 * plain, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="scale"):
        calibrate.scale_logits(params, 0.0)


@pytest.fixture
def repeats(monkeypatch):
    """Samples whose share of repeats falls with the scale of the norm: 0.5 times that scale."""

    def quality(params, *args, **kwargs):
        share = 0.5 * float(params.norm[0])
        return {"samples": 1, "tokenise_strict": 1, "repeated_8gram_share": share}, []

    monkeypatch.setattr(calibrate, "sample_quality", quality)
    monkeypatch.setattr(calibrate, "held_out_loss", lambda *args, **kwargs: {"bits_per_byte": 1.0})


def run(scales):
    params = random_params(TINY)
    params = jax.tree_util.tree_map_with_path(lambda path, x: jnp.ones_like(x) if path[0].name == "norm" else x, params)
    return calibrate.calibrate(
        params, TINY, None, [{"text": "x"}], None, forward=None, scales=scales, max_repeated=0.45
    )


def test_the_first_scale_that_suffices(repeats):
    params, record = run((1.0, 0.95, 0.9, 0.8))
    assert record["scale"] == 0.9
    assert [r["scale"] for r in record["tried"]] == [1.0, 0.95, 0.9]
    np.testing.assert_allclose(params.norm, 0.9, rtol=1e-6)


def test_no_scale_suffices(repeats):
    with pytest.raises(ValueError, match="none of the scales"):
        run((1.0, 0.95))
