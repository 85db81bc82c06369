"""Small random models whose choices are rarely close, and how close the choices on given tokens are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_jax.config import ModelConfig
from kda_jax.layers import moe
from kda_jax.layers.params import ModelParams, abstract_params
from tests.tiny import TINY

CLOSE = 1e-4  # gaps between the two largest logits, and router margins, below which fp32 may go either way
BOUNDED = dataclasses.replace(TINY, gate_lower_bound=-5.0, conv_width=3)


@functools.cache
def healthy_params(config: ModelConfig, seed: int = 0) -> ModelParams:
    """Random parameters scaled to the width of what they multiply, norms away from 1, decays from weak to strong."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name, shape = path[-1].name, leaf.shape
        if name == "A_log":
            value = np.log(rng.uniform(1, 8, shape))
        elif name == "dt_bias":
            dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.3), shape))
            value = dt + np.log(-np.expm1(-dt))
        elif name.endswith("norm"):
            value = 1 + 0.3 * rng.standard_normal(shape)
        elif name == "router_bias":
            value = 0.2 * rng.standard_normal(shape)
        elif name == "embed":
            value = rng.standard_normal(shape)
        elif name == "conv":
            value = 0.5 * rng.standard_normal(shape)
        else:
            value = 1.2 * rng.standard_normal(shape) / np.sqrt(shape[-1])
        return jnp.asarray(value, jnp.float32).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config, config.dtype))


def closest_choices(params: ModelParams, config: ModelConfig, tokens) -> tuple[np.ndarray, np.ndarray]:
    """For each position of ``tokens`` int [T]: the gap between its two largest logits, and the smallest margin by which
    a router's last chosen expert beat the first that was not (infinity without a choice). Both fp32 [T]."""
    margins = np.full(len(tokens), np.inf, np.float32)
    original = moe.route

    def spying(block, x, config):
        scores = jax.nn.sigmoid(x.astype(jnp.float32) @ block.router.T) + block.router_bias[None]
        ranked = np.sort(np.asarray(scores), axis=-1)[:, ::-1]
        k = config.num_experts_per_token
        if k < ranked.shape[1]:
            np.minimum(margins, ranked[:, k - 1] - ranked[:, k], out=margins)
        return original(block, x, config)

    moe.route = spying
    try:
        with jax.disable_jit():
            logits = np.asarray(kda_jax.logits(params, config, np.asarray(tokens, np.int32)[None]))[0]
    finally:
        moe.route = original
    largest = np.sort(logits, axis=-1)[:, ::-1]
    return largest[:, 0] - largest[:, 1], margins


@dataclasses.dataclass
class Ledger:
    """Counts tokens compared, and differences excused because a choice was close; at most 0.1 % may be."""

    compared: int = 0
    excused: int = 0

    def compare(self, params, config, prompt, tokens, reference, what) -> None:
        """``tokens`` and ``reference``, emitted after ``prompt``, are equal, or differ behind a close choice."""
        tokens, reference = list(map(int, tokens)), list(map(int, reference))
        self.compared += len(reference)
        if tokens == reference:
            return
        size = min(len(tokens), len(reference))
        first = next((i for i in range(size) if tokens[i] != reference[i]), size)
        gaps, margins = closest_choices(params, config, [*map(int, prompt), *reference[:first]])
        closest = min(gaps[len(prompt) - 1 :].min(), margins.min())
        assert closest < CLOSE, f"{what}: {tokens} != {reference} at {first}, where no choice was closer than {closest}"
        self.excused += len(reference) - first

    def check(self) -> None:
        assert self.compared > 0
        assert self.excused <= 1e-3 * self.compared, f"{self.excused} of {self.compared} tokens excused"
