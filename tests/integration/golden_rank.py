"""A rank that trains one job after another, so that many short runs pay once for importing torch and torchrec.

tests/integration/golden_losses.py starts it and writes one line per job to its standard input: the job's file and the
port of that job's process group.
"""

import json
import os
import sys
from pathlib import Path

from recmill.training.processes import die_with_parent
from recmill.training.rank.worker import run_rank

DONE = "@done"  # the line that says that this rank has finished its job


def main() -> None:
    die_with_parent()
    for line in sys.stdin:
        port, _, path = line.strip().partition(" ")
        os.environ["MASTER_PORT"] = port
        run_rank(json.loads(Path(path).read_text(encoding="utf-8")))
        print(DONE, flush=True)


if __name__ == "__main__":
    main()
