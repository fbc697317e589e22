"""The staged reader: read -> decode -> transform -> batch, with worker counts that change while it runs."""

from recmill.data.ingest.pipeline import IngestPipeline
from recmill.data.ingest.reader import STAGES
from recmill.data.ingest.splits import evaluation_split, split_groups, training_splits

__all__ = ["STAGES", "IngestPipeline", "evaluation_split", "split_groups", "training_splits"]
