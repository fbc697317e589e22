"""Divides the rows of a row group into hot and cold ones, column by column.

Shape suffixes: R = rows (samples), N = ids of a feature.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recmill.data.hot.remap import HotRemap
from recmill.data.ikjt.distinct import take_lists
from recmill.data.schema import Schema
from recmill.data.transforms import Transforms

Mask = npt.NDArray[np.bool_]
IdArray = npt.NDArray[np.integer]
Slots = dict[str, IdArray]


def list_parts(rows: pa.Table, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.integer]]:
    """(ids, offsets) of a list column, offsets from 0."""
    column = rows.column(name)
    lists = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    offsets = lists.offsets.to_numpy()
    ids = lists.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy()
    return ids, offsets - offsets[0] if len(offsets) and offsets[0] else offsets


def find_hot_samples(rows: pa.Table, schema: Schema, remap: HotRemap) -> tuple[Mask, Slots]:
    """Which samples read only hot rows, and the slots of every feature's ids (-1: cold).

    Tables that the remap does not know keep their ids and make no sample cold: every rank holds them.
    """
    is_hot = np.ones(rows.num_rows, bool)
    slots: Slots = {}
    for feature in schema.id_features:
        ids, offsets = list_parts(rows, feature.name)
        if feature.table not in remap.hot_rows:
            slots[feature.name] = ids
            continue
        slots[feature.name] = own = remap.slots(feature.table, ids)
        if len(ids) == rows.num_rows and offsets[-1] == rows.num_rows and bool((np.diff(offsets) == 1).all()):
            is_hot &= own >= 0
            continue
        num_cold = np.zeros(len(ids) + 1, np.int32)
        np.cumsum(own < 0, out=num_cold[1:])
        is_hot &= num_cold[offsets[1:]] == num_cold[offsets[:-1]]
    return is_hot, slots


def take_samples(rows: pa.Table, schema: Schema, chosen_R: Mask, *, slots: Slots | None = None) -> pa.Table:
    """The chosen samples in their order; `slots`, if given, replace the ids.

    Column by column in numpy: Arrow's filter of a table turns the mask into an index and takes list by list.
    """
    arrow, taken = schema.arrow_schema(), []
    is_list = {feature.name for feature in schema.id_features}
    for name in arrow.names:
        if name in is_list:
            ids, offsets = list_parts(rows, name)
            taken.append(_choose_lists(slots[name] if slots else ids, offsets, chosen_R))
        else:
            taken.append(pa.array(rows.column(name).to_numpy()[chosen_R]))
    return pa.Table.from_arrays(taken, schema=arrow)


def _choose_lists(ids_N: IdArray, offsets: IdArray, chosen_R: Mask) -> pa.ListArray:
    lengths_R = np.diff(offsets)
    ends = np.zeros(np.count_nonzero(chosen_R) + 1, np.int32)
    np.cumsum(lengths_R[chosen_R], out=ends[1:])
    is_single = len(ids_N) == len(chosen_R) and bool((lengths_R == 1).all())
    chosen_N = chosen_R if is_single else np.repeat(chosen_R, lengths_R)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(ids_N[chosen_N].astype(np.int64, copy=False)))


def transform_rows(rows: pa.Table, schema: Schema) -> pa.Table:
    """The rows with the transforms of id features applied, as readers apply them."""
    transforms = Transforms(schema)
    for feature in schema.id_features:
        if not feature.transforms:
            continue
        ids, offsets = list_parts(rows, feature.name)
        lengths = np.diff(offsets).astype(np.int32)
        values, starts, lengths = transforms.lists(feature.name, ids, offsets[:-1].astype(np.int64), lengths)
        ends = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=ends[1:])
        lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(take_lists(values, starts, lengths)))
        rows = rows.set_column(rows.schema.get_field_index(feature.name), feature.name, lists)
    return rows
