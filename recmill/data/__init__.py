"""From raw interaction logs to batches that a training step takes.

`sources` makes raw logs, `preparation` makes one from event logs as they are, `cluster` turns one into a dataset
(stored by `storage`), `ingest` reads it back in batches (`ikjt` holds each repeated list once),
`hot` separates samples that read hot rows only.
"""

__all__ = [
    "cluster",
    "dataset",
    "hot",
    "ikjt",
    "ingest",
    "log",
    "memory_plan",
    "preparation",
    "schema",
    "sources",
    "storage",
    "tables",
    "transforms",
]
