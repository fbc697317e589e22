"""Scores requests, each one user and many candidates, without TorchRec, MLflow or Kubeflow.

    from recmill.serving import RequestBatch, RequestModel

    model = RequestModel.load("MODEL")               # what `recmill export` wrote
    model.signature                                  # which features it takes, for the user or for each candidate
    probability_N = model.score(batch)               # [candidates]; with several labels [candidates, labels]

A `RequestBatch` holds several requests. The user's part is given, looked up, pooled and encoded once per request:

    requests              0              1
    counts_R              3              2             # candidates per request
    user_ids              [7, 9]         []            # per request, as (values, offsets)
    candidate_ids         [4] [5] [4]    [8] [1]       # per candidate, as (values, offsets)
    probability_N         .1  .7  .2     .4  .3        # as if the user were repeated for every candidate

`batch` checks and joins requests, `signature` says what a model takes, `sides` decides which features are the user's,
`tables` holds the embedding tables (in memory or mapped from a file), `lookups` reads them, `network` and `scoring`
compute, `export` writes the folder MODEL/request that `RequestModel.load` reads. It needs torch, numpy, pyarrow and
this project's compiled kernels.
"""

from typing import TYPE_CHECKING, Any

from recmill.serving.batch import RequestBatch
from recmill.serving.signature import RequestFeature, Signature

if TYPE_CHECKING:
    from recmill.serving.model import RequestModel

__all__ = ["RequestBatch", "RequestFeature", "RequestModel", "Signature"]


def __getattr__(name: str) -> Any:
    """`RequestModel` on first use: it loads torch, which `recmill serve` does without before its server starts."""
    if name != "RequestModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from recmill.serving.model import RequestModel

    return RequestModel
