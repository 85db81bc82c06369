"""Ragged windows without their padding: what treats each token on its own runs on the real ones only."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """The real tokens of windows [R, W] side by side, as [1, N]."""

    index: jax.Array  # int32 [N]: a token's place in the windows laid end to end, R * W for none
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})  # R, W

    @classmethod
    def of(cls, lengths, window: int, size: int) -> "Packing":
        """Of windows with ``lengths`` [R] real tokens; ``size`` N is static, at least their sum: tokens past it are
        lost."""
        total = lengths.shape[0] * window
        real = (jnp.arange(window)[None] < lengths[:, None]).reshape(-1)
        (index,) = jnp.nonzero(real, size=size, fill_value=total)
        return cls(index.astype(jnp.int32), (lengths.shape[0], window))

    def pack(self, x):
        """[R, W, ...] -> [1, N, ...]; what stands for no token is meaningless."""
        return jnp.take(x.reshape(-1, *x.shape[2:]), self.index, axis=0, mode="clip")[None]

    def spread(self, x):
        """[1, N, ...] -> [R, W, ...], zeros past the real tokens."""
        R, W = self.shape
        return (
            jnp.zeros((R * W, *x.shape[2:]), x.dtype).at[self.index].set(x[0], mode="drop").reshape(R, W, *x.shape[2:])
        )


def pack(packing: Packing | None, x):
    return x if packing is None else packing.pack(x)


def spread(packing: Packing | None, x):
    return x if packing is None else packing.spread(x)
