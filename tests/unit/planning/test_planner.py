import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError, ShardPlan
from recmill.planning.planner import Topology, default_plan, plan_shards, table_bytes
from recmill.profiling.access import profile_access
from tests.datasets import ranking_schema, write_dataset


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planner")
    write_dataset(folder / "data")
    return profile_access(folder / "data", out=folder / "profile")


def test_torchrecs_planner_places_every_row_once_within_the_budget(profile, tmp_path):
    plan = plan_shards(
        profile,
        out=tmp_path / "plan",
        topology=Topology.local(2),
        memory_budget_bytes=1 << 20,
        strategy="torchrec",
    )
    schema = ranking_schema()
    for table in schema.tables:
        entry = plan.tables[table.name]
        assert sum(shard.size[0] for shard in entry.shards) == table.num_rows
        assert entry.tiers[0].bytes == table.num_rows * (table.dim * 4 + 4)
        rows = pq.read_table(tmp_path / "plan" / "rows" / f"{table.name}.parquet").to_pydict()
        assert rows["row"] == rows["slot"] == list(range(table.num_rows))
    assert sum(plan.rank_bytes) == sum(table_bytes(table) for table in schema.tables)
    assert max(plan.rank_bytes) <= 1 << 20
    assert plan.profile_hash == profile.content_hash


def test_torchrec_takes_the_plan(profile, tmp_path):
    plan_shards(profile, out=tmp_path / "plan", topology=Topology.local(2), memory_budget_bytes=1 << 20)
    torchrec_plan = ShardPlan.load(tmp_path / "plan").to_torchrec()
    assert set(torchrec_plan.plan) == {"embeddings.pooled", "embeddings.sequence"}
    ranks = [rank for module in torchrec_plan.plan.values() for shards in module.values() for rank in shards.ranks]
    assert set(ranks) <= {0, 1}


def test_an_impossible_budget_says_by_how_much_and_which_tables(profile, tmp_path):
    with pytest.raises(InputError, match=r"need 3,492 B .* 492 B too little; largest: interests 1,800 B"):
        plan_shards(profile, out=tmp_path / "plan", topology=Topology.local(2), memory_budget_bytes=1500)
    topology = Topology.local(4)
    with pytest.raises(InputError, match=r"table 'interests' needs 1,800 B on one rank"):
        plan_shards(profile, out=tmp_path / "plan", topology=topology, memory_budget_bytes=1600, strategy="torchrec")
    assert not (tmp_path / "plan").exists()


def test_the_default_plan_balances_whole_tables():
    plan = default_plan(ranking_schema(), Topology.local(2))
    ranks = {name: entry.shards[0].rank for name, entry in plan.tables.items()}
    # by size: interests 1,800 B, items 1,440 B, country 252 B
    assert ranks == {"interests": 0, "items": 1, "country": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes: 0", "nodes is 0, expected a whole number of 1 or more"),
        ("nodes: two", "nodes is 'two'"),
        ("racks: 3", "unknown keys racks"),
        ("[1, 2]", "expected a mapping"),
        ("nodes: [", "not a YAML file"),
        ("inter_node_bytes_per_s: -1", "expected a number above 0"),
        ("device: tpu", "expected cpu or cuda"),
    ],
)
def test_a_wrong_topology_names_the_file_and_the_field(tmp_path, text, words):
    (tmp_path / "topology.yaml").write_text(text)
    with pytest.raises(InputError, match=words) as error:
        Topology.load(tmp_path / "topology.yaml")
    assert "topology.yaml" in str(error.value)


def test_a_topology_reads_exponents_as_people_write_them(tmp_path):
    (tmp_path / "topology.yaml").write_text("nodes: 2\nranks_per_node: 4\ninter_node_bytes_per_s: 10e9\n")
    assert Topology.load(tmp_path / "topology.yaml") == Topology(nodes=2, ranks_per_node=4, inter_node_bytes_per_s=1e10)


def test_a_missing_topology_is_named(tmp_path):
    with pytest.raises(InputError, match="no such file; expected a topology"):
        Topology.load(tmp_path / "none.yaml")
