"""Decides from a profile, a topology and a memory budget how a model is trained.

`planner` combines `tiers` (where rows live), `hot` (which rows every rank keeps), `sharing` (which tables share
parameters), `dedup` (which lists are trained once) and `ingest` (initial worker counts) into one plan.
"""

__all__ = ["dedup", "explain", "hot", "ingest", "measure", "planner", "sharing", "tiers", "torchrec_plan"]
