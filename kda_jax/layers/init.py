"""Parameters to start training from."""

import math

import jax
import jax.numpy as jnp

from kda_jax.config import ModelConfig
from kda_jax.layers.params import ModelParams, abstract_params

FP32_NAMES = frozenset({"A_log", "dt_bias", "router", "router_bias"})
DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4


def init_params(config: ModelConfig, key: jax.Array, dtype=jnp.float32) -> ModelParams:
    """Random parameters of ``config``, shapes and dtypes as ``abstract_params(config, dtype)``.

    Linear weights are normal with ``config.initializer_range``, divided by ``sqrt(2 * layers)`` where they write to the
    residual stream; norms are one; the convolution is uniform in ``+-1/sqrt(width)``; the router's selection bias is
    zero. The decay gate starts as in Mamba-2 and Gated DeltaNet: ``exp(A_log)`` uniform in [1, 16] (one for the bounded
    gate, whose range is fixed) and ``softplus(dt_bias)`` log-uniform in [1e-3, 1e-1], at least 1e-4.
    """
    shapes = abstract_params(config, dtype)
    paths, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(key, len(paths))
    leaves = [_leaf(path[-1].name, shape, config, k) for (path, shape), k in zip(paths, keys, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _leaf(name: str, shape: jax.ShapeDtypeStruct, config: ModelConfig, key: jax.Array) -> jax.Array:
    def uniform(low: float, high: float) -> jax.Array:
        return jax.random.uniform(key, shape.shape, jnp.float32, low, high)

    if name.endswith("norm"):
        value = jnp.ones(shape.shape)
    elif name == "router_bias":
        value = jnp.zeros(shape.shape)
    elif name == "A_log":
        value = jnp.zeros(shape.shape) if config.gate_lower_bound is not None else jnp.log(uniform(1.0, 16.0))
    elif name == "dt_bias":
        dt = jnp.maximum(jnp.exp(uniform(math.log(DT_MIN), math.log(DT_MAX))), DT_FLOOR)
        value = dt + jnp.log(-jnp.expm1(-dt))  # inverse softplus
    elif name == "conv":
        bound = config.conv_width**-0.5
        value = uniform(-bound, bound)
    else:
        scale = config.initializer_range
        if name in ("o_proj", "down_proj", "w2"):
            scale /= (2 * config.num_layers) ** 0.5
        value = scale * jax.random.normal(key, shape.shape, jnp.float32)
    return value.astype(shape.dtype)


def fp32_leaves(params: ModelParams) -> ModelParams:
    """A pytree of booleans shaped like ``params``: True for the leaves that stay fp32 whatever the model dtype."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].name in FP32_NAMES, params)
