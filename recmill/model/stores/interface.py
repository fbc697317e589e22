"""The interface that all stores of embedding tables implement.

A collection answers lookups for some tables and updates them itself in the backward pass. The model and checkpoints see
TorchRec's sharded collections, tiers, shared parameters and tables on disk through this interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

# R = requested rows, H = rows of a replica, D = embedding width
InitialRows = Callable[[str, int, int], Tensor]  # (table, start, stop) -> initial values of these rows


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

    @property
    def parts(self) -> list[Tensor]:
        """Weights and state."""
        return [self.weights_HD, *self.state.values()]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class TableStore(Protocol):
    """Tables whose rows training can initialise, save, load and move. All ranks call every method together."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Logical names of the tables held here."""
        ...

    def start(self, initial_rows: InitialRows) -> None:
        """Set every row to its initial value and clear the optimiser state."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores: {"tables": {table: rows}, "table_optimiser": {table: {name: state}}}.

        Values are tensors or ShardedTensors over *logical* rows (in row id order), so that any store can load them.
        """
        ...

    def absorb(self, state: Mapping[str, Any]) -> None:
        """Load a state of the form that `state()` returns, after a checkpoint has been read into it."""
        ...

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the steps that begin from now on."""
        ...

    def gather_rows(self, table: str, rows_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(weights [R, D], {state name: [R] or [R, D]}) of rows by id, the same on every rank."""
        ...

    def put_rows(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write rows back. All ranks pass the same values; each writes the rows it holds."""
        ...


def copy_rows(store: TableStore, replicas: Mapping[str, Replica]) -> None:
    """Set copies of rows to what the store holds, on all ranks."""
    for table, own in replicas.items():
        weights, state = store.gather_rows(table, own.rows_H)
        own.weights_HD.copy_(weights)
        for name, live in own.state.items():
            live.copy_(state[name].reshape(live.shape))
