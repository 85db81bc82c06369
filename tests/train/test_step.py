import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_jax.config import ModelConfig
from kda_jax.layers.init import FP32_NAMES, init_params
from kda_jax.layers.params import abstract_params
from kda_jax.model import forward
from kda_jax.presets import load_config
from kda_jax.train import step as training
from kda_jax.train.step import Hyperparameters, balance_routers, draw_batch, init_state, lr_fraction, run_steps
from tests.train.helpers import bigram_forward, tiny_config


def names(tree):
    return [(path[-1].name, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize("bound", [None, -5.0])
def test_initial_parameters(bound):
    config = dataclasses.replace(tiny_config(), gate_lower_bound=bound)
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    wanted = abstract_params(config, jnp.bfloat16)
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    for (name, leaf), (_, shape) in zip(names(params), names(wanted), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype), name
        assert bool(jnp.isfinite(leaf.astype(jnp.float32)).all()), name
    gate = params.layers[0].mixer
    if bound is None:
        assert 0 <= float(gate.A_log.min()) <= float(gate.A_log.max()) <= np.log(16)
    else:
        assert not gate.A_log.any()
    dt = jax.nn.softplus(gate.dt_bias)
    assert 1e-3 * 0.99 <= float(dt.min()) <= float(dt.max()) <= 0.1 * 1.01
    assert not np.array_equal(params.layers[0].input_norm, params.layers[0].mixer.q_proj[0])


def test_schedule_by_steps_and_by_clock():
    hyper = Hyperparameters(total_steps=100, warmup_steps=10, min_lr_fraction=0.1)
    at = lambda step, elapsed=0.0: float(lr_fraction(hyper, jnp.int32(step), jnp.float32(elapsed)))  # noqa: E731
    assert at(0) == pytest.approx(0.1, rel=0.01)
    assert at(9) > at(4) > at(0)
    assert at(50) == pytest.approx(0.55)
    assert at(100) == pytest.approx(0.1)
    assert at(50, 1.0) == pytest.approx(0.1)  # time is up
    assert at(50, 0.2) == at(50)  # the steps are further than the clock
    stable = dataclasses.replace(hyper, schedule="wsd")
    assert float(lr_fraction(stable, jnp.int32(69), jnp.float32(0))) == pytest.approx(1.0)
    assert float(lr_fraction(stable, jnp.int32(100), jnp.float32(0))) == pytest.approx(0.1)


def test_batches_are_consecutive_and_cover_the_stream():
    hyper = Hyperparameters(batch_size=512, seq_len=4)
    batch = np.asarray(draw_batch(hyper, jnp.arange(10, dtype=jnp.uint16), jax.random.key(0)))
    assert batch.dtype == np.int32
    assert batch.shape == (512, 5)
    assert (np.diff(batch, axis=1) == 1).all()
    assert (batch.min(), batch.max()) == (0, 9)


def test_balance_moves_bias_against_load():
    config = tiny_config()
    params = init_params(config, jax.random.key(0))
    moved = balance_routers(params, jnp.array([[9, 1, 5, 5]], jnp.int32), 0.01)
    np.testing.assert_allclose(moved.layers[1].ffn.router_bias, [-0.01, 0.01, 0, 0])
    before, after = (dict(names(dataclasses.replace(p, layers=p.layers[:1]))) for p in (params, moved))
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_balance_evens_out_a_router():
    """With a router that starts one-sided, only the bias can have evened the load: it is the one thing that moves."""
    config, hyper = (
        tiny_config(),
        Hyperparameters(
            batch_size=8,
            seq_len=16,
            learning_rate=1e-9,
            weight_decay=0.0,
            balance_rate=0.002,
            warmup_steps=0,
            dtype="float32",
        ),
    )
    state = init_state(config, hyper, 0)
    moe = state.params.layers[1]
    bias = jnp.array([0.05, 0.05, 0.0, 0.0])
    moe = dataclasses.replace(moe, ffn=dataclasses.replace(moe.ffn, router_bias=bias))
    state = dataclasses.replace(state, params=dataclasses.replace(state.params, layers=(state.params.layers[0], moe)))
    tokens = jax.random.randint(jax.random.key(1), (2000,), 0, 300).astype(jnp.uint16)
    _, metrics = run_steps(
        state, tokens, jnp.float32(0), config=config, hyper=hyper, forward=bigram_forward, num_steps=60
    )
    assert float(metrics["imbalance"][0]) == 2.0  # two experts do everything
    assert float(metrics["imbalance"][-10:].mean()) < 1.4


def test_weight_decay_leaves_gates_norms_and_biases_alone():
    params = init_params(tiny_config(), jax.random.key(0))
    decays = dict(names(training.decayed_leaves(params)))
    kept = {
        "embed",
        "norm",
        "input_norm",
        "post_norm",
        "o_norm",
        "kv_a_norm",
        "conv",
        "A_log",
        "dt_bias",
        "router_bias",
    }
    assert {name for name, decay in decays.items() if not decay} == kept


def test_dtypes_of_a_bf16_step():
    config, hyper = tiny_config(), Hyperparameters(batch_size=2, seq_len=8)
    params = init_state(config, hyper, 0).params
    assert {leaf.dtype.name for _, leaf in names(params)} == {"float32"}
    for name, leaf in names(training.cast_params(params, jnp.bfloat16)):
        assert leaf.dtype.name == ("float32" if name in FP32_NAMES else "bfloat16"), name


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", 0), ("seq_len", 1), ("learning_rate", 0.0), ("schedule", "linear"), ("dtype", "float16"),
     ("input_noise", 1.0), ("weight_decay", -0.1)],
)  # fmt: skip
def test_bad_hyperparameters_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Hyperparameters(**{field: value})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_decreases_through_the_real_model(dtype):
    config = tiny_config(num_experts=8)
    hyper = Hyperparameters(
        total_steps=60, batch_size=8, seq_len=24, learning_rate=1e-2, warmup_steps=5, weight_decay=0.01, dtype=dtype,
        remat=dtype == "bfloat16", input_noise=0.05,
    )  # fmt: skip
    tokens = jnp.tile(jnp.arange(10, 60, dtype=jnp.uint16), 40)
    state = init_state(config, hyper, 0)
    state, metrics = run_steps(state, tokens, jnp.float32(0), config=config, hyper=hyper, forward=forward, num_steps=60)
    loss = np.asarray(metrics["loss"])
    assert loss[:3].mean() > 4.5
    assert loss[-3:].mean() < 0.5 * loss[:3].mean()
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state.params))
    assert int(state.step) == 60
    assert np.asarray(state.params.layers[1].ffn.router_bias).any()


def test_shipped_configuration_fits():
    config = load_config("kda_python_6m")
    raw = json.loads((Path(kda_jax.__file__).parents[1] / "configs" / "kda_python_6m" / "config.json").read_text())
    assert config == ModelConfig.from_hf(raw)
    shapes = jax.tree.leaves(abstract_params(config, jnp.bfloat16))
    weights = sum(x.size * x.dtype.itemsize for x in shapes)
    assert 11_500_000 <= weights <= 11_850_000  # with tokenizer and JSON files at most 12 MB
    for count in (config.kda_num_heads, config.kda_num_value_heads, config.num_attention_heads, config.num_experts):
        assert count % 8 == 0
    assert config.mixer_kinds.count("kda") == 3 * config.mixer_kinds.count("mla")
    assert config.vocab_size == 2048
