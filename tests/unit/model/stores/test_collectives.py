"""Messages between ranks: JSON and vectors, never objects that must be unpickled."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from recmill.model.stores.collectives import broadcast_json, broadcast_values, gather_json

VALUES = [None, "", "ä", 0.1 + 0.2, {"auc": None, "tasks": {"click": {"log_loss": 1e-300}}}, [1, "x", {"y": [True]}]]


def exchange(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    for value in VALUES:
        assert broadcast_json(value if rank == 0 else {"of": rank}) == value
    assert gather_json({"rank": rank, "text": "x" * rank}) == [{"rank": n, "text": "x" * n} for n in range(3)]
    for wanted in (torch.arange(5), torch.zeros(0, dtype=torch.int64)):
        assert torch.equal(broadcast_values(wanted if rank == 0 else torch.zeros(2, dtype=torch.int64)), wanted)
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_values_arrive_as_they_were_sent(tmp_path):
    mp.start_processes(exchange, (str(tmp_path),), nprocs=3, start_method="fork")
