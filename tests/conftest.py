"""What all tests share. Heavy things are made by the tests that need them."""

import os

from hypothesis import settings

# Two test processes share two cores: one thread each keeps them out of each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Property tests that do not say how many examples they want get 30 in `make test`; `make test-all` asks for 200.
settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile("thorough", max_examples=200, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
