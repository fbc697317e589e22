"""`recmill doctor`: what is installed, what is missing and the command that installs it.

Imports nothing that may be missing: it must run in an environment that holds only the wheel and its dependencies.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from recmill.cli.output import emit, json_option
from recmill.sizes import format_bytes

PACKAGES = ("torchrec", "kfp", "mlflow", "duckdb", "ibis-framework", "pyarrow", "stable-baselines3")
SERVER_PACKAGES = ("kserve", "pyarrow", "numpy", "click", "fsspec")
CHECKOUT = Path(__file__).parents[2]  # the repository, or where the wheel was installed
MIN_FREE_BYTES = 5 * 10**9
CLUSTER_TIMEOUT_S = 3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check. `remedy` says what to do if `is_ok` is false."""

    name: str
    is_ok: bool
    is_required: bool
    found: str
    remedy: str = ""


def required(name: str, is_ok: bool, found: str, remedy: str = "") -> Finding:
    return Finding(name=name, is_ok=is_ok, is_required=True, found=found, remedy=remedy)


def optional(name: str, is_ok: bool, found: str, remedy: str = "") -> Finding:
    return replace(required(name, is_ok, found, remedy), is_required=False)


@click.command()
@click.option(
    "--image",
    type=click.Choice(["data", "trainer", "server"]),
    help="Check a container image instead of a machine: it has what its steps need and nothing that does not belong.",
)
@json_option
def doctor(image: str | None, as_json: bool) -> None:
    """Report what is installed, what is missing and how to install it; exit with 1 if a required part is missing."""
    if image:
        findings = check_image(image)
    else:
        findings = [check() for check in CHECKS] + [check_package(name) for name in PACKAGES]
    is_healthy = all(finding.is_ok for finding in findings if finding.is_required)
    lines = []
    for finding in findings:
        mark = "ok" if finding.is_ok else "MISSING" if finding.is_required else "-"
        lines.append(f"{mark:<9}{finding.name:<18}{finding.found}")
        if not finding.is_ok:
            lines.append(f"{'':<27}-> {finding.remedy}")
    lines.append("everything required is installed" if is_healthy else "something required is missing, see above")
    emit({"ok": is_healthy, "checks": [asdict(finding) for finding in findings]}, lines, as_json=as_json)
    if not is_healthy:
        sys.exit(1)


def check_python() -> Finding:
    found = f"{platform.python_version()}, {os.cpu_count()} cores"
    return required("python", sys.version_info[:2] == (3, 11), found, "make setup PYTHON=/path/to/python3.11")


def check_package(name: str) -> Finding:
    try:
        return required(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        return required(name, False, "not installed", install_command(name))


def check_torch() -> Finding:
    """Whether torch loads, and which build it is: the CUDA build takes gigabytes that a CPU never uses."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return required("torch", False, f"does not load: {error}", install_command("torch"))
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    return required("torch", True, f"{torch.__version__}, {build}")


def install_command(package: str) -> str:
    """The command that installs what is missing: in a checkout `make setup`, elsewhere pip with recmill's own pins.

    torchrec goes in last and without dependencies: it requires fbgemm-gpu, whose files overwrite those of
    fbgemm-gpu-cpu.
    """
    if (CHECKOUT / "Makefile").is_file():
        return "make setup"
    pip = f"{sys.executable} -m pip install"
    base = [entry for entry in _requirements("") if re.match(rf"{package}\b(?!-)", entry)]
    if base:
        return f"{pip} {shlex.join(base)}"
    (torchrec,) = (entry for entry in _requirements("cuda") if entry.startswith("torchrec"))
    return f"{pip} {shlex.join(_requirements('cpu'))} && {pip} --no-deps {torchrec}"


def check_fbgemm() -> Finding:
    """Whether fbgemm works: torchrec requires fbgemm-gpu, whose files overwrite and break those of fbgemm-gpu-cpu."""
    both = [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if _is_installed(name)]
    remedy = install_command("fbgemm-gpu-cpu")
    if not both:
        return required("fbgemm", False, "not installed", remedy)
    remedy = f"{sys.executable} -m pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {remedy}"
    if len(both) == 2:
        return required("fbgemm", False, "fbgemm-gpu and fbgemm-gpu-cpu overwrite each other", remedy)
    # In a separate process: a broken library may crash the process that loads it.
    probe = "import torch, fbgemm_gpu; torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 2]))"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if loaded.returncode == 0:
        return required("fbgemm", True, f"{both[0]} {metadata.version(both[0])} works")
    reason = (loaded.stderr.strip().splitlines() or [f"the process exited with {loaded.returncode}"])[-1]
    return required("fbgemm", False, f"does not load: {reason}", remedy)


def check_kernels() -> Finding:
    remedy = "make setup in a checkout (needs a C++ compiler), or reinstall a wheel built for this machine"
    try:
        extension = importlib.import_module("kernels._cpu")
    except ImportError as error:
        return required("kernels", False, f"do not load: {error}", remedy)
    return required("kernels", True, Path(str(extension.__file__)).name)


def check_compiler() -> Finding:
    remedy = "install g++ or clang++ (Debian: apt-get install g++); only needed to build the kernels"
    return _program("compiler", (os.environ.get("CXX", ""), "c++", "g++", "clang++"), remedy)


def check_java() -> Finding:
    home = os.environ.get("JAVA_HOME")
    remedy = "install Java 17 (Debian: apt-get install openjdk-17-jre-headless); only needed for --engine spark"
    return _program("java", (f"{home}/bin/java" if home else "", "java"), remedy, flag="-version")


def check_chromium() -> Finding:
    remedy = "apt-get install chromium; only needed to test the report in a browser"
    return _program("chromium", ("chromium", "chromium-browser", "google-chrome"), remedy)


def check_gpu() -> Finding:
    try:
        import torch
    except (ImportError, OSError):
        return optional("gpu", False, "unknown: torch does not load", install_command("torch"))
    if torch.cuda.is_available():
        found = ", ".join(torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count()))
        return optional("gpu", True, found)
    remedy = 'needs a CUDA GPU and pip install "recmill[cuda]"; everything runs on CPUs without one'
    return optional("gpu", False, "none", remedy)


def check_cluster() -> Finding:
    """Whether the cluster that KUBECONFIG (or ~/.kube/config) names answers."""
    remedy = "set KUBECONFIG to a cluster with Kubeflow Pipelines; only needed for recmill submit"
    try:
        from urllib3.exceptions import HTTPError

        client: Any = importlib.import_module("kubernetes.client")  # untyped
        config: Any = importlib.import_module("kubernetes.config")
    except ImportError as error:
        return optional("cluster", False, f"unknown: {error}", install_command("kubernetes"))
    try:
        config.load_kube_config()
        host = client.Configuration.get_default_copy().host
        version = client.VersionApi().get_code(_request_timeout=CLUSTER_TIMEOUT_S)
    except (config.ConfigException, FileNotFoundError) as error:
        found = f"no usable kubeconfig ({' '.join(str(error).split())[:80]})"
        return optional("cluster", False, found, remedy)
    except (client.ApiException, HTTPError, OSError):
        return optional("cluster", False, f"{host} does not answer", remedy)
    return optional("cluster", True, f"{host}, Kubernetes {version.git_version}")


def check_disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{format_bytes(free)} free in {Path.cwd()}"
    remedy = f"free {format_bytes(MIN_FREE_BYTES)} or work in another folder"
    return optional("disk", free >= MIN_FREE_BYTES, found, remedy)


def check_data() -> Finding:
    folder = os.environ.get("RECMILL_DATA_DIR", "")
    found = sorted(entry.name for entry in Path(folder).iterdir()) if folder and Path(folder).is_dir() else []
    remedy = "set RECMILL_DATA_DIR to a folder with globo/, frappe/ or ml-1m/; only needed for runs on real data"
    return optional("real data", bool(found), ", ".join(found) or "none", remedy)


def check_image(name: str) -> list[Finding]:
    """What an image must contain, and what it must not."""
    if name == "server":
        return [
            check_python(),
            check_torch(),
            check_kernels(),
            *(check_package(package) for package in SERVER_PACKAGES),
            *(check_absent(package) for package in ("torchrec", "mlflow", "kfp")),
            *(check_user(), check_no_compiler(), check_no_caches()),
        ]
    findings = [
        check_python(),
        check_torch(),
        check_fbgemm(),
        check_kernels(),
        *(check_package(package) for package in PACKAGES),
    ]
    if name == "data":
        findings += [check_package("pyspark"), replace(check_java(), is_required=True)]
    return [*findings, check_user(), check_no_compiler(), check_no_caches()]


def check_absent(name: str) -> Finding:
    return required(f"no {name}", not _is_installed(name), "installed" if _is_installed(name) else "none", "remove it")


def check_server() -> Finding:
    """Whether `recmill serve` has its environment; recmill/serving/server/environment.py finds it."""
    named = os.environ.get("RECMILL_SERVER_PYTHON") or str(CHECKOUT / ".venv-server/bin/python")
    is_there = _is_installed("kserve") or os.access(named, os.X_OK)
    remedy = "make setup-server, or in an installed recmill the command that recmill serve prints; only needed to serve"
    return optional("server", is_there, named if is_there else "no environment", remedy)


def check_user() -> Finding:
    remedy = "run the image as built, with USER 10001, or with runAsNonRoot"
    return required("user", os.getuid() != 0, f"{os.getuid()}:{os.getgid()}", remedy)


def check_no_compiler() -> Finding:
    found = [program for program in ("cc", "c++", "gcc", "g++", "clang", "make", "cmake") if shutil.which(program)]
    remedy = "compile in the builder stage and copy the result"
    return required("no compiler", not found, ", ".join(found) or "none", remedy)


def check_no_caches() -> Finding:
    places = ("/root/.cache/pip", "/tmp/.cache/pip", "/var/lib/apt/lists/lock")
    found = [place for place in places if os.access(place, os.F_OK)]
    remedy = "pip install with PIP_NO_CACHE_DIR=1; rm -rf /var/lib/apt/lists/* in the same layer"
    return required("no caches", not found, ", ".join(found) or "none", remedy)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _requirements(extra: str) -> list[str]:
    """The requirements of an extra of the installed recmill ("" for those of recmill itself), without markers."""
    split = [entry.partition(";") for entry in metadata.requires("recmill") or []]
    wanted = re.compile(rf"extra == ['\"]{extra}['\"]") if extra else re.compile(r"^$")
    return [name.strip() for name, _, marker in split if wanted.search(marker)]


def _program(name: str, candidates: tuple[str, ...], remedy: str, *, flag: str = "--version") -> Finding:
    """The version that the first of these programs prints."""
    for candidate in filter(None, candidates):
        path = shutil.which(candidate)
        if not path:
            continue
        try:
            said = subprocess.run([path, flag], capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        lines = (said.stdout or said.stderr).strip().splitlines()
        if said.returncode == 0 and lines:
            return optional(name, True, lines[0])
    return optional(name, False, "not found", remedy)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_fbgemm,
    check_kernels,
    check_compiler,
    check_gpu,
    check_java,
    check_chromium,
    check_cluster,
    check_server,
    check_disk,
    check_data,
)
