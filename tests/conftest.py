"""What all tests share. Heavy things are made by the tests that need them."""

import os

# Two test processes share two cores: one thread each keeps them out of each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
