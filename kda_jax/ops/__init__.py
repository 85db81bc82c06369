"""The operations: arrays in, arrays out. One file per operation; each holds its contract and its XLA form."""

from kda_jax.ops.chunked import kda_chunked
from kda_jax.ops.commit import kda_commit
from kda_jax.ops.conv import conv_commit, conv_prefill, conv_step
from kda_jax.ops.decode import kda_decode
from kda_jax.ops.fold import conv_step_after_commit, kda_verify_after_commit
from kda_jax.ops.gate import GateParams, kda_gate, l2_normalize
from kda_jax.ops.plan import AlignRows, CommitPlan, plan_commit
from kda_jax.ops.recurrent import kda_recurrent
from kda_jax.ops.tree import gather_path
from kda_jax.ops.verify import Records, kda_verify, kda_verify_native

__all__ = [
    "AlignRows",
    "CommitPlan",
    "GateParams",
    "Records",
    "conv_commit",
    "conv_prefill",
    "conv_step",
    "conv_step_after_commit",
    "gather_path",
    "kda_chunked",
    "kda_commit",
    "kda_decode",
    "kda_gate",
    "kda_recurrent",
    "kda_verify",
    "kda_verify_after_commit",
    "kda_verify_native",
    "l2_normalize",
    "plan_commit",
]
