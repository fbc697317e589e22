"""Artifacts appear whole or not at all, and a manifest that was tampered with raises InputError."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.artifacts import (
    AccessProfile,
    Artifact,
    Checkpoint,
    Dataset,
    InputError,
    ShardPlan,
    WorkerAllocation,
    dump_json,
    dump_record,
    held_folder,
    local_folder,
    read_checked_json,
    refuse_foreign_folder,
    write_folder,
    write_text_atomically,
)
from recmill.artifacts.allocation import Throughput, TuningStep
from recmill.artifacts.dataset import DatasetPart
from recmill.artifacts.manifest import FileEntry
from recmill.artifacts.plan import IngestPlan, Shard, SharedParameters, SharedTablePlan, TablePlan
from recmill.artifacts.profile import CurvePoint, Drift, FeatureDuplication, TableProfile
from recmill.artifacts.topology import Topology

PART = DatasetPart(file="part-00000.parquet", split="train", num_rows=5, num_sessions=2, bytes=4, row_group_rows=(3, 2))
TABLE = TableProfile(
    num_rows=10,
    dim=4,
    features=("a",),
    num_accesses=7,
    num_distinct=3,
    zipf_exponent=None,
    drift=Drift(num_earlier=3, num_later=4, top_share={}),
    top_share={"0.1": 0.5},
    curve=(CurvePoint(rows=1, share=0.5),),
    distinct_per_step={64: 2.5},
)
DUPLICATION = FeatureDuplication(mean_length=1.0, same_as_previous=0.5, shifted_by_one=None)
THROUGHPUT = Throughput(stages={"read": 1, "batch": 1}, rows_per_s=8.5, memory_bytes=90)
INPUTS = {"raw": "sha256:0"}
EXAMPLES: dict[type[Artifact], Artifact] = {
    Dataset: Dataset(
        layout="session", num_rows=5, num_sessions=2, parts=(PART,), source={"name": "raw"}, inputs=INPUTS
    ),
    AccessProfile: AccessProfile(
        num_samples=5,
        split="train",
        layout="session",
        confidence=None,
        tables={"a": TABLE},
        duplication={"a": DUPLICATION},
        inputs=INPUTS,
    ),
    ShardPlan: ShardPlan(
        topology=Topology(nodes=1, ranks_per_node=2),
        tables={
            "a": TablePlan(
                collection="pooled",
                placement="shared",
                sharding="table_wise",
                shards=(Shard(rank=1, local_rank=1, offset=(0, 0), size=(10, 4)),),
                why="small",
            )
        },
        solver="none",
        objective=0.5,
        bound=None,
        prediction=None,
        refresh=None,
        hot_set=None,
        shared=SharedParameters(
            array_bytes=64,
            block_size=4,
            mapping="robe",
            seed=0,
            exact_width=2,
            tables={"a": SharedTablePlan(kind="both", exact_rows=3)},
        ),
        ingest=IngestPlan(cores=2, workers={"read": 1}, why="guess"),
        why=("because",),
        inputs=INPUTS,
    ),
    WorkerAllocation: WorkerAllocation(
        stages={"read": 1, "batch": 2},
        rows_per_s=10.5,
        memory_bytes=100,
        baseline=THROUGHPUT,
        candidates={"agent": THROUGHPUT},
        agent=None,
        history=(TuningStep(t=0.5, workers={"read": 1}, rows_per_s=8.0, stall=0.1),),
        inputs=INPUTS,
    ),
    Checkpoint: Checkpoint(
        step=3, config={"lr": 0.1}, schema={}, sharing=None, world_size=1, run={"epoch": 1}, inputs=INPUTS
    ),
}
KINDS = list(EXAMPLES)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def write(kind: type[Artifact], out: str | Path, content: bytes = b"data") -> None:
    with write_folder(out, manifest_name=kind.manifest_name) as folder:
        (folder / "part-00000.parquet").write_bytes(content)
        (folder / "rows").mkdir()
        (folder / "rows" / "a.bin").write_bytes(b"rows")
        EXAMPLES[kind].seal(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remote", [False, True])
def test_what_was_sealed_is_loaded(tmp_path: Path, kind: type[Artifact], remote: bool) -> None:
    out = f"memory://artifacts-test/{kind.kind}" if remote else str(tmp_path / "out")
    write(kind, out)
    loaded = kind.load(out, verify=True)
    assert replace(loaded, path="", content_hash="", files=()) == EXAMPLES[kind]
    assert [entry.name for entry in loaded.files] == ["part-00000.parquet", "rows/a.bin"]
    with local_folder(out) as folder:
        assert (folder / "rows" / "a.bin").read_bytes() == b"rows"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_corrupted_manifest_raises_input_error(
    tmp_path_factory: pytest.TempPathFactory, kind: type[Artifact], data: st.DataObject
) -> None:
    """One value changed or removed anywhere: InputError, and nothing but InputError."""
    out = tmp_path_factory.mktemp("artifact") / "out"
    write(kind, out)
    path = out / kind.manifest_name
    manifest = json.loads(path.read_text())
    original = copy.deepcopy(manifest)
    corrupt(manifest, data)
    path.write_text(json.dumps(manifest))
    manifest = {key: value for key, value in manifest.items() if key != "manifest_hash" or value is not None}
    older = {key: value for key, value in original.items() if key != "manifest_hash"}
    if json.dumps(manifest, sort_keys=True) in [json.dumps(same, sort_keys=True) for same in (original, older)]:
        kind.load(out)
    else:
        with pytest.raises(InputError) as raised:
            kind.load(out)
        assert "\n" not in str(raised.value)


def corrupt(value: Any, data: st.DataObject) -> None:
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(value[key], dict | list) and value[key] and data.draw(st.booleans()):
            value = value[key]
            continue
        if data.draw(st.booleans()):
            value[key] = data.draw(json_values)
        else:
            del value[key]
        return


@settings(max_examples=40, deadline=None)
@given(cut=st.floats(0, 0.999))
def test_a_manifest_cut_short_raises_input_error(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    out = tmp_path_factory.mktemp("artifact") / "out"
    write(Dataset, out)
    path = out / "dataset.json"
    text = path.read_text().rstrip()
    path.write_text(text[: int(cut * len(text))])
    with pytest.raises(InputError, match=r"dataset\.json: not valid JSON"):
        Dataset.load(out)


def stop_writing(out: str | Path, *, after: int) -> None:
    """Write a dataset and fail after so many steps."""
    with write_folder(out, manifest_name="dataset.json") as folder:
        if after >= 1:
            (folder / "part-00000.parquet").write_bytes(b"half")
        if after >= 2:
            EXAMPLES[Dataset].seal(folder)
        raise RuntimeError("stopped")


@pytest.mark.parametrize("after", range(3))
def test_a_folder_that_is_not_finished_never_appears(tmp_path: Path, after: int) -> None:
    write(Dataset, tmp_path / "old")
    before = Dataset.load(tmp_path / "old").content_hash
    for out in (tmp_path / "new", tmp_path / "old"):
        with pytest.raises(RuntimeError, match="stopped"):
            stop_writing(out, after=after)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert Dataset.load(tmp_path / "old", verify=True).content_hash == before


@pytest.mark.parametrize("after", range(3))
def test_nothing_is_uploaded_from_a_folder_that_is_not_finished(after: int) -> None:
    with pytest.raises(RuntimeError, match="stopped"):
        stop_writing("memory://artifacts-half/out", after=after)
    assert not fsspec.filesystem("memory").exists("/artifacts-half/out")


def test_a_rerun_replaces_all_files(tmp_path: Path) -> None:
    for out in (str(tmp_path / "out"), "memory://artifacts-rerun/out"):
        with write_folder(out, manifest_name="dataset.json") as folder:
            (folder / "part-00007.parquet").write_bytes(b"old")
            EXAMPLES[Dataset].seal(folder)
        write(Dataset, out)
        filesystem, root = fsspec.core.url_to_fs(out)
        names = sorted(Path(name).name for name in filesystem.find(root))
        assert names == ["a.bin", "dataset.json", "part-00000.parquet"]


@pytest.mark.parametrize("remote", [False, True])
def test_foreign_folders_are_refused_before_any_work(tmp_path: Path, remote: bool) -> None:
    out = "memory://artifacts-foreign/mine" if remote else str(tmp_path / "mine")
    filesystem, root = fsspec.core.url_to_fs(out)
    filesystem.makedirs(root, exist_ok=True)
    filesystem.pipe_file(f"{root}/notes.txt", b"mine")
    with pytest.raises(InputError, match=r"holds no dataset\.json"), write_folder(out, manifest_name="dataset.json"):
        pytest.fail("the folder must not be handed out")
    assert filesystem.cat_file(f"{root}/notes.txt") == b"mine"
    write(Dataset, tmp_path / "dataset")
    with pytest.raises(InputError, match=r"holds no profile\.json"):
        write(AccessProfile, tmp_path / "dataset")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        write(Dataset, tmp_path / "file")
    with pytest.raises(InputError, match="a parent of it is a file"):
        write(Dataset, tmp_path / "file" / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(InputError, match="cannot be written: permission denied"):
        write(Dataset, tmp_path / "locked" / "out")


def test_changed_missing_and_swapped_files_are_found(tmp_path: Path) -> None:
    write(Dataset, tmp_path / "out")
    part = tmp_path / "out" / "part-00000.parquet"
    part.write_bytes(b"atad")
    with pytest.raises(InputError, match="its content is not what"):
        Dataset.load(tmp_path / "out")
    part.write_bytes(b"dat")
    with pytest.raises(InputError, match=r"has 3 bytes, dataset\.json says 4"):
        Dataset.load(tmp_path / "out")
    part.unlink()
    with pytest.raises(InputError, match=r"part-00000\.parquet is missing"):
        Dataset.load(tmp_path / "out")


def test_what_readers_check_is_read_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (replace(EXAMPLES[Dataset].parts[0], footer_sha256="sha256:0"),)
    with write_folder(tmp_path / "out", manifest_name="dataset.json") as folder:
        (folder / parts[0].file).write_bytes(b"data")
        replace(EXAMPLES[Dataset], parts=parts).seal(folder)
    (tmp_path / "out" / parts[0].file).write_bytes(b"atad")
    Dataset.load(tmp_path / "out")
    with pytest.raises(InputError, match="its content is not what"):
        Dataset.load(tmp_path / "out", verify=True)
    monkeypatch.setenv("RECMILL_VERIFY", "full")
    with pytest.raises(InputError, match="its content is not what"):
        Dataset.load(tmp_path / "out")


def test_a_manifest_may_not_name_files_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"data")
    for name in ("../mine", "rows/../../mine", str(tmp_path / "mine")):
        entry = FileEntry(name=name, bytes=4, sha256="sha256:0")
        listed = replace(EXAMPLES[Dataset], path=str(tmp_path / "out"), files=(entry,))
        with pytest.raises(InputError, match="outside the folder"):
            listed.check_files(verify=True)


def test_records_are_read_with_their_checksum(tmp_path: Path) -> None:
    path, record = tmp_path / "run.json", {"seconds": 1.5, "steps": {3: "a"}}
    path.write_text(dump_record(record))
    assert read_checked_json(path) == {"seconds": 1.5, "steps": {"3": "a"}}
    path.write_text(dump_record(record).replace("1.5", "1.6"))
    with pytest.raises(InputError, match=r"run\.json: was changed"):
        read_checked_json(path)
    path.write_text(dump_json(record))
    with pytest.raises(InputError, match=r"run\.json: has no checksum"):
        read_checked_json(path)


def test_other_kinds_and_versions_are_refused(tmp_path: Path) -> None:
    write(Dataset, tmp_path / "out")
    with pytest.raises(InputError, match=r"not a profile: it holds no profile\.json"):
        AccessProfile.load(tmp_path / "out")
    with pytest.raises(InputError, match="no such folder; expected a dataset"):
        Dataset.load(tmp_path / "nowhere")
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    (tmp_path / "out" / "profile.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="is a 'dataset', expected a 'profile'"):
        AccessProfile.load(tmp_path / "out")
    (tmp_path / "out" / "dataset.json").write_text(json.dumps({**manifest, "format_version": 2}))
    with pytest.raises(InputError, match="format_version is 2, this recmill reads 1"):
        Dataset.load(tmp_path / "out")


def test_equal_content_has_equal_hashes(tmp_path: Path) -> None:
    write(Dataset, tmp_path / "a")
    write(Dataset, tmp_path / "b")
    write(Dataset, tmp_path / "c", b"atad")
    a, b, c = (Dataset.load(tmp_path / name).content_hash for name in "abc")
    assert a == b != c


def test_json_is_stable_and_refuses_nan() -> None:
    assert dump_json({"b": 1, "a": 2}) == dump_json({"a": 2, "b": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_json({"loss": float("nan")})


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "deep" / "x.json", "one")
    write_text_atomically(tmp_path / "deep" / "x.json", "two")
    assert (tmp_path / "deep" / "x.json").read_text() == "two"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]


def test_what_a_killed_command_left_is_removed_and_what_a_running_one_holds_is_not(tmp_path: Path) -> None:
    """As after SIGKILL: the lock of the folder is gone, the folder is not."""
    left, foreign = tmp_path / ".out.0123abcd.tmp", tmp_path / ".other.0123abcd.tmp"
    for folder in (left, foreign):
        (folder / "half").mkdir(parents=True)
    (tmp_path / ".out.json.0123abcd.tmp").write_text("half")
    with held_folder(tmp_path / "out") as running:
        assert not left.exists()
        with write_folder(tmp_path / "out", manifest_name="a.json") as folder:
            assert running.exists()
            (folder / "a.json").write_text("{}")
    write_text_atomically(tmp_path / "out.json", "{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [foreign.name, "out", "out.json"]


def test_a_folder_that_was_only_locked_is_not_foreign(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / ".job.json.0123abcd.tmp").touch()
    refuse_foreign_folder(tmp_path / "run", "job.json")
    (tmp_path / "run" / ".gitignore").touch()
    with pytest.raises(InputError, match="is not empty"):
        refuse_foreign_folder(tmp_path / "run", "job.json")


def test_an_upload_that_was_interrupted_is_done_again() -> None:
    url = "memory://interrupted/out"

    def write() -> None:
        with write_folder(url, manifest_name="a.json") as folder:
            (folder / "a.json").write_text("{}")

    interrupted = mock.patch("recmill.artifacts.folders.upload_folder", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        write()
    write()
    assert [path.rsplit("/", 1)[-1] for path in fsspec.filesystem("memory").ls("/interrupted/out", detail=False)] == [
        "a.json"
    ]
