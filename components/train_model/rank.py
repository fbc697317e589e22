"""A rank in a pod of a TrainJob: recmill's worker, whose first rank also tells the TrainJob how far it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from components.train_model.trainer_status import StatusServer
from recmill.artifacts import read_json
from recmill.training.processes import print_progress
from recmill.training.rank import worker


def main(job_path: str) -> None:
    server = StatusServer.from_environment() if os.environ["RANK"] == "0" else None
    if server is None:
        worker.main(job_path)
        return
    with server.reporting(Path(read_json(job_path)["out"])) as tell:

        def report(what: str, done: int, total: int) -> None:
            print_progress(what, done, total)
            tell(what, done, total)

        worker.main(job_path, report)


if __name__ == "__main__":
    main(sys.argv[1])
