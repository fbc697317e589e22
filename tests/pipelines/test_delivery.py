"""Dockerfiles, skaffold.yaml, Kustomize and components agree, and images hold nothing they should not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.images import CUDA_SUFFIX, DATA, MLFLOW, TRAINER

ROOT = Path(__file__).parents[2]
NAMES = ("data", "trainer", "mlflow")


def stages(name: str) -> list[str]:
    """The stages of a Dockerfile, comments and continuation lines gone."""
    text = (ROOT / "images" / name / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return re.split(r"^(?=FROM )", joined, flags=re.MULTILINE)


def skaffold() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "skaffold.yaml").read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_starts_from_one_base_pinned_by_digest(name: str) -> None:
    first, *rest = stages(name)
    assert re.search(r"^ARG BASE_IMAGE=\S+:[\w.-]+@sha256:[0-9a-f]{64}$", first, re.MULTILINE)
    bases = {stage.split()[1] for stage in rest}
    assert bases <= {"${BASE_IMAGE}", "dependencies"}
    assert ":latest" not in "".join(stages(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_last_stage_has_a_user_without_rights_and_neither_compiler_nor_pip(name: str) -> None:
    last = stages(name)[-1]
    assert re.findall(r"^USER (\S+)$", last, re.MULTILINE) == ["10001:10001"]
    for word in ("g++", "gcc", "python3-dev", "build-essential", "cmake", "pip install", "/opt/tools"):
        assert word not in last
    assert "apt-get install" not in last or "rm -rf /var/lib/apt/lists/*" in last
    assert "HEALTHCHECK" in last
    assert "org.opencontainers.image.revision" in last


@pytest.mark.parametrize("name", ["data", "trainer"])
def test_the_image_of_a_step_is_examined_by_the_doctor_when_it_is_built(name: str) -> None:
    last = stages(name)[-1]
    examined = last.index(f"RUN recmill doctor --image {name}")
    assert examined > last.index("USER 10001:10001")
    assert not re.search(r"^(COPY|ADD) ", last[examined:], re.MULTILINE)


def test_both_images_of_steps_have_the_same_dependencies_and_code() -> None:
    """Word for word, so that a builder makes, and a node keeps, these layers once."""
    _, *of_data = stages("data")
    _, *of_trainer = stages("trainer")
    assert of_data[:2] == of_trainer[:2]


@pytest.mark.parametrize(("variant", "fbgemm"), [("cpu", "fbgemm-gpu-cpu==1.8.0"), ("cuda", "fbgemm-gpu==1.8.0")])
def test_a_variant_installs_one_build_of_fbgemm_and_the_same_torch(variant: str, fbgemm: str) -> None:
    printed = subprocess.run(
        [sys.executable, "images/requirements.py", variant], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    assert [line for line in printed if line.startswith("fbgemm")] == [fbgemm]
    assert [line for line in printed if line.startswith("torch==")] == ["torch==2.13.0"]


def test_skaffold_kustomize_and_components_name_the_same_images() -> None:
    named = {DATA, TRAINER, MLFLOW}
    assert {artifact["image"] for artifact in skaffold()["build"]["artifacts"]} == named
    for overlay in ("kind", "cluster"):
        path = ROOT / "manifests/overlays" / overlay / "kustomization.yaml"
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {entry["name"] for entry in body["images"]} == named
    folders = {f"recmill/{path.parent.name}" for path in ROOT.glob("images/*/Dockerfile")}
    assert folders == named


def test_skaffold_builds_checks_and_deploys_what_is_there() -> None:
    body = skaffold()
    for artifact in body["build"]["artifacts"]:
        assert (ROOT / artifact["docker"]["dockerfile"]).is_file()
    assert {entry["image"] for entry in body["test"]} == {DATA, TRAINER, MLFLOW}
    profiles = {profile["name"]: profile for profile in body["profiles"]}
    assert set(profiles) == {"kind", "gpu"}
    for manifests in (body["manifests"], profiles["kind"]["manifests"]):
        assert all((ROOT / path / "kustomization.yaml").is_file() for path in manifests["kustomize"]["paths"])


def test_the_gpu_profile_changes_the_trainer_and_the_tag_that_steps_ask_for() -> None:
    body = skaffold()
    (gpu,) = [profile for profile in body["profiles"] if profile["name"] == "gpu"]
    changed = {}
    for patch in gpu["patches"]:
        assert patch["op"] == "replace"
        *parents, last = patch["path"].strip("/").split("/")
        entry: Any = body
        for key in parents:
            entry = entry[int(key)] if isinstance(entry, list) else entry[key]
        changed[last] = (entry[last], patch["value"])
    assert changed["VARIANT"] == ("cpu", "cuda")
    before, after = changed["template"]
    assert after == before + CUDA_SUFFIX
    assert body["build"]["artifacts"][1]["image"] == TRAINER


def test_the_build_sees_only_what_images_are_made_of() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", "".join("".join(stages(name)) for name in NAMES), re.M)
    for source in {word for line in copied for word in line.split()}:
        assert f"!{source}" in rules
