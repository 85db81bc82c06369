"""Pallas kernel bodies and their launches. Imports JAX alone, never ``kda_jax``.

There is none yet: every operation of ``kda_jax.ops`` runs in its XLA form, and ``implementation="pallas"`` says so.
"""
