"""The staged reader: read -> decode -> transform -> batch, with worker counts that may change at run time.

`pipeline` is the entry; `order`, `schedule` and `memory` decide what is read when, `runner` and `crew` run the stages
in threads, `reader` and `parts` do their work.
"""

from recmill.data.ingest.pipeline import IngestPipeline
from recmill.data.ingest.reader import STAGES
from recmill.data.ingest.splits import evaluation_split, split_groups

__all__ = ["STAGES", "IngestPipeline", "evaluation_split", "split_groups"]
