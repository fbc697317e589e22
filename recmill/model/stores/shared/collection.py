"""All tables of a model in one shared array, behind the interface of TorchRec's collections.

Every rank holds the whole array (it is small), so lookups exchange nothing; one synchronisation per step keeps the
ranks equal (step.py). The most read rows may be kept exactly while the others share: `exact_rows`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from kernels.shared_lookup import SharedFeatures, ops
from kernels.shared_lookup.layout import LINE, mix_bits, signed
from recmill.artifacts import InputError, module_name
from recmill.model.stores.interface import InitialRows, TableOptimiser
from recmill.model.stores.lookups import HandOver, TableConfig, answer_rows, pooling_of
from recmill.model.stores.shared.array import SharedArray, SharedTable
from recmill.model.stores.shared.step import LookupGradient, SharedStep

# F = features, B = samples, N = ids, R = requested rows, D = embedding width
SAMPLE_ROWS = 4096  # per table, to estimate the spread of initial rows


class SharedEmbeddingBagCollection(nn.Module):
    """TorchRec's EmbeddingBagCollection (`is_pooled`) or EmbeddingCollection over one shared array, a TableStore.

    Call it with a KeyedJaggedTensor of any stride. It has no parameters: the array updates itself at the end of the
    backward pass, identically on all ranks, with gradients divided by the world size. `compression` or `memory_bytes`
    sets the number of shared slots; `exact_rows` maps a table to the ids that get their own row, of `exact_width`
    weights each that repeat over the row (None: full width). Pass `shared` (another collection) to read the same array:
    that collection must have been given all tables in `all_tables`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        is_pooled: bool = True,
        memory_bytes: int | None = None,
        compression: float | None = None,
        block_size: int | None = None,
        seed: int = 0,
        optimiser: TableOptimiser | None = None,
        exact_rows: Mapping[str, Tensor] | None = None,
        exact_width: int | None = None,
        all_tables: Sequence[TableConfig] | None = None,
        shared: SharedEmbeddingBagCollection | None = None,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if device is not None and device.type != "cpu":
            raise InputError(f"device is {device}: the fused step runs on the CPU; use SharedEmbeddingBag elsewhere")
        self.configs, self.is_pooled = list(tables), is_pooled
        self._names = {config.name: logical_name(config.name) for config in all_tables or tables}
        if shared is None:
            array = SharedArray(
                _shared_tables(all_tables or tables, self._names, exact_rows or {}, exact_width),
                compression=compression,
                memory_bytes=memory_bytes,
                block_size=block_size,
                seed=seed,
                std=0.01,
                dtype=dtype,
            )
            step = SharedStep(array, optimiser or TableOptimiser(), process_group=process_group)
        else:
            step = shared.step
        # In a tuple, so that neither DDP nor state_dict() of the model sees the array.
        self._held = (step,)
        self.features = [name for config in tables for name in config.feature_names]
        self._output_names = [name for names in get_embedding_names_by_table(self.configs) for name in names]
        self.kernel_features = self._describe(tables)
        self._dims = [config.embedding_dim for config in tables for _ in config.feature_names]
        self.anchor = torch.zeros((), requires_grad=True)  # not a Parameter: it only makes autograd call backward

    def _describe(self, tables: Sequence[TableConfig]) -> SharedFeatures:
        found = []
        for config in tables:
            feature = self.array.feature(self._names[config.name], is_mean=pooling_of(config) == "mean")
            found += [feature] * len(config.feature_names)
        return SharedFeatures.of(found, self.array.exact_ids)

    @property
    def step(self) -> SharedStep:
        return self._held[0]

    @property
    def array(self) -> SharedArray:
        return self.step.array

    @property
    def tables(self) -> tuple[str, ...]:
        """Logical names of the tables that are looked up here."""
        return tuple(self._names[config.name] for config in self.configs)

    @property
    def num_bytes(self) -> int:
        """Bytes per rank: array, exact rows and their ids, optimiser state and scratch."""
        return self.step.num_bytes

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """A KeyedTensor with one [B, D] per feature, or a dict feature -> JaggedTensor of rows."""
        if list(features.keys()) != self.features:
            places = {key: place for place, key in enumerate(features.keys())}
            missing = [name for name in self.features if name not in places]
            if missing:
                raise InputError(f"the batch has no feature {missing[0]!r}, its features are {list(features.keys())}")
            features = features.permute([places[name] for name in self.features])
        vectors = self.look_up(features.values(), features.offsets())
        if self.is_pooled:
            return KeyedTensor(keys=self._output_names, length_per_key=self._dims, values=vectors)
        return answer_rows(vectors, self._output_names, features.lengths())

    def look_up(self, ids_N: Tensor, offsets: Tensor) -> Tensor:
        """The vectors of plain lists: feature f of sample b is ids_N[offsets[f * B + b] : offsets[f * B + b + 1]]."""
        described = self.kernel_features.described(self.array.layout, is_pooled=self.is_pooled)
        lists = ops.check_lists(ids_N, offsets, *described)
        vectors = ops.look_up(self.step.slots, self.array.exponents, lists)
        if not torch.is_grad_enabled():
            return vectors

        def receive(gradients: Sequence[Tensor]) -> None:
            how: dict[str, Any] = {"features": self.kernel_features, "is_pooled": self.is_pooled, "lists": lists}
            self.step.add(LookupGradient(ids=ids_N, offsets=offsets, output=gradients[0].contiguous(), **how))

        handed: Tensor = HandOver.apply(self.anchor, vectors, vectors.shape[1], receive)[0]  # type: ignore[no-untyped-call]
        return handed

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the steps that begin from now on, for all tables of the array."""
        self.step.optimiser = replace(self.step.optimiser, lr=lr)

    @torch.no_grad()
    def start(self, initial_rows: InitialRows) -> None:
        """Set exact rows to their initial values; draw shared slots from the seed with the same spread."""
        array, total = self.array, 0.0
        for name, table in array.tables.items():
            sample = initial_rows(name, 0, min(table.num_rows, SAMPLE_ROWS))
            total += float(sample.double().square().mean()) * table.num_rows * table.dim
        array.std = (total / array.num_logical) ** 0.5
        array.reset_parameters()
        values = array.values()
        for name, table in array.tables.items():
            if len(rows := array.exact_rows(name)):
                fresh = _pick_rows(initial_rows, table, rows)[:, : table.own_width]
                values[array.exact_slots(name)] = fresh.flatten().to(values.dtype)
        array.take(values)
        self.step.momentum.zero_()
        self.step.num_steps.zero_()

    def state(self) -> dict[str, Any]:
        """{"tables": {}, "table_optimiser": {}, "shared": {...}}: logical tables would not fit into memory.

        shared: array and momentum (both live), the layout as numbers, and the ids of exact rows (their slots
        follow the shared ones); for int8 also the exponents and the number of steps. The same on all ranks.
        """
        array = self.array
        own = array.layout
        # The zeros: checkpoints written when layouts could also be folded and signed have the same form.
        layout = torch.tensor([own.size, signed(mix_bits(own.seed)), own.block_size, 0, 0, array.num_slots])
        shared = {"array": self.step.slots, "momentum": self.step.momentum, "layout": layout}
        if array.exponents is not None:
            shared |= {"exponents": array.exponents, "num_steps": self.step.num_steps}
        exact = {name: array.exact_rows(name) for name in array.tables if len(array.exact_rows(name))}
        return {"tables": {}, "table_optimiser": {}, "shared": {**shared, "exact_rows": exact}}

    @torch.no_grad()
    def absorb(self, state: Mapping[str, Any]) -> None:
        """Load a state of this form; reject one with a different layout."""
        own, given = self.state()["shared"], state["shared"]
        if not torch.equal(own["layout"], given["layout"]) or set(own["exact_rows"]) != set(given["exact_rows"]):
            raise InputError(
                f"the saved array is laid out as {given['layout'].tolist()} with exact rows of "
                f"{sorted(given['exact_rows'])}, this one as {own['layout'].tolist()} with {sorted(own['exact_rows'])}"
            )
        for name, rows in own["exact_rows"].items():
            if not torch.equal(rows, given["exact_rows"][name]):
                raise InputError(f"table {name!r}: the saved array keeps different rows exactly")
        if own["array"].dtype != given["array"].dtype:
            raise InputError(f"the saved array has dtype {given['array'].dtype}, expected {own['array'].dtype}")
        for name in own.keys() - {"layout", "exact_rows"}:
            if own[name].shape != given[name].shape:
                raise InputError(
                    f"{name}: the saved array has {len(given[name])} elements, expected {len(own[name])} "
                    f"(the optimiser is {self.step.optimiser.kind})"
                )
            own[name].copy_(given[name])

    @torch.no_grad()
    def gather_rows(self, table: str, rows_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(weights [R, D], {"momentum1": [R] or [R, D]}); row-wise momentum is the mean over the lines of a row."""
        weights_RD = self.array.gather(self.array.values(), table, rows_R)
        kind, momentum = self.step.optimiser.kind, self.step.momentum
        if kind == "sgd":
            return weights_RD, {}
        spread = momentum if kind == "adagrad" else self._spread(momentum)
        state_RD = self.array.gather(spread, table, rows_R)
        return weights_RD, {"momentum1": state_RD if kind == "adagrad" else state_RD.mean(1)}

    @torch.no_grad()
    def put_rows(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write rows back: exact rows read back as written, a shared slot becomes the mean of its rows."""
        array, kind, momentum = self.array, self.step.optimiser.kind, self.step.momentum
        values = array.values()
        array.fold(values, table, rows_R, weights_RD)
        array.take(values)
        if kind == "sgd" or "momentum1" not in state:
            return
        if kind == "adagrad":
            array.fold(momentum, table, rows_R, state["momentum1"])
            return
        spread = self._spread(momentum)
        wide = state["momentum1"][:, None].expand(-1, weights_RD.shape[1]).contiguous()
        array.fold(spread, table, rows_R, wide)
        line_of = torch.arange(len(spread)) // LINE
        counts = torch.bincount(line_of, minlength=len(momentum))
        momentum.copy_(torch.zeros_like(momentum).index_add(0, line_of, spread) / counts)

    @torch.no_grad()
    def merge_rows(self, blocks: Iterable[tuple[str, Tensor, Tensor, Mapping[str, Tensor]]]) -> None:
        """Write rows of any tables, each once: (table, rows, weights, state); a slot becomes the mean of all its rows.

        Sums are kept in float64, so that a slot whose rows are equal gets exactly their value.
        """
        array, kind, momentum = self.array, self.step.optimiser.kind, self.step.momentum
        sums = {name: torch.zeros(array.num_slots, dtype=torch.float64) for name in ("weights", "momentum1", "counts")}
        ignored = torch.zeros_like(sums["counts"])
        for table, rows_R, weights_RD, state in blocks:
            array.add_rows(sums["weights"], sums["counts"], table, rows_R, weights_RD)
            if "momentum1" in state and kind != "sgd":
                given = state["momentum1"]
                wide = (given if given.dim() == 2 else given[:, None].expand_as(weights_RD)).contiguous()
                array.add_rows(sums["momentum1"], ignored, table, rows_R, wide)
        is_written, counts = sums["counts"] > 0, sums["counts"].clamp(min=1)
        values = array.values()
        array.take(torch.where(is_written, sums["weights"] / counts, values.double()).to(values.dtype))
        if kind == "adagrad":
            momentum.copy_(sums["momentum1"] / counts)
        elif kind == "rowwise_adagrad":
            line_of = torch.arange(array.num_slots) // LINE
            lines = torch.zeros(len(momentum), dtype=torch.float64).index_add(0, line_of, sums["momentum1"] / counts)
            written = torch.zeros_like(lines).index_add(0, line_of, is_written.double())
            momentum.copy_(lines / written.clamp(min=1))

    def _spread(self, momentum: Tensor) -> Tensor:
        """The momentum of a line, repeated for each of its slots."""
        return momentum.repeat_interleave(LINE)[: self.array.num_slots].contiguous()


def logical_name(config_name: str) -> str:
    """The inverse of `module_name`; returns names that are not module names unchanged."""
    body = config_name.removeprefix("m_")
    name = re.sub("__|_d", lambda found: "_" if found[0] == "__" else ".", body)
    return name if module_name(name) == config_name else config_name


def _shared_tables(
    configs: Sequence[TableConfig],
    names: Mapping[str, str],
    exact_rows: Mapping[str, Tensor],
    exact_width: int | None,
) -> list[SharedTable]:
    known = set(names) | set(names.values())
    unknown = [name for name in exact_rows if name not in known]
    if unknown:
        raise InputError(f"exact_rows names table {unknown[0]!r}, the tables are {sorted(names.values())}")
    return [
        SharedTable(
            name=names[config.name],
            num_rows=config.num_embeddings,
            dim=config.embedding_dim,
            exact_rows=exact_rows.get(names[config.name], exact_rows.get(config.name)),
            exact_width=exact_width,
        )
        for config in configs
    ]


def _pick_rows(initial_rows: InitialRows, table: SharedTable, rows: Tensor) -> Tensor:
    """Initial values of some rows, drawn in blocks of neighbouring rows."""
    inside = rows[(rows >= 0) & (rows < table.num_rows)]
    if len(inside) != len(rows):
        raise InputError(f"table {table.name!r}: exact_rows must be in [0, {table.num_rows})")
    blocks = rows // SAMPLE_ROWS
    drawn = []
    for block in sorted(set(blocks.tolist())):
        first = block * SAMPLE_ROWS
        fresh = initial_rows(table.name, first, min(first + SAMPLE_ROWS, table.num_rows))
        drawn.append(fresh[rows[blocks == block] - first])
    return torch.cat(drawn)
