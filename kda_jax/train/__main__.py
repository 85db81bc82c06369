import sys

from kda_jax.train.command import main

sys.exit(main())
