"""Tiered tables against whole ones in one process: eight real ranks, started once, run every case one after another."""

import json
import multiprocessing
import os
import socket
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor, PoolingType

from recmill.data.ikjt import InverseKeyedJaggedTensor
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.tiered.tier_map import TierMap
from recmill.model.tiered_embedding import TieredEmbeddingCollection

NUM_STEPS, NUM_RANKS, DIM = 20, 8, 8
ROWS = {"goods": 61, "users": 23, "wide": 17}
FEATURES = {"goods": ["clicks", "buys"], "users": ["user"], "wide": ["wide"]}
DIMS = {"goods": DIM, "users": DIM, "wide": 4}
LR = {"sgd": 0.1, "rowwise_adagrad": 0.1, "adagrad": 0.1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to spread the tables over some ranks."""

    ranks: int
    ranks_per_node: int
    mix: str
    kind: str = "rowwise_adagrad"
    is_pooled: bool = False
    has_empty_ranks: bool = False
    deduplicated: bool = False
    merges_nodes: bool = False
    wire: str = "float32"

    @property
    def tables(self) -> list[str]:
        """Two widths take twice the messages: only some cases have them."""
        return list(ROWS) if self.deduplicated or self.ranks < 8 else ["goods", "users"]

    @property
    def name(self) -> str:
        names = ("is_pooled", "has_empty_ranks", "deduplicated", "merges_nodes")
        flags = [flag for flag in names if getattr(self, flag)]
        return "-".join([f"{self.ranks}x{self.ranks_per_node}", self.mix, self.kind, *flags, self.wire])


MIXES = ("global", "replicated", "node", "mixed", "whole")
CASES = [
    *(Case(ranks=8, ranks_per_node=4, mix=mix, kind="sgd", is_pooled=mix == "node") for mix in MIXES),
    *(Case(ranks=8, ranks_per_node=4, mix=mix, has_empty_ranks=True) for mix in MIXES),
    *(Case(ranks=ranks, ranks_per_node=ranks, mix="mixed", has_empty_ranks=ranks > 2) for ranks in (1, 2, 3, 5, 7)),
    Case(ranks=4, ranks_per_node=2, mix="mixed", is_pooled=True, has_empty_ranks=True),
    Case(ranks=6, ranks_per_node=2, mix="mixed", kind="sgd"),
    Case(ranks=6, ranks_per_node=3, mix="node"),
    Case(ranks=8, ranks_per_node=1, mix="mixed"),
    Case(ranks=8, ranks_per_node=2, mix="mixed", kind="adagrad"),
    Case(ranks=8, ranks_per_node=4, mix="mixed", deduplicated=True),
    Case(ranks=8, ranks_per_node=4, mix="mixed", is_pooled=True, deduplicated=True),
    Case(ranks=8, ranks_per_node=4, mix="global", has_empty_ranks=True, merges_nodes=True),
    Case(ranks=8, ranks_per_node=4, mix="mixed", has_empty_ranks=True, merges_nodes=True),
    Case(ranks=8, ranks_per_node=2, mix="global", kind="adagrad", is_pooled=True, merges_nodes=True),
    Case(ranks=8, ranks_per_node=4, mix="whole", deduplicated=True, merges_nodes=True),
    Case(ranks=4, ranks_per_node=2, mix="global", has_empty_ranks=True, merges_nodes=True),
    Case(ranks=6, ranks_per_node=2, mix="mixed", kind="sgd", merges_nodes=True),
]
# bfloat16 in messages rounds rows and gradients, on every rank in the same way.
ROUNDED = [
    Case(ranks=8, ranks_per_node=4, mix="mixed", wire="bfloat16"),
    Case(ranks=8, ranks_per_node=4, mix="mixed", merges_nodes=True, wire="bfloat16"),
]
# Looking ahead changes no bit, so it is compared with the same tables without it.
AHEAD = [
    *(Case(ranks=ranks, ranks_per_node=1, mix="global", has_empty_ranks=ranks > 1) for ranks in (1, 2, 3)),
    Case(ranks=2, ranks_per_node=1, mix="global", kind="sgd", is_pooled=True),
    Case(ranks=2, ranks_per_node=1, mix="global", kind="adagrad", deduplicated=True),
    Case(ranks=5, ranks_per_node=1, mix="global", is_pooled=True, deduplicated=True),
]


def tier_maps(mix: str, tables: list[str]) -> dict[str, TierMap]:
    maps = {}
    for table in tables:
        num_rows = ROWS[table]
        rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(num_rows))
        if mix == "whole":
            maps[table] = TierMap.whole(num_rows, owner=list(ROWS).index(table) + 3)
        elif mix == "mixed":
            maps[table] = TierMap.of(num_rows, replicated=rows[:7], node=rows[7:13])
        else:
            maps[table] = TierMap.of(num_rows, **({mix: rows} if mix != "global" else {}))
    return maps


def configs(case: Case) -> list[EmbeddingConfig | EmbeddingBagConfig]:
    made = []
    for table in case.tables:
        shared = {
            "name": table,
            "num_embeddings": ROWS[table],
            "embedding_dim": DIMS[table],
            "feature_names": FEATURES[table],
        }
        pooling = PoolingType.MEAN if table == "users" else PoolingType.SUM
        made.append(EmbeddingBagConfig(**shared, pooling=pooling) if case.is_pooled else EmbeddingConfig(**shared))
    return made


def initial_rows(table: str, start: int, stop: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(table))
    return torch.randn(ROWS[table], DIMS[table], generator=generator)[start:stop]


def make_batch(case: Case, step: int, rank: int) -> KeyedJaggedTensor:
    """Skewed ids, lists of 0 to 4; now and then a rank has no samples, or samples with nothing but empty lists."""
    generator = torch.Generator().manual_seed(step * 100 + rank)
    num_samples = 5 + rank % 2
    is_always_empty = case.ranks > 4 and rank == case.ranks - 1
    if case.has_empty_ranks and ((step + rank) % 3 == 0 or is_always_empty):
        num_samples = 0
    longest = 0 if case.has_empty_ranks and (step + rank) % 5 == 0 else 4
    keys, values, lengths = [], [], []
    for table in case.tables:
        for feature in FEATURES[table]:
            own = torch.randint(longest + 1, (num_samples,), generator=generator)
            skewed = torch.rand(int(own.sum()), generator=generator) ** 3
            ids = (skewed * ROWS[table]).long()
            if case.deduplicated and num_samples:
                own[1::2] = 3
                lists = [torch.arange(3) + step for _ in range(num_samples)]
                lists = [lists[i] % ROWS[table] if i % 2 else torch.full((int(own[i]),), i) for i in range(num_samples)]
                ids = torch.cat(lists)
            keys.append(feature)
            values.append(ids)
            lengths.append(own)
    return KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths).int(), stride=num_samples)


def lists_of(batch: KeyedJaggedTensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    lengths = batch.lengths().view(len(batch.keys()), -1) if batch.stride() else torch.zeros(len(batch.keys()), 0).int()
    values = torch.split(batch.values(), lengths.sum(1).tolist())
    return {key: (values[i], lengths[i]) for i, key in enumerate(batch.keys())}


def loss_of(outputs: dict[str, torch.Tensor | JaggedTensor]) -> torch.Tensor:
    """Bends every vector, so that gradients depend on the weights."""
    total = torch.zeros(())
    for name in sorted(outputs):
        found = outputs[name]
        values = found.values() if isinstance(found, JaggedTensor) else found
        total = total + (values.tanh() * torch.linspace(0.5, 2, values.shape[1])).sum() + 0.1 * (values**2).sum()
    return total


def reference(case: Case) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Whole tables in one process, one step of the optimiser a batch: (weights, loss of every step)."""
    weights = {table: initial_rows(table, 0, ROWS[table]).clone().requires_grad_() for table in case.tables}
    sums = {table: torch.zeros(ROWS[table], DIMS[table]) for table in case.tables}
    losses = []
    for step in range(NUM_STEPS):
        total = torch.zeros(())
        for rank in range(case.ranks):
            batch = lists_of(make_batch(case, step, rank))
            outputs = {}
            for table in case.tables:
                for feature in FEATURES[table]:
                    ids, lengths = batch[feature]
                    rows = weights[table][ids]
                    owners = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
                    if case.is_pooled:
                        pooled = torch.zeros(len(lengths), DIMS[table]).index_add(0, owners, rows)
                        outputs[feature] = pooled / lengths.clamp(min=1)[:, None] if table == "users" else pooled
                    else:
                        outputs[feature] = rows
            total = total + loss_of(outputs)
        losses.append(total.item())
        total.backward()
        with torch.no_grad():
            for table, weight in weights.items():
                gradient = weight.grad / case.ranks
                if case.kind == "sgd":
                    weight -= LR["sgd"] * gradient
                elif case.kind == "adagrad":
                    sums[table] += gradient**2
                    weight -= LR["adagrad"] * gradient / (sums[table].sqrt() + 1e-8)
                else:
                    sums[table] += (gradient**2).mean(1, keepdim=True)
                    weight -= LR["rowwise_adagrad"] * gradient / (sums[table].sqrt() + 1e-8)
                weight.grad = None
    return {table: weight.detach() for table, weight in weights.items()}, losses


def build(case: Case, group: dist.ProcessGroup, mix: str | None = None, sync_every: int = 1, lookahead: int = 0):
    collection = TieredEmbeddingCollection(
        configs(case),
        tier_maps(mix or case.mix, case.tables),
        ranks_per_node=case.ranks_per_node,
        is_pooled=case.is_pooled,
        optimiser=TableOptimiser(kind=case.kind, lr=LR[case.kind]),
        process_group=group,
        sync_every=sync_every,
        lookahead=lookahead,
        merges_nodes=case.merges_nodes,
        wire=case.wire,
    )
    collection.start(initial_rows)
    return collection


def train(collection: TieredEmbeddingCollection, case: Case, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = make_batch(case, step, rank)
        ids = InverseKeyedJaggedTensor.from_kjt(batch, min_factor=1.0) if case.deduplicated else batch
        outputs = collection(ids).to_dict()
        if step == 0 and not case.is_pooled and not case.deduplicated:
            check_rows(outputs, batch, case)
        loss = loss_of(outputs)
        losses.append(loss.item())
        loss.backward()
    return losses


def check_rows(outputs: dict[str, JaggedTensor], batch: KeyedJaggedTensor, case: Case) -> None:
    """The first lookup gives the initial rows, bit for bit."""
    lists = lists_of(batch)
    for table in case.tables:
        rows = initial_rows(table, 0, ROWS[table])
        rows = rows.bfloat16().float() if case.wire == "bfloat16" else rows
        for feature in FEATURES[table]:
            assert torch.equal(outputs[feature].values(), rows[lists[feature][0]]), f"{case.name}: {feature}"


def run_case(case: Case, group: dist.ProcessGroup, rank: int) -> dict:
    collection = build(case, group)
    losses = train(collection, case, rank, range(NUM_STEPS))
    collection.finish()
    traffic = collection.traffic()
    weights = {table: collection.gather_rows(table, torch.arange(ROWS[table]))[0] for table in case.tables}
    weights = {table: rows.tolist() for table, rows in weights.items()}
    return {"losses": losses, "weights": weights, "traffic": traffic}


def run_lookahead(case: Case, group: dist.ProcessGroup, rank: int) -> dict:
    """Training with windows of four batches and without: losses, held-out rows on the way, weights and state."""
    found, traffic = [], []
    for lookahead in (0, 4):
        collection = build(case, group, lookahead=lookahead)
        found.append(train_ahead(collection, case, rank))
        traffic.append(collection.traffic())
    differ = [place for place, pair in enumerate(zip(*found, strict=True)) if not torch.equal(*pair)]
    return {"differ": differ, "num_tensors": len(found[0]), "traffic": traffic}


def train_ahead(collection: TieredEmbeddingCollection, case: Case, rank: int) -> list[torch.Tensor]:
    """All that must be equal. In the middle of windows: other batches, another rate, a checkpoint saved and loaded."""
    batches = [make_batch(case, step, rank) for step in range(NUM_STEPS)]
    if case.deduplicated:
        batches = [InverseKeyedJaggedTensor.from_kjt(batch, min_factor=1.0) for batch in batches]
    found, num_announced = [], 0
    for step, ids in enumerate(batches):
        while num_announced < min(step + 6, NUM_STEPS):
            collection.prefetch(batches[num_announced])
            num_announced += 1
        loss = loss_of(collection(ids).to_dict())
        found.append(loss.detach())
        loss.backward()
        if step in (1, 6, 7):
            with torch.no_grad():
                found.append(loss_of(collection(make_batch(case, 50 + step, rank)).to_dict()))
        if step == 9:
            collection.set_lr(0.03)
        if step == 14:
            collection.absorb(collection.state())
    for table in case.tables:
        found += flat(collection.gather_rows(table, torch.arange(ROWS[table])))
    return found


def run_checkpoint(groups, rank: int, folder: Path) -> dict:
    """10 steps on 8 ranks in one mix, saved, loaded on 4 ranks in another, 10 more; and the same without a break."""
    import torch.distributed.checkpoint as dcp

    before = Case(ranks=8, ranks_per_node=4, mix="mixed")
    first = build(before, groups["8x4"])
    train(first, before, rank, range(10))
    saved = first.state()
    dcp.save(saved, checkpoint_id=str(folder / "saved"), process_group=groups["8x4"])
    result = {}
    for mix in ("global", "node", "whole"):
        other = build(before, groups["8x4"], mix=mix)
        target = other.state()
        dcp.load(target, checkpoint_id=str(folder / "saved"), process_group=groups["8x4"])
        other.absorb(target)
        result[mix] = 0.0
        for table in before.tables:
            for ours, theirs in zip(
                flat(first.gather_rows(table, torch.arange(ROWS[table]))),
                flat(other.gather_rows(table, torch.arange(ROWS[table]))),
                strict=True,
            ):
                result[mix] = max(result[mix], float((ours - theirs).abs().max()))
    return result


def torchrec_tables(is_trained: bool) -> tuple[dict, torch.Tensor]:
    """The goods as TorchRec shards them by rows: (what a checkpoint keeps of them, this rank's rows)."""
    from torchrec import EmbeddingCollection
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import (
        EmbeddingModuleShardingPlan,
        EnumerableShardingSpec,
        ParameterSharding,
        ShardingPlan,
        ShardMetadata,
    )
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    size = -(-ROWS["goods"] // NUM_RANKS)
    shards = [
        ShardMetadata(
            shard_offsets=[rank * size, 0],
            shard_sizes=[min(size, ROWS["goods"] - rank * size), DIM],
            placement=f"rank:{rank}/cpu",
        )
        for rank in range(NUM_RANKS)
    ]
    plan = EmbeddingModuleShardingPlan()
    plan["goods"] = ParameterSharding(
        sharding_type="row_wise",
        compute_kernel="fused",
        ranks=list(range(NUM_RANKS)),
        sharding_spec=EnumerableShardingSpec(shards),
    )
    tables = [config for config in configs(Case(ranks=8, ranks_per_node=4, mix="mixed")) if config.name == "goods"]
    model = torch.nn.Module()
    model.rows = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1, "eps": 1e-8})
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"rows": plan}),
        sharders=[EmbeddingCollectionSharder()],
    )
    if is_trained:
        ids = torch.arange(12) * (dist.get_rank() + 1) % ROWS["goods"]
        batch = KeyedJaggedTensor(keys=FEATURES["goods"], values=ids, lengths=torch.full((4,), 3))
        found = sharded.module.rows(batch)
        sum((found[name].values() ** 2).sum() for name in FEATURES["goods"]).backward()
    (state,) = sharded.fused_optimizer.state_dict()["state"].values()
    (weight,) = sharded.state_dict().values()
    saved = {"tables": {"goods": weight}, "table_optimiser": {"goods": {"momentum1": state["goods.momentum1"]}}}
    return saved, weight.local_shards()[0].tensor


def run_torchrec(rank: int, folder: Path) -> dict:
    """From TorchRec's row-wise tables into tiers and back, through two checkpoints."""
    import torch.distributed.checkpoint as dcp

    saved, rows = torchrec_tables(is_trained=True)
    dcp.save(saved, checkpoint_id=str(folder / "from_torchrec"))
    case = Case(ranks=8, ranks_per_node=4, mix="mixed")
    tiered = TieredEmbeddingCollection(
        configs(case)[:1],
        tier_maps("mixed", ["goods"]),
        ranks_per_node=4,
        is_pooled=False,
        optimiser=TableOptimiser(kind=case.kind, lr=0.1),
        process_group=dist.group.WORLD,
    )
    target = tiered.state()
    dcp.load(target, checkpoint_id=str(folder / "from_torchrec"))
    tiered.absorb(target)
    dcp.save(tiered.state(), checkpoint_id=str(folder / "from_tiers"))
    again, rows_again = torchrec_tables(is_trained=False)
    dcp.load(again, checkpoint_id=str(folder / "from_tiers"))
    momentum = [own["table_optimiser"]["goods"]["momentum1"].local_shards()[0].tensor for own in (saved, again)]
    weights, state = tiered.gather_rows("goods", torch.arange(ROWS["goods"]))
    first = rank * -(-ROWS["goods"] // NUM_RANKS)
    return {
        "into_tiers": torch.equal(weights[first : first + len(rows)], rows),
        "momentum_into_tiers": torch.equal(state["momentum1"][first : first + len(rows)], momentum[0]),
        "back": torch.equal(rows, rows_again),
        "momentum_back": torch.equal(*momentum),
        "was_trained": bool(momentum[0].any()),
    }


def flat(found):
    return [found[0], *found[1].values()]


def run_delayed(groups, rank: int) -> dict:
    """Replicated rows updated every 4 steps stay the same on all ranks, and nothing is lost at the end."""
    case = Case(ranks=8, ranks_per_node=4, mix="replicated", kind="sgd")
    collection = build(case, groups["8x4"], sync_every=4)
    train(collection, case, rank, range(6))
    weights = [collection.gather_rows(table, torch.arange(ROWS[table]))[0] for table in case.tables]
    return {"sum": [rows.double().sum().item() for rows in weights], "traffic": collection.traffic()}


def run_rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    out = Path(folder)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
        results: dict = {}
        for case in [*CASES, *ROUNDED]:
            group = dist.new_group(list(range(case.ranks)))
            # Subgroups of nodes are made by all ranks of the job: those that take no part make them as well.
            if rank < case.ranks:
                results[case.name] = run_case(case, group, rank)
            else:
                make_subgroups(case)
        for case in AHEAD:
            group = dist.new_group(list(range(case.ranks)))
            if rank < case.ranks:
                results[f"ahead {case.name}"] = run_lookahead(case, group, rank)
        groups = {"8x4": dist.group.WORLD}
        results["checkpoint"] = run_checkpoint(groups, rank, out)
        results["delayed"] = run_delayed(groups, rank)
        results["torchrec"] = run_torchrec(rank, out)
        (out / f"rank-{rank}.json").write_text(json.dumps(results))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (out / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise


def make_subgroups(case: Case) -> None:
    size, per_node = case.ranks, case.ranks_per_node
    for lines in (
        [list(range(first, first + per_node)) for first in range(0, size, per_node)],
        [list(range(local, size, per_node)) for local in range(per_node)],
    ):
        if len(lines) > 1 and len(lines[0]) > 1:
            for line in lines:
                dist.new_group(line)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What eight ranks found in all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recmill.model.stores.tiered.collection", "torchrec.distributed.model_parallel"])
    processes = [context.Process(target=run_rank, args=(rank, port, str(folder))) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    for process in processes:
        if process.is_alive():
            process.kill()
    errors = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    errors.sort(key=lambda text: "Connection" in text)  # a rank that lost its peer is not the one to blame
    assert not errors, errors[0]
    assert [process.exitcode for process in processes] == [0] * NUM_RANKS
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_after_20_steps_are_those_of_whole_tables(case, ranks):
    weights, losses = reference(case)
    found = [results[case.name] for results in ranks[: case.ranks]]
    assert found[0]["losses"][0] != 0.0 or case.has_empty_ranks
    totals = [sum(step) for step in zip(*(own["losses"] for own in found), strict=True)]
    assert totals == pytest.approx(losses, rel=2e-5)
    for table, expected in weights.items():
        ours = torch.tensor(found[0]["weights"][table])
        assert float((ours - expected).abs().max()) < 1e-6, table


@pytest.mark.parametrize("case", [*CASES, *ROUNDED], ids=lambda case: case.name)
def test_all_ranks_and_nodes_hold_the_same_bits(case, ranks):
    for results in ranks[1 : case.ranks]:
        assert results[case.name]["weights"] == ranks[0][case.name]["weights"]


def test_merging_requests_of_a_node_adds_up_in_the_order_of_node_rows(ranks):
    """Bit for bit: both add up the gradients of a node's ranks first, then those of the nodes."""
    merged = next(case for case in CASES if case.merges_nodes)
    node = replace(merged, mix="node", merges_nodes=False)
    assert ranks[0][merged.name]["weights"] == ranks[0][node.name]["weights"]


def test_merging_requests_of_a_node_sends_less_between_nodes(ranks):
    merged = next(case for case in CASES if case.merges_nodes)
    apart = replace(merged, merges_nodes=False)
    for phase in ("ids", "vectors", "gradients"):
        sent = [sum(own[name]["traffic"][f"{phase}/inter"] for own in ranks) for name in (merged.name, apart.name)]
        assert sent[0] < 0.9 * sent[1], (phase, sent)


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_bfloat16_on_the_wire_rounds_and_halves_the_bytes(case, ranks):
    weights, losses = reference(case)
    found = [results[case.name] for results in ranks]
    totals = [sum(step) for step in zip(*(own["losses"] for own in found), strict=True)]
    assert totals == pytest.approx(losses, rel=0.01)
    for table, expected in weights.items():
        difference = (torch.tensor(found[0]["weights"][table]) - expected).abs().max()
        assert 0 < float(difference) < 0.05, table
    # Every id between nodes takes 4 bytes and asks for one row, whose gradient has as many bytes.
    peers = 1 if case.merges_nodes else 4
    sent = {phase: sum(own["traffic"][f"{phase}/inter"] for own in found) for phase in ("ids", "gradients")}
    num_rows = (sent["ids"] - NUM_STEPS * NUM_RANKS * peers * 8) // 4
    assert sent["gradients"] == num_rows * DIM * 2


@pytest.mark.parametrize("case", AHEAD, ids=lambda case: case.name)
def test_looking_ahead_changes_no_bit(case, ranks):
    for results in ranks[: case.ranks]:
        found = results[f"ahead {case.name}"]
        assert found["num_tensors"] > NUM_STEPS
        assert found["differ"] == []


def test_looking_ahead_fetches_fewer_rows(ranks):
    without, ahead = ranks[0][f"ahead {AHEAD[1].name}"]["traffic"]
    assert ahead["vectors/inter"] < without["vectors/inter"]


def test_a_state_loads_into_other_tiers_bit_for_bit(ranks):
    for results in ranks:
        assert results["checkpoint"] == {"global": 0.0, "node": 0.0, "whole": 0.0}


def test_checkpoints_move_between_torchrec_and_tiers_bit_for_bit(ranks):
    for results in ranks:
        assert all(results["torchrec"].values()), results["torchrec"]


def test_delayed_updates_keep_copies_equal_and_lose_nothing(ranks):
    assert all(results["delayed"]["sum"] == ranks[0]["delayed"]["sum"] for results in ranks)
    start = [initial_rows(table, 0, ROWS[table]).double().sum().item() for table in ("goods", "users")]
    assert ranks[0]["delayed"]["sum"] != pytest.approx(start)
    assert not any(phase.startswith("gradients") and count for phase, count in ranks[0]["delayed"]["traffic"].items())


def test_cases_have_different_names():
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(asdict(case) for case in CASES)
