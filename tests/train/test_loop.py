import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from kda_jax.cli import main
from kda_jax.train import card, checkpointing
from kda_jax.train.corpus import Split
from kda_jax.train.evaluate import held_out_loss, windows_of
from kda_jax.train.loop import TrainOptions, train
from kda_jax.train.prepare import prepare
from kda_jax.train.step import Hyperparameters, init_state
from tests.train.helpers import bigram_forward, tiny_config, write_sources

HYPER = Hyperparameters(
    total_steps=24, batch_size=4, seq_len=16, learning_rate=1e-2, warmup_steps=4, weight_decay=0.1, dtype="float32"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    prepare(folder / "data", source=write_sources(folder / "src"), vocab_size=300)
    return folder / "data"


def options(data, output, **changes):
    settings = {"config": tiny_config(), "hyper": HYPER, "steps_per_call": 4, "eval_every": 8, "checkpoint_every": 8}
    return TrainOptions(data=data, output=output, **(settings | changes))


def final_state(folder):
    return checkpointing.load_state(init_state(tiny_config(), HYPER, 0), folder / "state")[0]


def test_resuming_is_bit_for_bit_the_uninterrupted_run(data, tmp_path):
    straight = train(options(data, tmp_path / "straight"), forward=bigram_forward)
    train(options(data, tmp_path / "broken", stop_after=12), forward=bigram_forward)
    resumed = train(options(data, tmp_path / "broken", resume=True), forward=bigram_forward)

    whole, parts = final_state(tmp_path / "straight"), final_state(tmp_path / "broken")
    assert int(whole.step) == 24
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    assert resumed["held_out_bits_per_byte"] == straight["held_out_bits_per_byte"]
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("straight", "broken")]
    assert weights[0] == weights[1]


def test_a_run_learns_and_leaves_what_it_says(data, tmp_path):
    metrics = train(options(data, tmp_path), forward=bigram_forward)
    losses = [record["validation_bits_per_byte"] for record in metrics["history"]]
    assert [record["step"] for record in metrics["history"]] == [8, 16, 24]
    assert losses == sorted(losses, reverse=True)
    assert metrics == json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["tokens_seen"] == 24 * 4 * 16
    assert metrics["model_step"] == 24
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        f.name for f in (tmp_path / "model").iterdir()
    }
    assert "held out" in (tmp_path / "log.txt").read_text()
    text = card.model_card(metrics, tiny_config())
    assert f"{metrics['held_out_bits_per_byte']:.3f}" in text
    assert "$" not in text
    with pytest.raises(ValueError, match="device"):
        card.model_card({k: v for k, v in metrics.items() if k != "device"}, tiny_config())


def test_time_limit_ends_a_run(data, tmp_path):
    hyper = dataclasses.replace(HYPER, total_steps=10**6)
    metrics = train(options(data, tmp_path, hyper=hyper, max_minutes=0.05, eval_every=10**6), forward=bigram_forward)
    assert 0 < metrics["steps"] < 10**6
    assert len(metrics["history"]) == 1


def test_resume_refuses_another_run(data, tmp_path):
    train(options(data, tmp_path, stop_after=4), forward=bigram_forward)
    with pytest.raises(ValueError, match="another hyper"):
        train(options(data, tmp_path, resume=True, hyper=dataclasses.replace(HYPER, beta2=0.9)), forward=bigram_forward)
    with pytest.raises(ValueError, match=r"tensor .* is float32"):
        train(options(data, tmp_path, resume=True, config=tiny_config(num_experts=8)), forward=bigram_forward)
    (tmp_path / "state" / checkpointing.FILE_NAME).write_bytes(b"\x08")
    with pytest.raises(ValueError, match=r"train_state\.safetensors: not a training checkpoint"):
        train(options(data, tmp_path, resume=True), forward=bigram_forward)


def test_corpus_must_fit_the_model(data, tmp_path):
    with pytest.raises(ValueError, match="vocabulary of 300, the model one of 301"):
        train(options(data, tmp_path, config=tiny_config(vocab_size=301)), forward=bigram_forward)
    with pytest.raises(ValueError, match="more than seq_len"):
        train(options(data, tmp_path, hyper=dataclasses.replace(HYPER, seq_len=10**6)), forward=bigram_forward)


def test_diverging_is_an_error(data, tmp_path):
    def broken(*args, **kwargs):
        logits, load = bigram_forward(*args, **kwargs)
        return logits * math.nan, load

    with pytest.raises(ValueError, match="not finite"):
        train(options(data, tmp_path), forward=broken)


@pytest.mark.parametrize("count", [2, 17, 64, 65, 66, 200])
def test_windows_predict_every_token_once(count):
    split = Split(np.arange(count, dtype=np.uint16), np.array([0, count]), ("a.py",), 1)
    windows, valid = windows_of(split, seq_len=8, batch_size=4)
    targets, inputs = windows[..., 1:][valid], windows[..., :-1][valid]
    np.testing.assert_array_equal(targets, np.arange(1, count))
    np.testing.assert_array_equal(inputs, np.arange(count - 1))


def test_uniform_model_costs_what_it_must():
    """A model without an opinion spends log2(vocab) bits on each of the tokens after the first."""
    config = tiny_config()
    params = init_state(config, HYPER, 0).params
    params = dataclasses.replace(params, lm_head=params.lm_head * 0)
    split = Split(np.arange(100, dtype=np.uint16), np.array([0, 100]), ("a.py",), num_bytes=250)
    loss = held_out_loss(params, config, split, forward=bigram_forward, seq_len=8, batch_size=4)
    assert loss["nats_per_token"] == pytest.approx(math.log(300), rel=1e-5)
    assert loss["bits_per_byte"] == pytest.approx(99 * math.log2(300) / 250, rel=1e-5)


def test_command_line_errors_are_one_line(tmp_path, capsys):
    for arguments in (["run"], ["run", "--data", str(tmp_path), "--output", str(tmp_path)], ["card"]):
        assert main(["train", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("kda-jax train: error: ")
        assert error.count("\n") == 1
