"""All tables of a model in one shared array, behind the interface of TorchRec's collections.

Every rank holds the whole array (it is small), so lookups exchange nothing; one synchronisation a step keeps the ranks
equal (shared_step.py). Rows that are read most may be kept exactly, the rest shared: `exact_rows`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from kernels.shared_lookup import SharedFeatures, calls
from recmill.artifacts import InputError, module_name
from recmill.model.stores.interface import InitialRows, TableOptimiser
from recmill.model.stores.shared.array import SharedArray, SharedTable
from recmill.model.stores.shared.step import Gradient, SharedStep

# F = features, B = samples, N = ids, R = rows asked for, D = embedding width
TableConfig = Any  # EmbeddingBagConfig | EmbeddingConfig; TorchRec is untyped, so a union would say no more
SAMPLE_ROWS = 4096  # of each table, to see how widely a fresh run's rows are spread


class _Lookup(torch.autograd.Function):
    """Vectors forward; backward hands their gradient to the step, so that the array needs none of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights_N: Tensor | None,
        step: SharedStep,
        features: SharedFeatures,
        ids_N: Tensor,
        offsets: Tensor,
        is_pooled: bool,
    ) -> Tensor:
        ctx.lists = make_lists(step.array, features, ids_N, offsets, weights_N, is_pooled)
        has_max = features.has_max and is_pooled
        how: dict[str, Any] = {"exponents": step.array.exponents, "num_threads": step.num_threads}
        out, winners = calls.look_up(step.slots, ctx.lists, has_max=has_max, **how)
        ctx.how = how
        ctx.step, ctx.features, ctx.is_pooled = step, features, is_pooled
        ctx.ids, ctx.offsets, ctx.weights = ids_N, offsets, None if weights_N is None else weights_N.detach()
        ctx.winners = winners if has_max else None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = calls.weigh(ctx.step.slots, gradients[0], ctx.lists, **ctx.how)
        ctx.step.add(
            Gradient(
                features=ctx.features,
                ids=ctx.ids,
                offsets=ctx.offsets,
                weights=ctx.weights,
                winners=ctx.winners,
                output=gradients[0].contiguous(),
                is_pooled=ctx.is_pooled,
                lists=ctx.lists,
            )
        )
        return None, of_weights, None, None, None, None, None


def make_lists(
    array: SharedArray,
    features: SharedFeatures,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    is_pooled: bool,
) -> calls.Lists:
    width = features.width if is_pooled else features.unpooled_width()
    tables = (features.rows, features.exact_ids, array.layout.numbers())
    return calls.Lists(ids_N, offsets, weights_N, *tables, width, is_pooled, dtype=array.value_dtype)


class SharedEmbeddingBagCollection(nn.Module):
    """TorchRec's EmbeddingBagCollection (`is_pooled`) or EmbeddingCollection over one shared array, a TableStore.

    Called with a KeyedJaggedTensor of any stride. Nothing here is a parameter: the array updates itself at the end of
    the backward pass, equally on all ranks, with gradients divided by the world size. `compression` or `memory_bytes`
    sizes the shared slots; `exact_rows` maps a table to the ids that get rows of their own, of `exact_width`
    weights each that repeat over the row (None: as wide as it is). Give `shared` (another
    collection) to read the same array: it must then have been told of all tables with `all_tables`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        is_pooled: bool = True,
        is_weighted: bool = False,
        memory_bytes: int | None = None,
        compression: float | None = None,
        block_size: int | None = None,
        mapping: str = "robe",
        sign: bool = False,
        seed: int = 0,
        optimiser: TableOptimiser | None = None,
        exact_rows: Mapping[str, Tensor] | None = None,
        exact_width: int | None = None,
        all_tables: Sequence[TableConfig] | None = None,
        shared: SharedEmbeddingBagCollection | None = None,
        gradient_scaling: float = 0.0,
        process_group: dist.ProcessGroup | None = None,
        sync: str = "auto",
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        num_threads: int = 0,
    ) -> None:
        super().__init__()
        if device is not None and device.type != "cpu":
            raise InputError(f"device is {device}: the fused step runs on the CPU; use SharedEmbeddingBag elsewhere")
        self.configs, self.is_pooled, self._is_weighted = list(tables), is_pooled, is_weighted
        self._names = {config.name: logical_name(config.name) for config in all_tables or tables}
        if shared is None:
            array = SharedArray(
                _shared_tables(all_tables or tables, self._names, exact_rows or {}, exact_width),
                compression=compression,
                memory_bytes=memory_bytes,
                block_size=block_size,
                mapping=mapping,
                sign=sign,
                seed=seed,
                std=0.01,
                dtype=dtype,
            )
            step = SharedStep(
                array,
                optimiser or TableOptimiser(),
                process_group=process_group,
                sync=sync,
                gradient_scaling=gradient_scaling,
                num_threads=num_threads,
            )
        else:
            step = shared.step
        # In a tuple, so that neither DDP nor state_dict() of the model sees the array.
        self._held = (step,)
        self.features = [name for config in tables for name in config.feature_names]
        self._output_names = [name for names in get_embedding_names_by_table(self.configs) for name in names]
        self._features = self._describe(tables)
        self._dims = [config.embedding_dim for config in tables for _ in config.feature_names]
        self.anchor = torch.zeros((), requires_grad=True)  # not a Parameter: it only makes autograd call us

    def _describe(self, tables: Sequence[TableConfig]) -> SharedFeatures:
        names, modes = [], []
        for config in tables:
            pooling = getattr(config, "pooling", PoolingType.SUM)
            names += [self._names[config.name]] * len(config.feature_names)
            modes += ["mean" if pooling == PoolingType.MEAN else "sum"] * len(config.feature_names)
        return self.array.features(names, modes)

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
        """What one rank holds: array, exact rows and their ids, optimiser state and scratch."""
        return self.step.num_bytes

    def embedding_bag_configs(self) -> list[TableConfig]:
        return self.configs

    def embedding_configs(self) -> list[TableConfig]:
        return self.configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        return self.step.slots.device

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """A KeyedTensor of [B, D] a feature, or a dict feature -> JaggedTensor of rows."""
        if list(features.keys()) != self.features:
            places = {key: place for place, key in enumerate(features.keys())}
            missing = [name for name in self.features if name not in places]
            if missing:
                raise InputError(f"the batch has no feature {missing[0]!r}, its features are {list(features.keys())}")
            features = features.permute([places[name] for name in self.features])
        weights = features.weights() if self._is_weighted else None
        vectors = self.look_up(features.values(), features.offsets(), weights)
        if self.is_pooled:
            return KeyedTensor(keys=self._output_names, length_per_key=self._dims, values=vectors)
        ends, stride = features.offset_per_key(), features.stride()
        lengths = features.lengths()
        return {
            name: JaggedTensor(values=vectors[ends[f] : ends[f + 1]], lengths=lengths[f * stride : (f + 1) * stride])
            for f, name in enumerate(self._output_names)
        }

    def look_up(self, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """The vectors of plain lists: feature f of sample b is ids_N[offsets[f * B + b] : offsets[f * B + b + 1]]."""
        if torch.is_grad_enabled():
            held = (self.step, self._features, ids_N, offsets, self.is_pooled)
            return _Lookup.apply(self.anchor, weights_N, *held)  # type: ignore[no-untyped-call]
        lists = make_lists(self.array, self._features, ids_N, offsets, weights_N, self.is_pooled)
        has_max = self._features.has_max and self.is_pooled
        how: dict[str, Any] = {"exponents": self.array.exponents, "num_threads": self.step.num_threads}
        return calls.look_up(self.step.slots, lists, has_max=has_max, **how)[0]

    def materialise(self, table: str, rows: Tensor | range | Sequence[int]) -> Tensor:
        """[R, D]: rows of a logical table as lookups see them."""
        return self.array.materialise(table, rows).detach()

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps that begin from now on, for all tables of the array."""
        self.step.optimiser = replace(self.step.optimiser, lr=lr)

    @torch.no_grad()
    def start(self, initial_rows: InitialRows) -> None:
        """Exact rows start as a fresh run's do; shared slots with the spread of all logical weights, from the seed."""
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
        """{"tables": {}, "table_optimiser": {}, "shared": {...}}: logical tables would not fit into any memory.

        shared: array and momentum (both live), the layout as numbers, and the ids of exact rows, which stand behind the
        shared slots; with bytes also their exponents and the number of steps. The same on all ranks.
        """
        array = self.array
        layout = torch.tensor([*array.layout.numbers(), array.num_slots])
        shared = {"array": self.step.slots, "momentum": self.step.momentum, "layout": layout}
        if array.exponents is not None:
            shared |= {"exponents": array.exponents, "num_steps": self.step.num_steps}
        exact = {name: array.exact_rows(name) for name in array.tables if len(array.exact_rows(name))}
        return {"tables": {}, "table_optimiser": {}, "shared": {**shared, "exact_rows": exact}}

    @torch.no_grad()
    def absorb(self, state: Mapping[str, Any]) -> None:
        """Take over a state of this form; refuse one whose slots mean something else."""
        own, given = self.state()["shared"], state["shared"]
        if not torch.equal(own["layout"], given["layout"]) or set(own["exact_rows"]) != set(given["exact_rows"]):
            raise InputError(
                f"the saved array is laid out as {given['layout'].tolist()} with exact rows of "
                f"{sorted(given['exact_rows'])}, this one as {own['layout'].tolist()} with {sorted(own['exact_rows'])}"
            )
        for name, rows in own["exact_rows"].items():
            if not torch.equal(rows, given["exact_rows"][name]):
                raise InputError(f"table {name!r}: the saved array keeps other rows exactly than this one")
        if own["array"].dtype != given["array"].dtype:
            raise InputError(f"the saved array is of {given['array'].dtype}, this one of {own['array'].dtype}")
        for name in own.keys() - {"layout", "exact_rows"}:
            if own[name].shape != given[name].shape:
                raise InputError(
                    f"{name}: the saved one has {len(given[name])} elements, expected {len(own[name])} "
                    f"(the optimiser is {self.step.optimiser.kind})"
                )
            own[name].copy_(given[name])

    @torch.no_grad()
    def gather_rows(self, table: str, rows_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(weights [R, D], {"momentum1": [R] or [R, D]}): row-wise, the mean over the lines a row lies in."""
        weights_RD = self.array.gather(self.array.values(), table, rows_R, sign=True)
        kind, momentum = self.step.optimiser.kind, self.step.momentum
        if kind == "sgd":
            return weights_RD, {}
        spread = momentum if kind == "adagrad" else self._spread(momentum)
        state_RD = self.array.gather(spread, table, rows_R)
        return weights_RD, {"momentum1": state_RD if kind == "adagrad" else state_RD.mean(1)}

    @torch.no_grad()
    def put_rows(self, table: str, rows_R: Tensor, weights_RD: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write rows back: exact rows read back as written, a shared slot as the mean of the rows that meet there."""
        array, kind, momentum = self.array, self.step.optimiser.kind, self.step.momentum
        values = array.values()
        array.fold(values, table, rows_R, weights_RD, sign=True)
        array.take(values)
        if kind == "sgd" or "momentum1" not in state:
            return
        if kind == "adagrad":
            array.fold(momentum, table, rows_R, state["momentum1"])
            return
        spread = self._spread(momentum)
        wide = state["momentum1"][:, None].expand(-1, weights_RD.shape[1]).contiguous()
        array.fold(spread, table, rows_R, wide)
        line_of = torch.arange(len(spread)) // calls.LINE
        counts = torch.bincount(line_of, minlength=len(momentum))
        momentum.copy_(torch.zeros_like(momentum).index_add(0, line_of, spread) / counts)

    def _spread(self, momentum: Tensor) -> Tensor:
        """A line's momentum for each of its slots."""
        return momentum.repeat_interleave(calls.LINE)[: self.array.num_slots].contiguous()


def logical_name(config_name: str) -> str:
    """The table's name behind its name as a torch module; any other name stands for itself."""
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
    """Some rows of a fresh run, drawn in runs of neighbours."""
    inside = rows[(rows >= 0) & (rows < table.num_rows)]
    if len(inside) != len(rows):
        raise InputError(f"table {table.name!r}: exact_rows go beyond its {table.num_rows} rows")
    blocks = rows // SAMPLE_ROWS
    drawn = []
    for block in sorted(set(blocks.tolist())):
        first = block * SAMPLE_ROWS
        fresh = initial_rows(table.name, first, min(first + SAMPLE_ROWS, table.num_rows))
        drawn.append(fresh[rows[blocks == block] - first])
    return torch.cat(drawn)
