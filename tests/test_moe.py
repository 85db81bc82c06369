"""The mixture of experts: its three forms and its router against plain numpy."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.config import ModelConfig
from kda_jax.layers import moe
from kda_jax.layers.params import MLPParams, MoEParams
from tests.compiling import quick  # noqa: F401
from tests.tiny import TINY
from tests.tolerances import assert_close, relative_rms, tolerance

EXPERTS, D, WIDTH = 24, 10, 7
LIMIT = tolerance("float32").output
CONFIG = dataclasses.replace(
    TINY, hidden_size=D, num_experts=EXPERTS, num_experts_per_token=3, moe_intermediate_size=WIDTH
)
GROUPED = dataclasses.replace(CONFIG, num_expert_group=4, topk_group=2)
CONFIGS = {
    "plain": CONFIG,
    "grouped top-k": GROUPED,
    "no renormalisation": dataclasses.replace(GROUPED, moe_renormalize=False, routed_scaling_factor=2.5),
    "bias in the weights": dataclasses.replace(CONFIG, router_weight_uses_bias=True),
    "one expert": dataclasses.replace(CONFIG, num_experts_per_token=1, num_shared_experts=0),
    "all of some groups": dataclasses.replace(GROUPED, num_experts_per_token=12),
}
FORMS = {"gathered": moe._experts_gathered, "dense": moe._experts_dense, "grouped": moe._experts_grouped}


def make(config: ModelConfig, seed: int = 0, dtype=np.float32) -> MoEParams:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), dtype)

    E, width = config.num_experts, config.moe_intermediate_size
    shared = None
    if config.num_shared_experts:
        inner = width * config.num_shared_experts
        shared = MLPParams(normal(inner, D), normal(inner, D), normal(D, inner))
    router = jnp.asarray(rng.standard_normal((E, D)) / 2, jnp.float32)
    bias = jnp.asarray(0.3 * rng.standard_normal(E), jnp.float32)
    return MoEParams(router, bias, normal(E, width, D), normal(E, width, D), normal(E, D, width), shared)


def inputs(tokens: int, seed: int = 1, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((tokens, D)), dtype)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(params: MoEParams, x, config: ModelConfig):
    """One token and one expert after another, fp64: routed output [n, D], and by token {expert: weight}."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), params)
    out, choices = [], []
    for token in np.asarray(x).astype(np.float64):
        scores = sigmoid(params.router @ token)
        biased = scores + params.router_bias
        size = config.num_experts // config.num_expert_group
        groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_expert_group)]
        if len(groups) > 1:
            groups.sort(key=lambda group: -sum(sorted(biased[group])[-2:]))
        allowed = [e for group in groups[: config.topk_group] for e in group]
        chosen = sorted(allowed, key=lambda e: -biased[e])[: config.num_experts_per_token]
        weights = np.asarray([biased[e] if config.router_weight_uses_bias else scores[e] for e in chosen])
        if config.moe_renormalize:
            weights = weights / weights.sum()
        weights = weights * config.routed_scaling_factor
        total = np.zeros(D)
        for e, weight in zip(chosen, weights, strict=True):
            gate = params.w1[e] @ token
            total += weight * (params.w2[e] @ (gate * sigmoid(gate) * (params.w3[e] @ token)))
        out.append(total)
        choices.append(dict(zip(chosen, weights, strict=True)))
    return np.stack(out), choices


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_router_chooses_and_weighs_as_the_reference(config):
    params, x = make(config), inputs(50)
    index, weights = jax.jit(moe.route, static_argnums=2)(params, x, config)
    assert index.dtype == jnp.int32
    assert weights.dtype == jnp.float32
    for chosen, weight, expected in zip(
        np.asarray(index), np.asarray(weights), reference(params, x, config)[1], strict=True
    ):
        assert set(chosen.tolist()) == set(expected)
        assert_close(weight, [expected[e] for e in chosen.tolist()], 1e-6, "weights")


def test_the_configurations_differ():
    """So each switch is seen by the comparisons."""
    params, x = make(CONFIG), inputs(50)
    plain = reference(params, x, CONFIG)[0]
    for name in ("grouped top-k", "bias in the weights"):
        assert relative_rms(reference(params, x, CONFIGS[name])[0], plain) > 0.01
    assert relative_rms(reference(params, x, CONFIGS["no renormalisation"])[0], plain) > 0.01


@functools.partial(jax.jit, static_argnames="config")
def every_form(params, x, config):
    index, weights = moe.route(params, x, config)
    return {name: form(params, x, index, weights) for name, form in FORMS.items()}


def check_forms(config, x, limit=LIMIT, dtype=np.float32):
    params = make(config, dtype=dtype)
    expected = reference(params, x, config)[0]
    for name, found in every_form(params, x, config).items():
        assert found.dtype == jnp.float32
        assert_close(found, expected, limit, f"routed output, {name}")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_form_is_the_reference(config):
    check_forms(config, inputs(9))


@pytest.mark.parametrize("tokens", [1, 80])  # the dense form treats more than 64 tokens otherwise
def test_one_token_and_many(tokens):
    check_forms(GROUPED, inputs(tokens))


def test_bfloat16():
    check_forms(CONFIG, inputs(9, dtype=jnp.bfloat16), 3 * tolerance(jnp.bfloat16).output, jnp.bfloat16)


def test_tokens_that_all_choose_the_same_experts():
    check_forms(CONFIG, jnp.repeat(inputs(1), 9, axis=0))


def test_a_token_of_nan_spoils_no_other():
    params, x = make(CONFIG), inputs(9)
    expected, rest = reference(params, x, CONFIG)[0], np.arange(9) != 4
    for name, found in every_form(params, x.at[4].set(jnp.nan), CONFIG).items():
        assert_close(np.asarray(found)[rest], expected[rest], tolerance("float32").output, f"other tokens, {name}")
        assert np.isnan(found[4]).all()


def chosen_form(config, B, T, monkeypatch):
    called = []
    for name, form in FORMS.items():

        def spy(*args, name=name, form=form):
            called.append(name)
            return form(*args)

        monkeypatch.setattr(moe, f"_experts_{name}", spy)
    params, x = make(config), inputs(B * T).reshape(B, T, D)
    out, index = jax.jit(lambda *args: moe.moe(*args, config))(params, x)
    assert out.shape == x.shape
    assert index.shape == (B, T, config.num_experts_per_token)
    expected = reference(params, x.reshape(-1, D), config)[0].reshape(x.shape)
    if params.shared is not None:
        shared = jax.tree.map(np.asarray, params.shared)
        gate = np.asarray(x) @ shared.gate_proj.T
        expected = expected + (gate * sigmoid(gate) * (np.asarray(x) @ shared.up_proj.T)) @ shared.down_proj.T
    assert_close(out, expected, tolerance("float32").output, "routed and shared experts")
    return called


@pytest.mark.parametrize(
    ("experts", "B", "T", "form"),
    [(24, 2, 4, "gathered"), (24, 3, 3, "grouped"), (24, 1, 1, "gathered"), (16, 1, 1, "dense"), (16, 7, 20, "dense")],
)
@pytest.mark.parametrize("shared", [0, 2])
def test_the_block_adds_its_shared_experts_and_takes_the_form_for_its_size(experts, B, T, form, shared, monkeypatch):
    config = dataclasses.replace(CONFIG, num_experts=experts, num_shared_experts=shared)
    assert chosen_form(config, B, T, monkeypatch) == [form]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_gradients_agree_and_the_bias_gets_none(form):
    params, x = make(GROUPED), inputs(12)
    target = inputs(12, seed=9)

    def loss(form, params, x):
        return jnp.sum(form(params, x, *moe.route(params, x, GROUPED)) * target)

    def by_summing_all(params, x, index, weights):
        chosen = jnp.sum(jax.nn.one_hot(index, EXPERTS) * weights[..., None], axis=1)
        gate, up = (jnp.einsum("nd,eid->nei", x, w, precision="highest") for w in (params.w1, params.w3))
        return jnp.einsum("nei,edi,ne->nd", jax.nn.silu(gate) * up, params.w2, chosen, precision="highest")

    found = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)(form, params, x)
    expected = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)(by_summing_all, params, x)
    chex.assert_tree_all_finite(found)
    limit = tolerance("float32").gradient
    assert_close(found[1], expected[1], limit, "gradient of x")
    for name in ("router", "w1", "w2", "w3"):
        assert_close(getattr(found[0], name), getattr(expected[0], name), limit, f"gradient of {name}")
        assert np.asarray(getattr(found[0], name)).any()
    assert not np.asarray(found[0].router_bias).any()
