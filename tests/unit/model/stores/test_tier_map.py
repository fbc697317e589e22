from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import InputError, ShardPlan
from recmill.artifacts.plan import Shard, Tier
from recmill.artifacts.topology import Topology
from recmill.data.schema import Feature, Schema
from recmill.model.stores.tiered.exchange import Grid, Ring, SparseRows, unstripe
from recmill.model.stores.tiered.layout import KeyLayout
from recmill.model.stores.tiered.tier_map import GLOBAL, NODE, REPLICATED, TABLE_WISE, TierMap
from recmill.planning.planner import default_plan


def write_plan(folder: Path, *, tiers: list[tuple[str, int]], rows: list[int], tier: list[int], slot: list[int]):
    (folder / "rows").mkdir(parents=True)
    pq.write_table(
        pa.table({"row": rows, "tier": pa.array(tier, pa.int32()), "slot": slot}), folder / "rows" / "items.parquet"
    )
    schema = Schema(features=(Feature(name="items", kind="sequence", num_rows=len(rows), dim=4),))
    plan = default_plan(schema, Topology(nodes=2, ranks_per_node=2))
    table = replace(
        plan.tables["items"],
        placement="tiered",
        shards=(Shard(rank=5, local_rank=1, offset=(0, 0), size=(len(rows), 4)),),
        tiers=tuple(
            Tier(kind=kind, num_rows=count, bytes=0, predicted_bytes_per_step=0.0, predicted_seconds_per_step=0.0)
            for kind, count in tiers
        ),
    )
    replace(plan, tables={"items": table}).seal(folder)
    return ShardPlan.load(folder)


def grid_of(rank: int, world: int, per_node: int) -> Grid:
    """A grid that never sends: enough to ask who holds what."""
    alone = Ring(ranks=(rank,), position=0, group=None)
    return Grid(rank=rank, world_size=world, ranks_per_node=per_node, world=alone, node=alone, peers=alone)


def test_a_plan_gives_every_row_its_tier_and_slot(tmp_path):
    plan = write_plan(
        tmp_path / "plan",
        tiers=[("replicated", 2), ("node", 1), ("global", 3)],
        rows=[0, 1, 2, 3, 4, 5],
        tier=[2, 0, 2, 1, 0, 2],
        slot=[0, 1, 1, 0, 0, 2],
    )
    kinds, slots = TierMap.from_plan(plan, "items").split(torch.arange(6))
    assert kinds.tolist() == [GLOBAL, REPLICATED, GLOBAL, NODE, REPLICATED, GLOBAL]
    assert slots.tolist() == [0, 1, 1, 0, 0, 2]


def test_a_table_wise_table_belongs_to_its_rank(tmp_path):
    plan = write_plan(tmp_path / "plan", tiers=[("table_wise", 3)], rows=[0, 1, 2], tier=[0] * 3, slot=[0, 1, 2])
    tiers = TierMap.from_plan(plan, "items")
    assert (tiers.owner, tiers.counts) == (5, (0, 0, 0, 3))
    assert tiers.split(torch.arange(3))[0].tolist() == [TABLE_WISE] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tier": [1, 0, 2]}, "has values up to 2, plan.json has 2 tiers"),
        ({"slot": [0, 7, 1]}, "slots of its replicated rows are not 0 to 0"),
        ({"tier": [0, 0, 1], "slot": [0, 1, 0]}, r"holds \(1, 0, 2, 0\) rows"),
        ({"rows": [0, 1], "tier": [1, 0], "slot": [0, 0]}, "lists 2 rows, plan.json says 3"),
        ({"tiers": [("warm", 3)]}, r"tiers\[0\].kind is 'warm', expected one of"),
        ({"tiers": []}, "has no tiers"),
    ],
)
def test_a_broken_plan_is_one_sentence(tmp_path, change, words):
    good = {"tiers": [("replicated", 1), ("global", 2)], "rows": [0, 1, 2], "tier": [1, 0, 1], "slot": [0, 0, 1]}
    with pytest.raises(InputError, match=words):
        TierMap.from_plan(write_plan(tmp_path / "plan", **{**good, **change}), "items")


def test_an_unknown_table_is_named(tmp_path):
    plan = write_plan(tmp_path / "plan", tiers=[("global", 1)], rows=[0], tier=[0], slot=[0])
    with pytest.raises(InputError, match="has no table 'goods'; it plans items"):
        TierMap.from_plan(plan, "goods")


def test_rows_in_two_tiers_or_out_of_the_table_are_refused():
    with pytest.raises(InputError, match="row 3 is in two tiers"):
        TierMap.of(9, replicated=torch.tensor([3, 1]), node=torch.tensor([3]))
    with pytest.raises(InputError, match="names rows from 9 to 9 in a table of 9"):
        TierMap.of(9, replicated=torch.tensor([9]))


@given(data=st.data(), nodes=st.integers(1, 3), per_node=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_every_copy_of_a_row_has_a_place_of_its_own(data, nodes, per_node):
    num_rows = data.draw(st.integers(1, 40))
    rows = data.draw(st.permutations(range(num_rows)))
    hot, warm = data.draw(st.integers(0, num_rows)), data.draw(st.integers(0, num_rows))
    maps = {
        "a": TierMap.of(num_rows, replicated=torch.tensor(rows[:hot]), node=torch.tensor(rows[hot : hot + warm])),
        "b": TierMap.of(num_rows),
        "c": TierMap.whole(num_rows, owner=7),
    }
    world = nodes * per_node
    copies = dict.fromkeys(("a", "b", "c"), 0)
    for rank in range(world):
        layout = KeyLayout.of(maps, grid_of(rank, world, per_node))
        used: list[int] = []
        for table in maps:
            places, keys = layout.held(table, torch.arange(num_rows))
            used += keys.tolist()
            copies[table] += len(places)
            assert layout.keys(table, torch.arange(num_rows)).tolist() == sorted_by_reader(layout, table, num_rows)
        assert len(set(used)) == len(used)
        assert all(0 <= key < layout.num_local for key in used)
    assert copies["b"] == copies["c"] == num_rows
    num_warm = len(rows[hot : hot + warm])
    assert copies["a"] == hot * world + num_warm * nodes + (num_rows - hot - num_warm)


def sorted_by_reader(layout: KeyLayout, table: str, num_rows: int) -> list[int]:
    """Where a rank reads every row, by the rules of the tiers, one row at a time."""
    grid, tiers = layout.grid, layout.maps[table]
    found = []
    for kind, slot in zip(*(own.tolist() for own in tiers.split(torch.arange(num_rows))), strict=True):
        holder, place = {
            GLOBAL: (slot % grid.world_size, slot // grid.world_size),
            NODE: (grid.node_index * grid.ranks_per_node + slot % grid.ranks_per_node, slot // grid.ranks_per_node),
            REPLICATED: (grid.rank, slot),
            TABLE_WISE: (tiers.owner % grid.world_size, slot),
        }[kind]
        found.append(holder * layout.stride + layout.bases[table, kind] + place)
    return found


def test_cold_rows_are_striped_so_that_neighbours_are_on_all_ranks():
    layout = KeyLayout.of({"a": TierMap.of(800)}, grid_of(0, 8, 4))
    holders = layout.keys("a", torch.arange(100, 132)) // layout.stride
    assert np.bincount(holders.numpy(), minlength=8).tolist() == [4] * 8


@given(keys=st.sets(st.integers(0, 50)), count=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_stripes_come_together_again(keys, count):
    ordered = torch.tensor(sorted(keys), dtype=torch.int64)
    rows = SparseRows(keys_K=ordered, rows_KD=ordered[:, None].float())
    again = unstripe(rows.stripes(count))
    assert torch.equal(again.keys_K, rows.keys_K)
    assert torch.equal(again.rows_KD, rows.rows_KD)


def test_a_sum_adds_equal_keys_in_the_order_of_the_lists():
    lists = [
        SparseRows(keys_K=torch.tensor([1, 4]), rows_KD=torch.tensor([[1e8], [1.0]])),
        SparseRows(keys_K=torch.tensor([1]), rows_KD=torch.tensor([[1.0]])),
        SparseRows(keys_K=torch.tensor([1, 2]), rows_KD=torch.tensor([[-1e8], [3.0]])),
    ]
    total = SparseRows.sum_of(lists, domain=5)
    assert total.keys_K.tolist() == [1, 2, 4]
    assert total.rows_KD.tolist() == [[0.0], [3.0], [1.0]]  # 1e8 + 1 is 1e8 in float32: first to last, not pairwise
