"""Artifacts that somebody made up: values of their JSON, Parquet and headers replaced, and all hashes made to fit.

A command refuses one in a sentence, or takes it: it is a bad model then, not a crash. No traceback, no signal, no file
outside the artifact is read.

python -m tests.damage.hostile --cases 300 --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts.files import dump_record, hash_file
from recmill.artifacts.manifest import sign_manifest
from recmill.data.vocabulary import MAP_FILE
from tests.damage.campaign import SLOW, Case
from tests.damage.workspace import Ended, Workspace, run_module

MEMORY_BYTES = 12 * 2**30  # of addresses; what claims more is told that there is not enough
LIMIT_S = 120
OUTSIDE = ("../outside", "/etc/hostname")
SUFFIXES = (".json", ".parquet", ".safetensors")
VALUES: tuple[Any, ...] = (
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    2**70,
    10**400,
    -1.5,
    1e308,
    "",
    "x",
    *OUTSIDE,
    "a" * 5000,
    "\n\x1b[2J",
)
VALUES += (None, True, [], {}, [[]], {"a": [1]}, [-1, 2**70])


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, own in entries:
        yield (*at, key)
        yield from places(own, (*at, key))


def rewrite(document: Any, draw: random.Random) -> str:
    """Replace or remove a random value; says which."""
    found = list(places(document))
    by_name = sorted({tuple(key for key in at if isinstance(key, str)) for at in found}, key=str)
    name = draw.choice(by_name)  # every name is as likely, however many entries a list has
    *parents, last = draw.choice([at for at in found if tuple(key for key in at if isinstance(key, str)) == name])
    holder = document
    for key in parents:
        holder = holder[key]
    if draw.random() < 0.1:
        del holder[last]
        return f"remove {'.'.join(map(str, (*parents, last)))}"
    holder[last] = draw.choice(VALUES)
    return f"{'.'.join(map(str, (*parents, last)))} = {str(holder[last])[:30]!r}"


def rewrite_file(file: Path, draw: random.Random) -> str:
    """Change a JSON document, the header of a file of tensors, or a value of a Parquet file."""
    if file.suffix == ".parquet":
        return rewrite_parquet(file, draw)
    if file.suffix == ".safetensors":
        data = file.read_bytes()
        body = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:body])
        what = rewrite(header, draw)
        text = json.dumps(header).encode().ljust(body - 8)  # the tensors stay where they are, if there is room
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[body:])
        return what
    document = json.loads(file.read_text())
    what = rewrite(document, draw)
    if "checksum" in document:
        file.write_text(dump_record(document))
    else:
        file.write_text(json.dumps(sign_manifest(document) if "content_hash" in document else document, sort_keys=True))
    return what


def rewrite_parquet(file: Path, draw: random.Random) -> str:
    table = pq.read_table(file)
    column = draw.randrange(table.num_columns)
    values, kind = table.column(column).to_pylist(), table.schema.types[column]
    if pa.types.is_list(kind):
        kind = pa.list_(kind.value_type)  # whose values may be missing, too
    at = draw.randrange(max(1, len(values)))
    hostile = draw.choice([-1, 0, 2**31 - 1, 2**31, 2**62, None])
    if draw.random() < 0.2 or not values:
        changed = table.drop_columns(table.column_names[column])
        what = f"remove column {table.column_names[column]}"
    else:
        values[at] = [hostile] if pa.types.is_list(kind) else hostile
        try:
            own = pa.array(values, kind)
        except (pa.ArrowException, OverflowError, TypeError):  # the type has no such value: another type
            own = pa.array([str(value) for value in values])
        columns = [own if place == column else kept for place, kept in enumerate(table.columns)]
        changed = pa.Table.from_arrays(columns, names=table.column_names)  # any value may be missing
        what = f"{table.column_names[column]}[{at}] = {hostile}"
    pq.write_table(changed, file, write_page_checksum=True, compression="zstd")
    return what


def seal(file: Path, root: Path) -> None:
    """Make the hashes fit of the manifests that list a file, and of those that list these."""
    for folder in [folder for folder in file.parents if folder == root or root in folder.parents]:
        for other in folder.glob("*.json"):
            manifest, name = json.loads(other.read_text()), file.relative_to(folder).as_posix()
            if other == file or not isinstance(manifest, dict):
                continue
            entries = manifest.get("files")
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict) and entry.get("name") == name:
                    entry |= {"bytes": file.stat().st_size, "sha256": hash_file(file)}
                    other.write_text(json.dumps(sign_manifest(manifest), sort_keys=True))
                    seal(other, root)
    known = file.with_name(MAP_FILE)
    if file.suffix == ".parquet" and known.exists():
        tables = json.loads(known.read_text())
        tables["tables"][file.stem]["sha256"] = hash_file(file)
        known.write_text(dump_record(tables))
        seal(known, root)


def run_apart(work: Workspace, name: str) -> tuple[str, str]:
    """How a command ends in a process of its own, with little memory and time: (outcome, what it said)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(LIMIT_S)
        try:
            ended = work.run(name)
        except BaseException as error:  # noqa: BLE001  whatever the command let through
            import traceback

            ended = Ended(1, said="".join(traceback.format_exception(error))[-3000:])
        os.write(writer, json.dumps([ended.code, ended.said]).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status or not told:
        return f"signal {-status}", ""
    code, said = json.loads(told)
    if code == 0:
        return "taken", ""
    return ("refused" if code == 2 and said and "\n" not in said else f"exit {code}"), said


def run_campaign(work: Workspace, num_cases: int, *, seed: int, commands: Sequence[str] = ()) -> Iterator[Case]:
    draw, names = random.Random(seed), [name for name in commands or work.commands if name not in SLOW]
    for number in range(num_cases):
        name = names[number % len(names)]
        folder = draw.choice(work.commands[name][0])
        files = [file for file in work.all_files(folder) if file.suffix in SUFFIXES]
        suffix = draw.choice(SUFFIXES)
        file = draw.choice([file for file in files if file.suffix == suffix] or files)
        kept = {path: path.read_bytes() for path in files}
        try:
            what = rewrite_file(file, draw)
            seal(file, work.folder / folder)
            outcome, said = run_apart(work, name)
        finally:
            for path, content in kept.items():
                path.write_bytes(content)
        if outcome != "refused" and any(place in what for place in OUTSIDE) and "hostname" in said:
            outcome = "read outside"
        yield Case(name, folder, str(file.relative_to(work.folder)), what, outcome, said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commands", nargs="*", default=[])
    parser.add_argument("--verbose", action="store_true", help="Print every case, not only the wrong ones.")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="recmill-hostile-") as folder:
        work = Workspace(Path(os.environ.get("RECMILL_WORKSPACE", folder)))
        if not (work.folder / "report").exists():  # apart: after a fork, libgomp waits for threads that are not there
            run_module("tests.damage.workspace", str(work.folder))
        for case in run_campaign(work, options.cases, seed=options.seed, commands=options.commands):
            is_fine = case.outcome in ("refused", "taken")
            counts[case.outcome] += 1
            if options.verbose or not is_fine:
                print(f"{case.command}: {case.file}: {case.kind}: {case.outcome}\n{case.said}\n", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return 0 if set(counts) <= {"refused", "taken"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
