"""Mosaic GPU route (Hopper and newer, jax >= 0.11): arrays in, arrays out, see each module."""

from pallas_kernels.mosaic.commit import commit
from pallas_kernels.mosaic.decode import decode
from pallas_kernels.mosaic.window import verify, verify_after_commit

__all__ = ["commit", "decode", "verify", "verify_after_commit"]
