"""Initial worker counts of ingestion, before anything is measured on the training machine."""

from __future__ import annotations

from recmill.artifacts.plan import IngestPlan

# Share of a batch's CPU time, measured on synthetic and globo logs: decoding 0.74 to 0.89, transforming 0.05 to 0.21,
# reading 0.04 at most. Decoding always saturates a core first.
DECODE_SHARE = 0.8


def starting_workers(cores: int) -> IngestPlan:
    """Workers per stage for a rank with this many cores."""
    decode = max(1, round(DECODE_SHARE * cores))
    workers = {"read": 1, "decode": decode, "transform": 1, "batch": 1}
    why = (
        f"{cores} {'core' if cores == 1 else 'cores'} per rank, and decoding takes about {DECODE_SHARE:.0%} of "
        "ingestion's CPU time; `recmill tune` measures, and training with `--set tuning=true` continues from there"
    )
    return IngestPlan(cores=cores, workers=workers, why=why)
