"""What every way of keeping embedding tables has in common, whoever holds the rows.

A collection answers lookups for some tables and updates them itself in the backward pass. TorchRec's sharded
collections, rows in tiers, hot rows and shared parameters all look like this to the model and to checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

# R = rows asked for, H = rows of a replica, D = embedding width
InitialRows = Callable[[str, int, int], Tensor]  # (table, start, stop) -> rows as a fresh run starts them


@dataclass(frozen=True, kw_only=True)
class TableOptimiser:
    """The optimiser fused into the tables' backward pass. Gradients are divided by the world size first."""

    kind: str = "rowwise_adagrad"  # rowwise_adagrad | adagrad | sgd
    lr: float = 0.05
    eps: float = 1e-8

    @property
    def state_names(self) -> tuple[str, ...]:
        return () if self.kind == "sgd" else ("momentum1",)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Copies of some rows of a table, the same on every rank: live tensors that are written in place."""

    rows_H: Tensor  # ids, in the order of the copies
    weights_HD: Tensor
    state: Mapping[str, Tensor]  # state name -> [H] or [H, D]


class TableStore(Protocol):
    """Tables that training can start, save, load and move rows of. Every method is called on all ranks together."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Logical names of the tables held here."""
        ...

    def start(self, initial_rows: InitialRows) -> None:
        """Give every row the value a fresh run starts from, and clear the optimiser state."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: {"tables": {table: rows}, "table_optimiser": {table: {name: state}}}.

        Values are tensors or ShardedTensors over *logical* rows (row id order), so that any other store can load them.
        """
        ...

    def absorb(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the form `state()` gives, after a checkpoint has been read into it."""
        ...

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps that begin from now on."""
        ...

    def gather_rows(self, table: str, rows_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(weights [R, D], {state name: [R] or [R, D]}) of rows by their ids, the same on every rank."""
        ...

    def put_rows(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write rows back. All ranks pass the same values; each keeps what it holds."""
        ...
