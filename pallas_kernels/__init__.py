"""Pallas kernel bodies and their launches. Imports JAX alone, never ``kda_jax``.

``routes`` picks one: ``mosaic`` (Mosaic GPU: NVIDIA Hopper and newer, jax 0.11 and newer), ``triton`` (the Triton
route: other NVIDIA GPUs, and the interpreter), ``tpu``. ``MEASURED.md`` has their times.
"""
