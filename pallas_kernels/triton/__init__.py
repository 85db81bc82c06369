"""Triton route: NVIDIA GPUs from compute capability 8.0, jax 0.10 and newer; interpreted anywhere.

Arrays in, arrays out: q, k [R,W,H,K] (decode: [R,H,K]), v [R,W,HV,V], raw_gate [R,W,HV,K], raw_beta [R,W,HV] as the layer
computed them, A_log [HV] or None, dt_bias [HV,K], lower_bound None or a float, pools [N,HV,V,K], slots and lengths int32
[R]; slot 0 is null. Pools are updated in place where the caller donates them.
"""

from pallas_kernels.triton.commit import commit
from pallas_kernels.triton.decode import decode
from pallas_kernels.triton.window import verify, verify_after_commit

__all__ = ["commit", "decode", "verify", "verify_after_commit"]
