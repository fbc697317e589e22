"""One more process of a prediction: reads its job from standard input, scores its parts and ends."""

from __future__ import annotations

import json
import sys

from recmill.artifacts import InputError
from recmill.training.prediction.predictor import ScoringWork, score_parts
from recmill.training.prediction.rows import cut_parts
from recmill.training.processes import keep_freed_memory


def main() -> None:
    job = json.load(sys.stdin)
    keep_freed_memory()
    try:
        work = ScoringWork.open(job["model"], job["data"], job["split"])
        score_parts(work, job, cut_parts(work.rows.groups, job["rows_per_part"]), job["parts"])
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
