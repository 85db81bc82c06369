"""Mosaic GPU route (Hopper, jax >= 0.11): arrays in, arrays out, see each module. ``supports`` says which sizes run.

On an older jax only ``supports`` is here, and names the version.
"""

import jax

from pallas_kernels.mosaic.support import supports

__all__ = ["supports"]

if jax.__version_info__ >= (0, 11):
    from pallas_kernels.mosaic.commit import commit
    from pallas_kernels.mosaic.decode import decode
    from pallas_kernels.mosaic.window import verify, verify_after_commit

    __all__ += ["commit", "decode", "verify", "verify_after_commit"]
