"""Steps beside the main line: closing the MLflow run, merging partitions, planning variants, comparing runs."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
from kfp import dsl

from components.close_run.closing import end_run
from components.compare_runs.folders import order_runs, result_rows
from components.merge_data.merging import merge_datasets
from components.summaries import MAX_ROWS, access_rows, comparison_rows, part_rows, tier_rows, write_table
from components.train_model.planning import plan_apart
from recmill.artifacts import Dataset, InputError, dump_record
from recmill.data.cluster import cluster_sessions
from recmill.data.sources import make_raw_log
from recmill.planning.planner import Topology, plan_shards
from recmill.profiling.access import profile_access
from recmill.tracking import open_run
from recmill.training.preload import preloaded_ranks


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


# What the exit task is told by Kubeflow Pipelines 2.17, what the steps of the run recorded, and how the run ended.
ANSWERS = {
    "success": ("COMPLETE", {"train_model": "FINISHED", "report": "FINISHED"}, "FINISHED"),
    "failure": ("FAILED", {"generate_data": "FINISHED", "train_model": "FAILED"}, "FAILED"),
    "terminated": ("RUNNING", {"generate_data": "FINISHED", "train_model": "RUNNING"}, "KILLED"),
    "cached": ("RUNNING", {"open_run": "FINISHED"}, "FINISHED"),
    "cached, as another version may say": ("COMPLETE", {"open_run": "FINISHED"}, "FINISHED"),
    "terminated at once": ("RUNNING", {"open_run": "RUNNING"}, "KILLED"),
    "older server": ("CANCELLED", {"train_model": "RUNNING"}, "KILLED"),
}


def leave_states(folder: Path, states: dict[str, str], pipeline_run_id: str) -> None:
    (folder / "states").mkdir(exist_ok=True)
    for at, (step, state) in enumerate(states.items()):
        error = "/runs/nowhere: no such file" if state == "FAILED" else ""
        record = {"step": step, "state": state, "error": error, "pipeline_run_id": pipeline_run_id, "at": float(at)}
        (folder / "states" / f"{step}.json").write_text(dump_record(record))


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_mlflow_run_ends_as_the_pipeline_did(server: str, tmp_path: Path, answer: str) -> None:
    told, states, status = ANSWERS[answer]
    run_id = f"kfp-{answer}"
    parent = open_run(tracking_uri=server, name=run_id, pipeline_run_id=run_id, url="")
    client = mlflow.MlflowClient(server)
    orphan = client.create_run(parent.experiment_id, tags={"mlflow.parentRunId": parent.run_id})
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "train_model.json").write_text(dump_record({"metrics": {"auc": 0.7, "other": 1}}))
    (tmp_path / "steps" / "report.json").write_text(dump_record({"metrics": {}}))
    leave_states(tmp_path, {"train_model": "FINISHED"}, "an earlier run")
    leave_states(tmp_path, states, run_id)
    found = end_run(
        state=told,
        workdir=str(tmp_path),
        tracking_uri=server,
        pipeline_run_id=run_id,
        run_name="recmill tiny, 18 November",
    )
    assert found.run_id == parent.run_id
    ended = client.get_run(parent.run_id)
    assert ended.info.status == status
    assert ended.info.run_name == "recmill tiny, 18 November"
    assert ended.data.metrics == {"auc": 0.7}
    reason = "train_model: /runs/nowhere: no such file" if answer == "failure" else None
    assert ended.data.tags.get("recmill.failure") == reason
    assert ended.data.tags.get("recmill.cached") == ("true" if answer.startswith("cached") else None)
    assert client.get_run(orphan.info.run_id).info.status != "RUNNING"


def test_without_a_server_there_is_nothing_to_close(tmp_path: Path) -> None:
    found = end_run(state="FAILED", workdir=str(tmp_path), tracking_uri="", pipeline_run_id="x")
    assert found.run_id == ""


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two datasets of different sessions, as two days of a log would give."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("partitions")
    paths = []
    for day in range(2):
        raw = make_raw_log("tiny", out=str(root / f"raw-{day}"), overrides={"sessions": "60", "seed": str(day)})
        for file in Path(raw).glob("*.parquet"):
            table = pq.read_table(file)
            moved = pc.add(table["session_id"], day * 1_000_000)
            pq.write_table(table.set_column(table.column_names.index("session_id"), "session_id", moved), file)
        paths.append(str(root / f"dataset-{day}"))
        cluster_sessions(str(root / f"raw-{day}"), out=paths[-1], eval_fraction=0.2)
    return paths


def test_merged_partitions_are_one_dataset_with_all_their_rows(partitions: list[str], tmp_path: Path) -> None:
    parts = [Dataset.load(path) for path in partitions]
    merged = merge_datasets(partitions, out=tmp_path / "dataset")
    assert merged.num_rows == sum(part.num_rows for part in parts)
    assert merged.num_sessions == sum(part.num_sessions for part in parts)
    assert list(merged.splits) == ["train", "test"]
    assert [part.split for part in merged.parts] == ["train", "train", "test", "test"]
    assert set(merged.inputs.values()) == {part.content_hash for part in parts}


def test_a_session_in_two_partitions_is_refused(partitions: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"session \d+ is in an earlier partition"):
        merge_datasets([partitions[0], partitions[0]], out=tmp_path / "dataset")


def test_a_plan_is_made_apart_and_its_errors_arrive(partitions: list[str], tmp_path: Path) -> None:
    profile = profile_access(partitions[0], out=tmp_path / "profile").path
    told: list[tuple[str, int, int]] = []
    shape = {"topology": Topology(nodes=1, ranks_per_node=2, device="cpu"), "strategy": "torchrec", "batch_size": 256}
    apart = {"threads": 1, "progress": lambda *progress: told.append(progress), **shape}
    with preloaded_ranks(1):  # both processes are forks of one that loads TorchRec
        made = plan_apart(profile, out=str(tmp_path / "made"), memory_budget_bytes=2**30, **apart)
        with pytest.raises(InputError, match="the tables need 1,319,200 B"):
            plan_apart(profile, out=str(tmp_path / "small"), memory_budget_bytes=1_000, **apart)
    assert (made.strategy, made.topology, made.batch_size) == ("torchrec", shape["topology"], 256)
    assert {table.placement for table in made.tables.values()} == {"torchrec"}
    assert ("plan tables", len(made.tables), len(made.tables)) in told
    assert not (tmp_path / "small").exists()


def test_runs_are_ordered_as_the_variants_are() -> None:
    paths = [f"/runs/ablations/{name}/train/checkpoint" for name in ("+tiers", "own", "baseline", "all", "+dedup")]
    assert [run.rsplit("/", 1)[1] for run in order_runs(paths)] == ["baseline", "+dedup", "+tiers", "all", "own"]
    with pytest.raises(InputError, match="expected the checkpoint of a run"):
        order_runs(["/runs/x/model"])


def test_the_comparison_is_against_the_first_run(tmp_path: Path) -> None:
    for name, speed in (("baseline", 100.0), ("dedup", 250.0)):
        folder = tmp_path / name / "train"
        folder.mkdir(parents=True)
        result = {
            "samples_per_s": speed,
            "metrics": {"auc": 0.7, "log_loss": 0.5},
            "peak_memory_bytes": 1,
            "model": {"embedding_bytes": 2},
        }
        (folder / "result.json").write_text(dump_record(result))
    rows = result_rows([str(tmp_path / "baseline"), str(tmp_path / "dedup")])
    assert rows["dedup"]["speedup"] == 2.5
    assert [row["speed"] for row in comparison_rows(rows)] == ["1.00x", "2.50x"]


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """The titles and the cells of the Markdown table in a file."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    titles, _, *cells = ([text.strip() for text in line.strip("|").split("|")] for line in lines)
    return titles, cells


def test_tables_in_markdown_are_narrow_with_plain_titles(partitions: list[str], tmp_path: Path) -> None:
    dataset = Dataset.load(partitions[0])
    profile = profile_access(partitions[0], out=tmp_path / "profile")
    topology = Topology(nodes=1, ranks_per_node=2)
    plan = plan_shards(tmp_path / "profile", out=tmp_path / "plan", topology=topology, memory_budget_bytes=2**30)
    for rows in (part_rows(dataset), access_rows(profile), tier_rows(plan)):
        artifact = dsl.Markdown(uri=str(tmp_path / "table.md"))
        write_table(artifact, "Title", rows)
        titles, cells = read_table(tmp_path / "table.md")
        assert len(titles) <= 5
        assert not any("_" in title for title in titles)
        assert len(cells) == len(rows)
        for row in cells:
            assert len(row) == len(titles)
            assert all(text.startswith("`") for text in row if "_" in text)  # else it may become italics
    assert [row["rows"] for row in part_rows(dataset)][-1] == f"{dataset.num_rows:,}"


def test_a_long_table_shows_its_first_rows(tmp_path: Path) -> None:
    write_table(dsl.Markdown(uri=str(tmp_path / "table.md")), "Title", [{"a": str(n)} for n in range(MAX_ROWS + 3)])
    assert (tmp_path / "table.md").read_text().endswith(f"| {MAX_ROWS - 1} |\n\nand 3 more\n")
