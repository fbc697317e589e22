"""Prints a software bill of materials (CycloneDX 1.6, JSON): Python packages, Debian packages, vendored code.

    python requirements/sbom.py                                       of the environment of this Python
    python requirements/sbom.py --name NAME FOLDER...                 of packages in FOLDER... and of this Debian
    python requirements/sbom.py --name IMAGE --digest ID --of FILE    FILE again, with the image's name and digest

Images write theirs when they are built, to /usr/local/share/recmill/sbom.cdx.json; images/build.sh copies it to
build/sbom. Needs no package, because it runs inside images. The same content gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

DPKG_STATUS = Path("/var/lib/dpkg/status")
OS_RELEASE = Path("/etc/os-release")
VENDORED = {"zstd": ("1.5.7", "BSD-3-Clause")}  # kernels/third_party, compiled into kernels/_cpu
# Names that packages give to licences, as SPDX identifiers.
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT licensed, as found in the LICENSE file": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
}
EXPRESSION = re.compile(r"[A-Za-z0-9.+-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+-]+)*")


def licence_of(package: Distribution) -> str:
    """An SPDX expression, or the package's own words; "" if it says nothing.

    From License-Expression, else from the classifiers, else from the first line of License.
    """
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    prefix = "License :: OSI Approved :: "
    named = [text.removeprefix(prefix) for text in metadata.get_all("Classifier", []) if text.startswith(prefix)]
    text = (metadata.get("License") or "").strip()
    found = named or [text.split("\n")[0][:100]] * bool(text)
    return " AND ".join(SPDX.get(name, name) for name in found)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def python_components(folders: Sequence[str]) -> Iterator[dict[str, Any]]:
    found = {canonical(package.metadata["Name"]): package for package in distributions(path=list(folders))}
    for name, package in sorted(found.items()):
        purl = f"pkg:pypi/{name}@{quote(package.version)}"
        yield component(name, package.version, purl, licence_of(package))
    if "recmill" in found:
        for name, (version, licence) in VENDORED.items():
            yield component(name, version, f"pkg:generic/{name}@{version}", licence)


def debian_components(status: Path = DPKG_STATUS) -> Iterator[dict[str, Any]]:
    if not status.exists():
        return
    release = dict(line.split("=", 1) for line in OS_RELEASE.read_text().splitlines() if "=" in line)
    name, version = (release.get(key, "").strip('"') for key in ("ID", "VERSION_ID"))
    for block in status.read_text(encoding="utf-8").split("\n\n"):
        entry = dict(re.findall(r"^(Package|Status|Version|Architecture): (.+)$", block, re.MULTILINE))
        if entry.get("Status") != "install ok installed":
            continue
        where = f"arch={entry['Architecture']}&distro={name}-{version}"
        purl = f"pkg:deb/{name}/{quote(entry['Package'])}@{quote(entry['Version'])}?{where}"
        yield component(entry["Package"], entry["Version"], purl, "")


def component(name: str, version: str, purl: str, licence: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if EXPRESSION.fullmatch(licence):
        entry["licenses"] = [{"expression": licence}]
    elif licence:
        entry["licenses"] = [{"license": {"name": licence}}]
    return entry


def make_bom(name: str, components: Sequence[dict[str, Any]], *, digest: str | None = None) -> dict[str, Any]:
    kind, _, version = name.partition(":")
    subject: dict[str, Any] = {"type": "container" if "/" in name else "application", "bom-ref": name, "name": kind}
    if version:
        subject["version"] = version
    if digest:
        subject["hashes"] = [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}]
    identity = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([subject, list(components)], sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{identity}",
        "version": 1,
        "metadata": {"component": subject},
        "components": list(components),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="site-packages folders")
    parser.add_argument("--name", default="recmill", help="what the bill is of, e.g. recmill/data:TAG")
    parser.add_argument("--digest", help="sha256 of the image")
    parser.add_argument("--of", type=argparse.FileType(encoding="utf-8"), help="a bill to name, - for standard input")
    arguments = parser.parse_args()
    if arguments.of:
        components = json.load(arguments.of)["components"]
    else:
        components = list(python_components(arguments.folders or sys.path))
        components += debian_components() if arguments.folders else ()
    print(json.dumps(make_bom(arguments.name, components, digest=arguments.digest), indent=1))


if __name__ == "__main__":
    main()
