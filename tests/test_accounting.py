"""Parameters and bytes from a configuration alone, and finding configurations and presets by name."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from kda_jax import ops, presets
from kda_jax.accounting import account, format_bytes, format_count, format_report
from kda_jax.cache import make_cache, no_commit
from kda_jax.cache_layout import CacheSizes
from kda_jax.capacity import Capacity
from kda_jax.options import GenerateOptions, SpeculativeOptions
from tests.tiny import TINY, random_params

MiB = 1 << 20


@pytest.fixture(scope="module")
def kimi():
    return presets.load_config("kimi_linear_48b")


def test_kimi_linear_has_its_published_size(kimi):
    numbers = account(kimi)
    assert (numbers.num_kda_layers, numbers.num_mla_layers) == (20, 7)
    assert (numbers.num_dense_layers, numbers.num_moe_layers) == (1, 26)
    assert round(numbers.total_parameters / 1e9, 2) == 49.12
    assert round(numbers.active_parameters / 1e9, 2) == 3.48


def test_kimi_linear_state(kimi):
    numbers = account(kimi, window=8)
    assert numbers.recurrent_bytes == 40 * MiB
    assert numbers.conv_bytes == 20 * 72 * 1024
    assert numbers.latent_bytes_per_token == 8064
    assert numbers.window.native_states == 320 * MiB
    assert numbers.window.recover_states == 40 * MiB
    assert numbers.window.recover_records == 8 * 20 * 32 * 1024  # 1 KiB a head and token
    assert numbers.state_bytes(1000) == 40 * MiB + 8 * 20 * (32 * 1024 + 3 * 4096 * 2) + numbers.conv_bytes + 8_064_000
    more = 7 * (40 * MiB + numbers.conv_bytes)  # seven slots
    assert numbers.state_bytes(0, recover=False) - numbers.state_bytes(0) == more - numbers.window.recover_records


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_and_bytes_are_those_of_real_arrays(dtype):
    config = dataclasses.replace(TINY, dtype=dtype)
    numbers, leaves = account(config), jax.tree.leaves(random_params(config))
    assert numbers.total_parameters == sum(leaf.size for leaf in leaves)
    assert numbers.weight_bytes == sum(leaf.nbytes for leaf in leaves)
    routed = next(part for part in numbers.parts if part.name == "routed experts")
    assert routed.total == 2 * 4 * 3 * 11 * 24
    assert numbers.active_parameters == numbers.total_parameters - routed.total // 2  # 2 of 4 experts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_state_is_that_of_a_real_cache(dtype, window):
    config = dataclasses.replace(TINY, dtype=dtype)
    numbers = account(config, window=window)

    def cache(rows, states_per_row=1):
        return make_cache(config, batch=rows, tokens=10, dtype=jnp.dtype(dtype), states_per_row=states_per_row)

    def added_by_a_row(name, **kwargs):
        sizes = [sum(x.nbytes for x in jax.tree.leaves(getattr(cache(rows, **kwargs), name))) for rows in (1, 2)]
        return sizes[1] - sizes[0]

    assert numbers.recurrent_bytes == added_by_a_row("state")
    assert numbers.conv_bytes == added_by_a_row("conv")
    assert 10 * numbers.latent_bytes_per_token == added_by_a_row("latents")
    assert numbers.window.native_states == added_by_a_row("state", states_per_row=window)
    assert numbers.conv_bytes + numbers.window.native_histories == added_by_a_row("conv", states_per_row=window)

    H, HV, K, V, W = 2, 4, 6, 10, window
    rng = np.random.default_rng(0)
    q, k, v, raw_gate, raw_beta = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((1, W, H, K), (1, W, H, K), (1, W, HV, V), (1, W, HV, K), (1, W, HV))
    )
    gate = ops.GateParams(jnp.zeros(HV), jnp.zeros((HV, K)))
    pool = jnp.zeros((2, HV, V, K))
    _, records = ops.kda_verify(q, k, v, raw_gate, raw_beta, gate, pool, jnp.array([1]), jnp.array([W]))
    assert numbers.window.recover_records == 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(records))
    assert numbers.window.conv_inputs == 2 * W * config.conv_channels * jnp.dtype(dtype).itemsize
    pending = [jax.tree.leaves(no_commit(config, rows, W, jnp.dtype(dtype)).records) for rows in (1, 2)]
    added = sum(x.nbytes for x in pending[1]) - sum(x.nbytes for x in pending[0])
    assert numbers.window.recover_records + numbers.window.conv_inputs == added


@pytest.mark.parametrize("window", [1, 8])
def test_one_request_costs_what_capacity_says(window):
    """Two ways to count: by the model's parts, and by the cache layout."""
    numbers = account(TINY, window=window)
    sizes = CacheSizes.from_config(TINY)
    fit = Capacity(sizes, window=window, context=30, page_size=1, dtype=TINY.dtype)
    tokens = fit.context + window - 1
    assert fit.recover == numbers.state_bytes(tokens)
    assert fit.native == numbers.state_bytes(tokens, recover=False)
    assert fit.recover_deferred - fit.recover == numbers.window.recover_records + numbers.window.conv_inputs


@pytest.mark.parametrize("window", [0, -1, 2.5, True])
def test_window_must_be_a_positive_integer(window):
    with pytest.raises(ValueError, match="window"):
        account(TINY, window=window)


def test_report_shows_the_numbers(kimi):
    console = rich.console.Console(width=100, file=io.StringIO())
    console.print(format_report(account(kimi, window=8), name="kimi_linear_48b"))
    text = console.file.getvalue()
    for word in ("kimi_linear_48b", "49.12 B", "3.48 B", "40.0 MiB", "320.0 MiB", "8,064 B", "window of 8"):
        assert word in text


def test_formats():
    assert [format_count(n) for n in (0, 999, 1234, 49_120_000_000)] == ["0", "999", "1.23 K", "49.12 B"]
    assert [format_bytes(n) for n in (0, 16383, 16384, 40 * MiB)] == ["0 B", "16,383 B", "16.0 KiB", "40.0 MiB"]


# --- configurations and presets by name ----------------------------------------------------------------------------


def test_every_configuration_loads():
    assert "kimi_linear_48b" in presets.config_names()
    for name in presets.config_names():
        account(presets.load_config(name))


def test_every_preset_loads():
    assert {"greedy", "sampled", "ngram", "ngram_native"} <= set(presets.preset_names())
    for name in presets.preset_names():
        preset = presets.load_preset(name)
        assert isinstance(preset.generate, GenerateOptions)
        assert preset.speculative is None or isinstance(preset.speculative, SpeculativeOptions)
    assert presets.load_preset("ngram_native").speculative.recover is False


def test_a_configuration_is_found_as_folder_or_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_hf()))
    assert presets.load_config(tmp_path) == presets.load_config(tmp_path / "config.json") == TINY


def test_unknown_names_list_the_known(tmp_path):
    with pytest.raises(ValueError, match=r"kimi_linear_48b.*'nothing'.*no such folder"):
        presets.find_config("nothing")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        presets.find_config(tmp_path)
    with pytest.raises(ValueError, match=r"greedy.*'nothing'"):
        presets.load_preset("nothing")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "generate"),
        ({"generate": {"max_new_tokens": 1}, "more": 1}, "more"),
        ({"generate": {"max_new_tokens": 1, "heat": 2}}, "generate.heat"),
        ({"generate": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"generate": {"max_new_tokens": 1}, "speculative": {"method": "x", "num_draft_tokens": 1}}, "method"),
    ],
)
def test_a_wrong_preset_names_the_key(monkeypatch, tmp_path, content, words):
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "wrong.json").write_text(json.dumps(content))
    monkeypatch.setattr(presets, "configs_folder", lambda: tmp_path)
    with pytest.raises(ValueError, match=words):
        presets.load_preset("wrong")
