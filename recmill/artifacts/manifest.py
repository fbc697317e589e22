"""What all artifacts share: a folder with a JSON manifest of its files, their hashes and its inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import fsspec

from recmill.artifacts.files import InputError, dump_json, hash_file, hash_json, is_remote, join_path, read_json

FORMAT_VERSION = 1


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
