"""A rank that trains one job after another, so that many short runs pay once for importing torch and torchrec."""

import os
import traceback
from contextlib import redirect_stdout
from multiprocessing.connection import Connection

from recmill.training.rank.worker import run_rank


def train_in_turn(connection: Connection, rank: int, nproc: int) -> None:
    """Train every (port, job) that the connection brings; answer with "" or with what went wrong."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    while True:
        port, job = connection.recv()
        os.environ["MASTER_PORT"] = str(port)
        try:
            with redirect_stdout(None):  # a rank prints its progress for the launcher
                run_rank(job)
        except BaseException:
            connection.send(traceback.format_exc())
            raise
        connection.send("")
