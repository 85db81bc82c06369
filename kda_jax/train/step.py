"""The training state and one compiled call that advances it by several optimiser steps."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kda_jax.checks import check_choice, check_integer
from kda_jax.config import ModelConfig
from kda_jax.layers.init import fp32_leaves, init_params
from kda_jax.layers.params import ModelParams, MoEParams

Forward = Callable[..., Any]
SCHEDULES = ("cosine", "wsd")
WSD_DECAY_START = 0.7  # share of the run before the stable phase ends
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Everything that changes what a step computes. Hashable: static under ``jax.jit``."""

    total_steps: int = 10_000
    batch_size: int = 128
    seq_len: int = 512
    learning_rate: float = 3e-3
    min_lr_fraction: float = 0.02
    warmup_steps: int = 100
    schedule: str = "cosine"
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.5
    clip_norm: float = 1.0
    z_loss: float = 1e-4
    balance_rate: float = 1e-3  # step of the router's selection bias, scaled like the learning rate
    input_noise: float = 0.0  # share of input tokens replaced by random ones (never the target)
    remat: bool = False  # recompute each layer in the backward pass: less memory, a third more work
    dtype: str = "bfloat16"  # of activations and of the weights they meet; masters and optimiser are fp32

    def __post_init__(self):
        for name in ("total_steps", "batch_size"):
            check_integer(name, getattr(self, name), 1)
        check_integer("seq_len", self.seq_len, 2)
        check_integer("warmup_steps", self.warmup_steps, 0)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("dtype", self.dtype, tuple(DTYPES))
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        for name in ("weight_decay", "z_loss", "balance_rate"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")
        for name in ("min_lr_fraction", "input_noise", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    params: ModelParams  # fp32
    opt_state: Any
    key: jax.Array  # uint32 key data; step ``i`` draws its batch from ``fold_in(key, i)``, so no position is kept
    step: jax.Array  # int32 []


def optimizer(hyper: Hyperparameters) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the step multiplies in."""
    return optax.chain(
        optax.clip_by_global_norm(hyper.clip_norm),
        optax.scale_by_adam(b1=hyper.beta1, b2=hyper.beta2),
        optax.add_decayed_weights(hyper.weight_decay, mask=decayed_leaves),
    )


def decayed_leaves(params: ModelParams) -> ModelParams:
    """True for the leaves that weight decay shrinks: matrices that multiply activations. Not embeddings, norms, the
    convolution, ``A_log``, ``dt_bias`` or the router's bias."""

    def decays(path, _) -> bool:
        name = path[-1].name
        return name.endswith("proj") or name in ("w1", "w2", "w3", "router", "lm_head")

    return jax.tree_util.tree_map_with_path(decays, params)


def init_state(config: ModelConfig, hyper: Hyperparameters, seed: int) -> TrainState:
    """A fresh state; ``seed`` decides the parameters and every batch."""
    init_key, data_key = jax.random.split(jax.random.key(seed))
    params = init_params(config, init_key, jnp.float32)
    return TrainState(params, optimizer(hyper).init(params), jax.random.key_data(data_key), jnp.zeros((), jnp.int32))


def cast_params(params: ModelParams, dtype) -> ModelParams:
    """``params`` in ``dtype``, except the leaves that stay fp32 in every model."""
    return jax.tree.map(lambda x, keep: x if keep else x.astype(dtype), params, fp32_leaves(params))


def lr_fraction(hyper: Hyperparameters, step: jax.Array, elapsed: jax.Array) -> jax.Array:
    """Learning rate at ``step`` (int, from 0) as a fraction of its peak, fp32.

    How far the run has come is the larger of ``step / total_steps`` and ``elapsed`` (share of a time limit, 0 without
    one), so a run that ends by the clock decays like one that ends by its steps.
    """
    progress = jnp.clip(jnp.maximum(step / hyper.total_steps, elapsed), 0.0, 1.0).astype(jnp.float32)
    warmup = jnp.minimum(1.0, (step + 1) / max(1, hyper.warmup_steps))
    if hyper.schedule == "cosine":
        shape = 0.5 * (1 + jnp.cos(jnp.pi * progress))
    else:
        shape = jnp.clip((1 - progress) / (1 - WSD_DECAY_START), 0.0, 1.0)
    return warmup * (hyper.min_lr_fraction + (1 - hyper.min_lr_fraction) * shape)


def draw_batch(hyper: Hyperparameters, tokens: jax.Array, key: jax.Array) -> jax.Array:
    """``seq_len + 1`` consecutive tokens from ``batch_size`` uniform places of the stream: int32 [B, seq_len + 1]."""
    starts = jax.random.randint(key, (hyper.batch_size, 1), 0, tokens.shape[0] - hyper.seq_len)
    return tokens[starts + jnp.arange(hyper.seq_len + 1)[None]].astype(jnp.int32)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Nats per token, and the log partition function, both fp32 ``targets.shape``."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0], log_z


def balance_routers(params: ModelParams, load: jax.Array, rate: jax.Array | float) -> ModelParams:
    """Move each router's selection bias by ``rate`` towards an even load (auxiliary-loss-free balancing, DeepSeek-V3).

    ``load`` int32 [MoE layers, E] counts assignments; an expert above the mean goes down, one below goes up.
    """
    layers, index = [], 0
    for layer in params.layers:
        if isinstance(layer.ffn, MoEParams):
            counts = load[index].astype(jnp.float32)
            bias = layer.ffn.router_bias + rate * jnp.sign(counts.mean() - counts)
            layer = dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, router_bias=bias))
            index += 1
        layers.append(layer)
    return dataclasses.replace(params, layers=tuple(layers))


def _freeze_router_bias(params: ModelParams) -> ModelParams:
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.lax.stop_gradient(x) if path[-1].name == "router_bias" else x, params
    )


def train_step(
    state: TrainState, tokens: jax.Array, elapsed: jax.Array, *, config: ModelConfig, hyper: Hyperparameters, forward
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimiser step on a batch drawn from ``tokens`` (unsigned [N]); metrics are fp32 scalars."""
    batch_key, noise_key = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step))
    batch = draw_batch(hyper, tokens, batch_key)
    inputs, targets = batch[:, :-1], batch[:, 1:]
    if hyper.input_noise:
        # random tokens, not one mask token: its embedding's gradient would be a sum that a GPU serialises
        where_key, token_key = jax.random.split(noise_key)
        replaced = jax.random.bernoulli(where_key, hyper.input_noise, inputs.shape)
        inputs = jnp.where(replaced, jax.random.randint(token_key, inputs.shape, 0, config.vocab_size), inputs)

    def loss_fn(params):
        params = cast_params(_freeze_router_bias(params), DTYPES[hyper.dtype])
        logits, load = forward(params, config, inputs, None, return_load=True, remat=hyper.remat)
        nll, log_z = cross_entropy(logits, targets)
        loss = nll.mean()
        return loss + hyper.z_loss * jnp.square(log_z).mean(), (loss, load)

    grads, (loss, load) = jax.grad(loss_fn, has_aux=True)(state.params)
    updates, opt_state = optimizer(hyper).update(grads, state.opt_state, state.params)
    fraction = lr_fraction(hyper, state.step, elapsed)
    rate = hyper.learning_rate * fraction
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    if load.shape[0]:
        params = balance_routers(params, load, hyper.balance_rate * fraction)
        imbalance = (load.max(axis=-1) / jnp.maximum(1.0, load.mean(axis=-1))).max()
    else:
        imbalance = jnp.ones(())
    grad_norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    metrics = {"loss": loss, "grad_norm": grad_norm, "imbalance": imbalance, "learning_rate": rate}
    return TrainState(params, opt_state, state.key, state.step + 1), metrics


@partial(jax.jit, static_argnames=("config", "hyper", "forward", "num_steps"), donate_argnames="state")
def run_steps(
    state: TrainState,
    tokens: jax.Array,
    elapsed: jax.Array,
    *,
    config: ModelConfig,
    hyper: Hyperparameters,
    forward: Forward,
    num_steps: int,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """``num_steps`` training steps in one program; ``state`` is donated. Metrics are stacked, fp32 [num_steps].

    ``elapsed`` (fp32 scalar) is the share of the time limit used, constant within the call.
    """

    def body(state, _):
        return train_step(state, tokens, elapsed, config=config, hyper=hyper, forward=forward)

    return jax.lax.scan(body, state, None, length=num_steps)
