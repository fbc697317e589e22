"""The folders the steps hand to one another: how they are written, loaded and checked.

Every artifact is a folder with one JSON manifest, written last:

    dataset/                        profile/                      plan/
      dataset.json   <- manifest      profile.json                  plan.json
      schema.json                     counts/<table>.parquet        rows/<table>.parquet
      part-00000.parquet ...

The manifest carries `format_version`, `kind`, the `files` with their sizes and hashes, the `content_hash` over all of
them, and the hashes of the artifacts it was made from (`inputs`). A folder appears whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import fsspec

FORMAT_VERSION = 1
LAYOUTS = ("time", "session", "deduplicated")


class InputError(ValueError):
    """Something the user gave us is wrong; the message is one sentence that says what, where and what was expected."""


def is_remote(path: str | Path) -> bool:
    """Whether `path` is a URL for fsspec (s3://..., gs://..., memory://...) and not a local path."""
    return "://" in str(path) and not str(path).startswith("file://")


def join_path(folder: str | Path, name: str) -> str:
    return f"{str(folder).rstrip('/')}/{name}"


def module_name(name: str) -> str:
    """The name a table or feature has as a torch module, where `items` or `a.b` would clash with torch's own names."""
    return "m_" + name.replace("_", "__").replace(".", "_d")


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a local or remote file."""
    try:
        with fsspec.open(str(path), "rt", encoding="utf-8") as file:
            loaded = json.load(file, parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except ValueError as error:  # also what is no UTF-8
        raise InputError(f"{path}: not valid JSON ({error})") from None
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(loaded).__name__}")
    return loaded


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def dump_json(value: Any) -> str:
    """JSON as we write it: stable, readable, refusing NaN (which is not JSON)."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(value: Any) -> str:
    """Content hash of a JSON value."""
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def explain_write_errors(path: str | Path) -> Iterator[None]:
    """Turn what the file system refuses while writing `path` into one sentence."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EACCES: "permission denied",
            errno.EPERM: "permission denied",
            errno.EROFS: "the file system is read-only",
            errno.ENOTDIR: "a parent of it is a file, not a folder",
            errno.EEXIST: "a parent of it is a file, not a folder",
        }
        if error.errno not in reasons:
            raise
        raise InputError(f"{path}: cannot be written: {reasons[error.errno]}") from error


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, never half of it."""
    if is_remote(path):
        with fsspec.open(str(path), "wt", encoding="utf-8") as file:
            file.write(text)
        return
    target = Path(path)
    with explain_write_errors(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def write_folder(out: str | Path, *, manifest_name: str) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends without an error, and vanishes otherwise.

    An `out` that exists is replaced only if it is empty or was written by us before (it holds `manifest_name`).
    A remote `out` is uploaded at the end, the manifest last, so that a reader never finds a manifest without its files.
    """
    refuse_foreign_folder(out, manifest_name)
    if is_remote(out):
        with tempfile.TemporaryDirectory(prefix="recmill-") as scratch:
            folder = Path(scratch)
            yield folder
            _upload(folder, str(out), manifest_name)
        return
    target = Path(out).absolute()
    with explain_write_errors(out):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
        folder.mkdir()
        try:
            yield folder
            _swap_in(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def refuse_foreign_folder(target: str | Path, manifest_name: str) -> None:
    """Raise if `target` holds something that we did not write, so that no user's file is ever overwritten."""
    foreign = f"exists, is not empty and holds no {manifest_name}; give another --out or empty it first"
    if is_remote(target):
        filesystem, root = fsspec.core.url_to_fs(str(target))
        if filesystem.exists(root) and filesystem.ls(root) and not filesystem.exists(join_path(root, manifest_name)):
            raise InputError(f"{target}: {foreign}")
        return
    folder = Path(target).absolute()
    try:
        if folder.is_file():
            raise InputError(f"{folder}: exists and is a file; --out wants a folder")
        if folder.is_dir() and any(folder.iterdir()) and not (folder / manifest_name).exists():
            raise InputError(f"{folder}: {foreign}")
    except PermissionError:
        raise InputError(f"{folder}: cannot be written: permission denied") from None


def _swap_in(folder: Path, target: Path) -> None:
    if target.exists():
        retired = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
        os.rename(target, retired)
        os.rename(folder, target)
        shutil.rmtree(retired)
    else:
        os.rename(folder, target)


def _upload(folder: Path, url: str, manifest_name: str) -> None:
    filesystem, root = fsspec.core.url_to_fs(url)
    if filesystem.exists(root):
        filesystem.rm(root, recursive=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.name == manifest_name):
        destination = join_path(root, path.relative_to(folder).as_posix())
        filesystem.makedirs(destination.rsplit("/", 1)[0], exist_ok=True)
        filesystem.put_file(str(path), destination)


@contextmanager
def local_folder(path: str | Path) -> Iterator[Path]:
    """The folder as a local path: itself, or a temporary download of a remote one."""
    if not is_remote(path):
        yield Path(path)
        return
    filesystem, root = fsspec.core.url_to_fs(str(path))
    with tempfile.TemporaryDirectory(prefix="recmill-") as scratch:
        filesystem.get(join_path(root, ""), scratch + "/", recursive=True)
        yield Path(scratch)


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """What all artifacts share: where it is, what is in it, what it was made from."""

    kind: ClassVar[str]
    manifest_name: ClassVar[str]

    path: str
    content_hash: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)  # name of the input -> its content hash
    body: Mapping[str, Any] = field(default_factory=dict)  # what the kind keeps in its manifest
    files: tuple[Mapping[str, Any], ...] = ()  # {"name", "bytes", "sha256"}

    @classmethod
    def seal(cls, folder: Path, *, body: Mapping[str, Any], inputs: Mapping[str, str] | None = None) -> None:
        """Write the manifest of a finished folder (the last thing before `write_folder` lets it appear)."""
        files = [
            {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": hash_file(path)}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        manifest = {
            "format_version": FORMAT_VERSION,
            "kind": cls.kind,
            "content_hash": hash_json({"body": body, "files": files}),
            "inputs": dict(inputs or {}),
            "files": files,
            **body,
        }
        (folder / cls.manifest_name).write_text(dump_json(manifest), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, *, verify: bool = False) -> Self:
        """Read the manifest and check that it belongs to what is on disk.

        Names and sizes of the files are always checked; `verify` reads them all and checks their hashes too.
        """
        manifest_path = join_path(path, cls.manifest_name)
        if not is_remote(path) and not Path(path).exists():
            raise InputError(f"{path}: no such folder; expected a {cls.kind} (a folder with {cls.manifest_name})")
        if not is_remote(path) and not Path(manifest_path).exists():
            raise InputError(f"{path}: not a {cls.kind}: it holds no {cls.manifest_name}")
        manifest = read_json(manifest_path)
        check_format_version(manifest, manifest_path)
        if manifest.get("kind") != cls.kind:
            raise InputError(f"{manifest_path}: is a {manifest.get('kind')!r}, expected a {cls.kind!r}")
        check_fields(manifest, {"content_hash": str, "inputs": dict, "files": list}, where=manifest_path)
        for number, entry in enumerate(manifest["files"]):
            check_fields(entry, {"name": str, "bytes": int, "sha256": str}, where=f"{manifest_path}: files[{number}]")
        shared = {"format_version", "kind", "content_hash", "inputs", "files"}
        artifact = cls(
            path=str(path),
            content_hash=manifest["content_hash"],
            inputs=manifest["inputs"],
            files=tuple(manifest["files"]),
            body={key: value for key, value in manifest.items() if key not in shared},
        )
        artifact.check_files(verify=verify)
        artifact.validate()
        return artifact

    def check_files(self, *, verify: bool) -> None:
        filesystem, root = fsspec.core.url_to_fs(self.path)
        for entry in self.files:
            name = join_path(root, entry["name"])
            if not filesystem.exists(name):
                raise InputError(f"{self.path}: {entry['name']} is missing though {self.manifest_name} lists it")
            size = filesystem.size(name)
            if size != entry["bytes"]:
                raise InputError(
                    f"{self.path}/{entry['name']}: has {size} bytes, {self.manifest_name} says {entry['bytes']}"
                )
            if verify:
                digest = hashlib.sha256()
                with filesystem.open(name, "rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
                if f"sha256:{digest.hexdigest()}" != entry["sha256"]:
                    raise InputError(
                        f"{self.path}/{entry['name']}: its content is not what {self.manifest_name} recorded"
                    )
        if verify and hash_json({"body": self.body, "files": list(self.files)}) != self.content_hash:
            raise InputError(f"{join_path(self.path, self.manifest_name)}: was changed after it was written")

    def validate(self) -> None:
        """Check what only this kind knows; raise InputError."""

    def require(self, **types: type) -> None:
        """Raise unless the body has these keys with values of these types."""
        check_fields(self.body, types, where=join_path(self.path, self.manifest_name))


def check_fields(value: Any, types: Mapping[str, type], *, where: str) -> None:
    """Raise unless `value` is a JSON object with these keys and types; whole numbers count from 0."""
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected an object, found {value!r}")
    words = {str: "a string", int: "a whole number of at least 0", float: "a number", dict: "an object", list: "a list"}
    for key, wanted in types.items():
        if key not in value:
            raise InputError(f"{where}: {key!r} is missing")
        found = value[key]
        is_fine = isinstance(found, (int, float) if wanted is float else wanted) and not isinstance(found, bool)
        if not is_fine or (wanted is int and found < 0):
            raise InputError(f"{where}: {key!r} is {found!r}, expected {words[wanted]}")


def check_format_version(loaded: Mapping[str, Any], path: str | Path) -> None:
    version = loaded.get("format_version")
    if version != FORMAT_VERSION:
        raise InputError(f"{path}: format_version is {version!r}, this recmill reads {FORMAT_VERSION}")


@dataclass(frozen=True, kw_only=True)
class Dataset(Artifact):
    """Clustered interaction data: Parquet parts, each belonging to one split, with the schema beside them.

    body: layout, num_rows, num_sessions, parts [{file, split, num_rows, num_sessions, bytes, row_group_rows}], source.
    """

    kind: ClassVar[str] = "dataset"
    manifest_name: ClassVar[str] = "dataset.json"

    def validate(self) -> None:
        self.require(layout=str, num_rows=int, num_sessions=int, parts=list)
        where = join_path(self.path, self.manifest_name)
        if self.layout not in LAYOUTS:
            raise InputError(f"{where}: layout is {self.layout!r}, expected one of {', '.join(LAYOUTS)}")
        if self.num_rows == 0:
            raise InputError(f"{self.path}: the dataset is empty (0 rows)")
        part_types = {
            "file": str,
            "split": str,
            "num_rows": int,
            "num_sessions": int,
            "bytes": int,
            "row_group_rows": list,
        }
        for number, part in enumerate(self.parts):
            check_fields(part, part_types, where=f"{where}: parts[{number}]")
            if any(type(rows) is not int or rows < 0 for rows in part["row_group_rows"]):
                raise InputError(f"{where}: parts[{number}]: 'row_group_rows' must list whole numbers")
            if sum(part["row_group_rows"]) != part["num_rows"]:
                raise InputError(
                    f"{where}: parts[{number}]: its row groups do not add up to its {part['num_rows']} rows"
                )
        if sum(part["num_rows"] for part in self.parts) != self.num_rows:
            raise InputError(f"{where}: the parts do not add up to {self.num_rows} rows")

    @property
    def layout(self) -> str:
        return str(self.body["layout"])

    @property
    def num_rows(self) -> int:
        return int(self.body["num_rows"])

    @property
    def num_sessions(self) -> int:
        return int(self.body["num_sessions"])

    @property
    def parts(self) -> list[dict[str, Any]]:
        return list(self.body["parts"])

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(part["split"] for part in self.parts))

    def split_parts(self, split: str) -> list[dict[str, Any]]:
        return [part for part in self.parts if part["split"] == split]

    @property
    def data_bytes(self) -> int:
        return sum(int(part["bytes"]) for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class AccessProfile(Artifact):
    """How often every row of every table is read, and how much the features of a session repeat.

    body: num_samples, tables {name: {num_rows, dim, features, num_accesses, num_distinct, ...}}, duplication
    {feature: {...}}.
    """

    kind: ClassVar[str] = "profile"
    manifest_name: ClassVar[str] = "profile.json"

    def validate(self) -> None:
        self.require(num_samples=int, tables=dict, duplication=dict)
        shape = {"num_rows": int, "dim": int, "features": list, "num_accesses": int, "num_distinct": int}
        for name, table in self.body["tables"].items():
            check_fields(table, shape, where=f"{join_path(self.path, self.manifest_name)}: table {name!r}")


@dataclass(frozen=True, kw_only=True)
class ShardPlan(Artifact):
    """Which rows of which table live where.

    body: topology, memory_budget_bytes, tables {name: {collection (pooled | sequence), placement (torchrec | tiered |
    shared), sharding and shards [{rank, local_rank, offset, size}] in a form TorchRec takes, tiers [{kind, num_rows,
    bytes, predicted_bytes_per_step, predicted_seconds_per_step}], why}}, rank_bytes, solver, objective and bound in
    seconds, prediction, refresh, hot_set, shared, dedup {layout, why, features}, ingest {cores, workers, why}, why,
    profile_hash. `rows/<table>.parquet` gives every row its tier (a place in `tiers`) and slot.
    """

    kind: ClassVar[str] = "plan"
    manifest_name: ClassVar[str] = "plan.json"

    def validate(self) -> None:
        self.require(topology=dict, tables=dict)

    @property
    def world_size(self) -> int:
        return int(self.body["topology"]["nodes"]) * int(self.body["topology"]["ranks_per_node"])

    def to_torchrec(self, device: str = "cpu", *, distinct: frozenset[str] = frozenset()) -> Any:
        """The plan as TorchRec's ShardingPlan, by the paths of our model's collections.

        `distinct` names the pooled tables that this run looks up over deduplicated rows.
        """
        from torchrec.distributed.types import (
            EmbeddingModuleShardingPlan,
            EnumerableShardingSpec,
            ParameterSharding,
            ShardingPlan,
            ShardMetadata,
        )

        def place(shard: Mapping[str, Any]) -> str:
            local = device if device == "cpu" else f"{device}:{shard['local_rank']}"
            return f"rank:{shard['rank']}/{local}"

        modules: dict[str, Any] = {}
        for name, table in self.body["tables"].items():
            shards = [
                ShardMetadata(
                    shard_offsets=list(shard["offset"]),
                    shard_sizes=list(shard["size"]),
                    placement=place(shard),
                )
                for shard in table["shards"]
            ]
            collection = "distinct" if name in distinct else table["collection"]
            module = modules.setdefault(f"embeddings.{collection}", EmbeddingModuleShardingPlan())
            module[module_name(name)] = ParameterSharding(
                sharding_type=table["sharding"],
                compute_kernel="fused",
                ranks=[shard["rank"] for shard in table["shards"]],
                sharding_spec=EnumerableShardingSpec(shards),
            )
        return ShardingPlan(plan=modules)


@dataclass(frozen=True, kw_only=True)
class WorkerAllocation(Artifact):
    """How many workers each ingestion stage gets. body: stages, rows_per_s, memory_bytes, baseline."""

    kind: ClassVar[str] = "allocation"
    manifest_name: ClassVar[str] = "allocation.json"

    def validate(self) -> None:
        self.require(stages=dict, rows_per_s=float, memory_bytes=float)
        for stage, workers in self.body["stages"].items():
            if type(workers) is not int or workers < 1:
                raise InputError(
                    f"{self.path}/allocation.json: stage {stage!r} has {workers!r} workers, expected at least 1"
                )

    @property
    def stages(self) -> dict[str, int]:
        return dict(self.body["stages"])


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Artifact):
    """A trained model: logical tables in row order, dense weights, optimiser state, ingest position.

    body: step, config, schema, world_size, metrics.
    """

    kind: ClassVar[str] = "checkpoint"
    manifest_name: ClassVar[str] = "checkpoint.json"

    def validate(self) -> None:
        self.require(step=int, config=dict, schema=dict)
