"""What a sequence keeps, declared: shape, dtype, and whether it persists between steps.

Persistent states come first, a step's workspace after: a copyable prefix. The order is part of the type, two groups,
so a persistent state behind a workspace one can't be written down. There is one copy function for each persistent state
and none for workspace, which belongs to rows of a step and is never worth copying (the RecoverSSM contract).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kda_jax.checks import check_integer
from kda_jax.config import ModelConfig
from kda_jax.ops._slots import read_slots, write_slots


class CacheSizes(NamedTuple):
    """The sizes a layout follows from."""

    kda_layers: int
    heads: int  # query/key heads
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    mla_layers: int
    latent_dim: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> "CacheSizes":
        return cls(
            config.num_kda_layers,
            config.kda_num_heads,
            config.kda_num_value_heads,
            config.kda_key_dim,
            config.kda_value_dim,
            config.conv_width,
            config.num_mla_layers,
            config.latent_dim,
        )

    @property
    def conv_channels(self) -> int:
        return 2 * self.heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class State:
    """One kind of state in all of its layers.

    ``shape`` is what one layer keeps in one unit: a slot (``per`` "slot"), a token of the context ("token"), or a row
    of a step ("row").
    """

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: str
    per: str

    @property
    def nbytes(self) -> int:
        """Bytes of one unit over all layers."""
        return self.layers * math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class Persistent(State):
    """Kept between steps; copied when a prefix is."""


class Workspace(State):
    """Written by a verify and read by the commit of that step. Never copied."""


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    persistent: tuple[Persistent, ...]
    workspace: tuple[Workspace, ...]

    def __post_init__(self):
        for name, kind in (("persistent", Persistent), ("workspace", Workspace)):
            for state in getattr(self, name):
                if not isinstance(state, kind):
                    raise ValueError(
                        f"{name} must hold {kind.__name__} states only, got {type(state).__name__} {state.name!r}"
                    )
        names = [state.name for state in self.states]
        if len(set(names)) < len(names):
            raise ValueError(f"states must have different names, got {names}")

    @property
    def states(self) -> tuple[State, ...]:
        return self.persistent + self.workspace

    def state(self, name: str) -> State:
        """The state called ``name``; ``ValueError`` naming those there are."""
        for state in self.states:
            if state.name == name:
                return state
        raise ValueError(f"name must be one of {[state.name for state in self.states]}, got {name!r}")

    @classmethod
    def from_states(cls, states: Iterable[State]) -> "CacheLayout":
        """A layout from states in one row; a persistent state behind a workspace one is a ``ValueError``."""
        states = tuple(states)
        count = next((i for i, state in enumerate(states) if isinstance(state, Workspace)), len(states))
        for state in states[count:]:
            if isinstance(state, Persistent):
                raise ValueError(
                    f"persistent state {state.name!r} must come before workspace {states[count].name!r}: persistent "
                    "states are a prefix"
                )
        return cls(states[:count], states[count:])

    @classmethod
    def from_sizes(
        cls, sizes: CacheSizes, *, window: int | None, dtype: str, state_dtype: str = "float32"
    ) -> "CacheLayout":
        """What a model of ``sizes`` keeps. ``window``: tokens of a verify that leaves records; None for none.

        Corrections are fp32 whatever the activation ``dtype`` and the ``state_dtype``.
        """
        if window is not None:
            check_integer("window", window, 1)
        H, HV, K, V, C = sizes.heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.conv_channels
        dtype, L = jnp.dtype(dtype).name, sizes.kda_layers
        persistent = (
            Persistent("conv", L, (sizes.conv_width - 1, C), dtype, "slot"),
            Persistent("state", L, (HV, V, K), jnp.dtype(state_dtype).name, "slot"),
            Persistent("latents", sizes.mla_layers, (sizes.latent_dim,), dtype, "token"),
        )
        if window is None:
            return cls(persistent, ())
        workspace = (
            Workspace("correction", L, (HV, window, V), "float32", "row"),
            Workspace("key", L, (H, window, K), dtype, "row"),
            Workspace("raw_gate", L, (HV, window, K), dtype, "row"),
            Workspace("conv_inputs", L, (window, C), dtype, "row"),
        )
        return cls(persistent, workspace)

    def copy_functions(self) -> tuple[tuple[str, Callable], ...]:
        """(name, ``copy(pool, source, target) -> pool``) for each persistent state, in order.

        Of a state per slot, ``pool`` is [layers, slots, ...]; of one per token, [pages, tokens, ...] for each layer in
        any pytree. ``source`` and ``target`` int32 [n], 0 for no copy. Jit-able; all sources are read before anything
        is written.
        """
        return tuple((state.name, copy_slots if state.per == "slot" else copy_pages) for state in self.persistent)

    def check_copy_functions(self, functions: Iterable[tuple[str, Callable]]) -> None:
        """``ValueError`` unless ``functions`` copy exactly the persistent states, in order.

        Fewer functions than states are right where the rest is workspace; none, one too many, one of a workspace
        state, a missing and a misplaced one are each refused by a message of its own.
        """
        names = [name for name, _ in functions]
        wanted = [state.name for state in self.persistent]
        if not names:
            raise ValueError(f"functions must copy {wanted}, got none: a prefix could not be copied at all")
        if len(names) > len(self.states):
            raise ValueError(f"functions must be at most the {len(self.states)} states, got {len(names)}: {names}")
        for name in names:
            if isinstance(self.state(name), Workspace):
                raise ValueError(f"functions must not copy workspace, got one for {name!r}")
        missing = [name for name in wanted if name not in names]
        if missing:
            raise ValueError(f"functions must copy every persistent state, missing are {missing}")
        if names != wanted:
            raise ValueError(f"functions must be in the order of the states {wanted}, got {names}")


def copy_slots(pool, source, target):
    """``pool`` [L, N, ...] with slots ``source`` [n] copied to ``target`` [n]; where either is 0 nothing happens."""
    target = jnp.where(source > 0, target, 0)
    return write_slots(pool, target, read_slots(pool, source))


def copy_pages(pools, source, target):
    """As ``copy_slots``, of pages: every leaf of ``pools`` is [pages, ...], one for each layer."""
    return jax.tree.map(lambda pool: copy_slots(pool[None], source, target)[0], pools)


def zeros(state: State, units: int) -> jax.Array:
    """The array that holds ``units`` slots or rows of ``state``: [layers, units, *shape]."""
    return jnp.zeros((state.layers, units, *state.shape), state.dtype)
