"""Choices that are refused, by themselves and together, and their neighbours that are not."""

import dataclasses

import pytest

from kda_jax.cache_options import CacheOptions, check_serving
from kda_jax.options import SpeculativeOptions
from tests.tiny import TINY

ALIGN = CacheOptions(mode="align", block_size=8)
DRAFTS = SpeculativeOptions("ngram", 7)
NATIVE = SpeculativeOptions("ngram", 7, recover=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "all"}, "mode must be one of 'none', 'align', got 'all'"),
        ({"mode": "align"}, "block_size must be given in mode 'align', got None"),
        ({"mode": "align", "block_size": 0}, "block_size must be an integer at least 1, got 0"),
        ({"block_size": 64}, "block_size belongs to mode 'align', got 64"),
        ({"prefix_caching": True}, "prefix_caching needs mode 'align'"),
        ({"prefix_caching": 1}, "prefix_caching must be True or False, got 1"),
        ({"mode": "align", "block_size": 8, "drop_last_block": True}, "drop_last_block needs prefix_caching=True"),
        ({"mode": "align", "block_size": 8, "page_size": 3}, "page_size must divide block_size=8, got 3"),
        ({"page_size": 0}, "page_size must be an integer at least 1, got 0"),
        ({"state_dtype": "float16"}, "state_dtype must be one of 'float32', 'bfloat16', got 'float16'"),
        ({"stochastic_rounding": True}, "stochastic_rounding must be False, got True"),
        ({"num_slots": 1}, "num_slots must be an integer at least 2, got 1"),
        ({"num_pages": 1.5}, "num_pages must be an integer at least 2, got 1.5"),
    ],
)
def test_refused_cache_options(options, message):
    with pytest.raises(ValueError, match=message):
        CacheOptions(**options)


def test_accepted_cache_options():
    assert hash(CacheOptions()) == hash(CacheOptions(mode="none"))
    assert CacheOptions().tokens_per_page == 64
    assert ALIGN.tokens_per_page == 8
    full = CacheOptions("align", 8, 4, prefix_caching=True, drop_last_block=True, state_dtype="bfloat16", num_slots=2)
    assert full.tokens_per_page == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recover": True}, "recover=True needs a speculative method, got speculative=None"),
        ({"recover": False, "speculative": DRAFTS}, "recover must be speculative.recover=True, got False"),
        (
            {"cache": CacheOptions("align", 7), "speculative": DRAFTS},
            r"block_size must be at least the window of 8 tokens \(1 \+ num_draft_tokens\), got 7",
        ),
        ({"cache": CacheOptions("align", 7), "speculative": NATIVE}, "block_size must be at least"),
        (
            {"cache": ALIGN, "speculative": SpeculativeOptions("ngram", 3, branches=(2, 1))},
            "branches must be None in cache mode 'align'",
        ),
        ({"pipeline_stages": 2, "speculative": DRAFTS}, "pipeline_stages must be 1 with recover=True, got 2"),
        ({"pipeline_stages": 0}, "pipeline_stages must be an integer at least 1, got 0"),
        ({"mesh_shape": {"model": 4}}, r"mesh_shape\['model'\]=4 must divide kda_num_heads=2"),
        ({"mesh_shape": {"model": 2}}, r"mesh_shape\['model'\]=2 must divide num_attention_heads=3"),
        ({"mesh_shape": {"tensor": 2}}, "mesh_shape must be one of 'data', 'model', got 'tensor'"),
        ({"drafter_vocab": 41}, "drafter_vocab must be the target's vocab_size=40, got 41"),
        ({"drafter_hidden": 23}, "drafter_hidden must be the target's hidden_size=24, got 23"),
        ({"tap_layers": (0, 3)}, r"tap_layers must be in \[0, 3\), got 3"),
        ({"implementation": "cuda"}, "implementation must be one of None, 'xla', 'pallas', got 'cuda'"),
        (
            {"implementation": "pallas", "config": dataclasses.replace(TINY, kda_key_dim=257)},
            "implementation='pallas': kda_decode has no kernel for these arguments: .*257",
        ),
        ({"implementation": "pallas"}, "implementation='pallas': conv_prefill has no such kernel"),
        ({"config": None}, "config must be a ModelConfig, got NoneType"),
        ({"cache": "align"}, "cache must be CacheOptions, got str"),
        ({"speculative": "ngram"}, "speculative must be SpeculativeOptions or None, got str"),
    ],
)
def test_refused_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_serving(**({"config": TINY, "cache": CacheOptions()} | arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"speculative": DRAFTS, "recover": True, "cache": ALIGN},
        {"speculative": NATIVE, "cache": ALIGN},
        {"speculative": NATIVE, "pipeline_stages": 2},
        {"pipeline_stages": 2},
        {"mesh_shape": {"data": 3, "model": 1}},
        {"drafter_vocab": 40, "drafter_hidden": 24, "tap_layers": (0, 2)},
        {"implementation": "xla"},
    ],
)
def test_accepted_together(arguments):
    check_serving(**({"config": TINY, "cache": CacheOptions()} | arguments))


def test_a_gate_bound_outside_its_range_is_refused_with_the_configuration():
    for bound in (-5.1, 0.0, 1.0):
        with pytest.raises(ValueError, match=r"gate_lower_bound must be None or in \[-5, 0\)"):
            dataclasses.replace(TINY, gate_lower_bound=bound)
    assert dataclasses.replace(TINY, gate_lower_bound=-5.0).gate_lower_bound == -5


def test_a_draft_count_below_one_is_refused():
    with pytest.raises(ValueError, match="num_draft_tokens must be an integer at least 1, got 0"):
        SpeculativeOptions("ngram", 0)
