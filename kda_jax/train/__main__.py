"""``python -m kda_jax.train``: as ``kda-jax train``."""

import sys

from kda_jax.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
