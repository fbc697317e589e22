"""Settings of the server, as `recmill serve` passes them to its process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, Self


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What `recmill serve --help` explains, in seconds and bytes."""

    model: str  # folder of `recmill export`, a link to one, or a folder with an entry `current`
    name: str = "recmill"  # in the addresses of the protocol
    host: str = "127.0.0.1"
    port: int = 8080
    grpc_port: int = 8081  # 0: no gRPC
    workers: int = 1
    threads: int = 0  # of torch, per worker; 0: cores divided by workers
    memory: Literal["mapped", "resident"] = "mapped"  # tables: read as needed, or at the start
    cold_bytes: int | None = None  # most that mapped tables keep beyond their most read rows; None: no limit
    latency_budget_s: float = 0.02
    max_queue: int = 256  # requests that wait for the scorer
    max_request_bytes: int = 8 << 20
    max_candidates: int = 10_000  # of one call
    reload_s: float = 10.0  # 0: never
    wait_s: float = 0.0  # for MODEL to appear
    drain_s: float = 0.0  # not ready, but still answering, before the ports are closed
    grace_s: float = 30.0  # for calls in flight after that
    as_json: bool = False
    worker: int = -1  # number of this process among several; -1: the only one, or their parent
    parent_pipe: int = -1  # descriptor by which a worker tells its parent that it serves, or why it cannot

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> Self:
        return cls(**json.loads(text))
