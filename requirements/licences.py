"""Checks the licences of all packages: `python requirements/licences.py [SBOM...]`, by default of this environment.

With --tools, for programs that the repository is checked with and that nobody gets from us, copyleft is fine, too.
Fails if a package has a licence that is not on the list, or says nothing about its licence, and is no exception below.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from sbom import VENDORED, canonical, licence_of

# Free to use, change and pass on with the software's own licence (Apache-2.0), as code or linked.
ALLOWED = {
    *(
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
    ),
    *("PSF-2.0", "Python-2.0", "Unlicense", "Zlib", "Apache-2.0 WITH LLVM-exception"),
    "MPL-2.0",  # asks for changes of its own files only; we change none
}
TOOLS = {"GPL-3.0-only", "GPL-3.0-or-later", "GPL-3.0", "LGPL-3.0-or-later", "LGPL-2.1", "LGPL-2.1-or-later"}
# Libraries of torch's CUDA build. NVIDIA allows to use them and to pass them on inside applications.
OF_CUDA = re.compile(r"nvidia-|cuda-")
# Package -> (what it says, why it is accepted).
EXCEPTIONS = {
    "psycopg2-binary": (
        "GNU Library or Lesser General Public License (LGPL)",
        "MLflow's driver for PostgreSQL, a module of its own in the image mlflow; nothing of ours is linked with it",
    ),
    "huey": ("", "MIT, in its LICENSE file; a dependency of mlflow"),
    "skops": ("", "MIT, in its LICENSE file; a dependency of mlflow"),
}


def problems(packages: dict[str, str], *, are_tools: bool = False) -> Iterator[str]:
    """One sentence per package (name -> licence) that is not accepted, or whose exception is for another licence."""
    allowed = ALLOWED | TOOLS if are_tools else ALLOWED
    for name, licence in sorted(packages.items()):
        if OF_CUDA.match(name):
            continue
        if name in EXCEPTIONS:
            if licence != EXCEPTIONS[name][0]:
                yield f"{name}: its licence is now {licence!r}, the exception is for {EXCEPTIONS[name][0]!r}"
        elif not is_allowed(licence, allowed):
            yield f"{name}: the licence {licence!r} is not on the list" if licence else f"{name}: names no licence"


def is_allowed(expression: str, allowed: set[str]) -> bool:
    """AND: every part must be on the list; OR, which binds less, lets us choose."""
    choices = re.sub(r"[()]", "", expression).split(" OR ")
    return any(all(part.strip() in allowed for part in choice.split(" AND ")) for choice in choices)


def read_bill(path: Path) -> dict[str, str]:
    found = {}
    for entry in json.loads(path.read_text(encoding="utf-8"))["components"]:
        if not entry["purl"].startswith("pkg:deb/"):  # Debian checks those of its main archive
            named = [one.get("expression") or one["license"]["name"] for one in entry.get("licenses", [])]
            found[entry["name"]] = " AND ".join(named)
    return found


def main() -> None:
    packages = {name: licence for name, (_, licence) in VENDORED.items()}
    paths = [argument for argument in sys.argv[1:] if argument != "--tools"]
    packages |= {} if paths else {canonical(own.metadata["Name"]): licence_of(own) for own in distributions()}
    for path in paths:
        packages |= read_bill(Path(path))
    found = list(problems(packages, are_tools="--tools" in sys.argv))
    print(*found, f"{len(packages)} licences checked, {len(found)} not accepted", sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
