import jax
import pytest
from tokenizers import Tokenizer

from kda_jax.layers.init import init_params
from kda_jax.train import bpe, card
from kda_jax.train.evaluate import sample_quality
from tests.train.helpers import tiny_config

FIGURES = {
    "samples": 50,
    "tokenise_strict": 31,
    "tokenise_lenient": 40,
    "repeated_8gram_share": 0.125,
    "temperature": 0.7,
    "max_new_tokens": 200,
}
METRICS = {
    "parameters": 1234567,
    "corpus": {
        "source": "a library",
        "licence": "PSF-2.0",
        "train": {"files": 10, "bytes": 2_500_000, "tokens": 900_000},
        "validation": {"files": 2},
        "held_out": {"files": 3, "bytes": 90_000},
    },
    "versions": {"jax": "0.10.2"},
    "device": "a device",
    "date": "2026-01-02",
    "minutes": 8.26,
    "model_step": 4000,
    "model_tokens_seen": 262_144_000,
    "epochs": 29.72,
    "held_out_bits_per_byte": 1.0426,
    "held_out_nats_per_token": 2.2,
    "evaluation_seq_len": 512,
}


def test_card_says_what_the_figures_say():
    text = card.model_card(METRICS, tiny_config(), FIGURES)
    for expected in (
        "1,234,567 parameters", "a library (10 files, 2.5 MB, 900,000 tokens)", "PSF-2.0", "a device", "2026-01-02",
        "8.3 minutes", "262,144,000 tokens (29.7 passes", "1.043", "31 of 50", "40 of 50", "12.5 %",
    ):  # fmt: skip
        assert expected in text, expected
    assert "12.5 %" not in card.model_card(METRICS, tiny_config())
    assert "| calibration | none |" in text
    calibrated = {"scale": 0.9, "samples": 20, "max_repeated": 0.15}
    again = card.model_card(METRICS, tiny_config(), FIGURES | {"held_out_bits_per_byte": 1.25}, calibrated)
    assert "final norm times 0.9" in again
    assert "1.250" in again
    assert "1.043" not in again
    with pytest.raises(ValueError, match="tokenise_strict"):
        card.model_card(METRICS, tiny_config(), {k: v for k, v in FIGURES.items() if k != "tokenise_strict"})


@pytest.mark.slow
def test_samples_are_scored(tmp_path):
    text = "def f(x):\n    return x\n\n\nclass A:\n    y = 'abc'\n" * 9
    bpe.save_tokenizer(bpe.train_tokenizer([text], 270), tmp_path, max_length=64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompts = [{"text": "def f(x):"}, {"text": "class A:\n    y = 'abc'"}]
    config = tiny_config(vocab_size=270)
    params = init_params(config, jax.random.key(0))
    first, again = (sample_quality(params, config, tokenizer, prompts, max_new_tokens=12) for _ in range(2))
    assert first == again
    figures, samples = first
    assert figures["samples"] == 2
    assert 0 < figures["mean_tokens"] <= 12
    assert figures["tokenise_strict"] == sum(s["tokenises"] for s in samples)
    assert [s["text"] for s in samples] == [p["text"] for p in prompts]
