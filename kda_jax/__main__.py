"""``python -m kda_jax``: the same as ``kda-jax``."""

import sys

from kda_jax.cli import main

sys.exit(main())
