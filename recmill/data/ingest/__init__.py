"""The staged reader: read -> decode -> transform -> batch, with worker counts that may change at run time.

`pipeline` is the entry; `order`, `schedule` and `memory` decide what is read when, `runner` and `crew` run the stages
in threads, `reader` and `parts` do their work.
"""

from typing import TYPE_CHECKING, Any

from recmill.data.ingest.splits import evaluation_split, split_groups

if TYPE_CHECKING:
    from recmill.data.ingest.pipeline import IngestPipeline
    from recmill.data.ingest.reader import STAGES

__all__ = ["STAGES", "IngestPipeline", "evaluation_split", "split_groups"]


def __getattr__(name: str) -> Any:
    """Imported when first used: batches need torch and TorchRec, which take seconds to load."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from recmill.data.ingest import pipeline, reader

    return getattr(pipeline if name == "IngestPipeline" else reader, name)
