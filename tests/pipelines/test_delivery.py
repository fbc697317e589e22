"""The Dockerfile, skaffold.yaml, Kustomize and components agree, and images hold nothing they should not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from components.images import CUDA_SUFFIX, DATA, MLFLOW, SERVER, TRAINER
from recmill.cli import cli

ROOT = Path(__file__).parents[2]
TARGETS = ("data", "trainer", "mlflow", "server")


def read_stages() -> dict[str, str]:
    """Every stage of images/Dockerfile by name, without comments and continuation lines; "" is what precedes them."""
    text = (ROOT / "images" / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    first, *stages = re.split(r"^(?=FROM )", joined, flags=re.MULTILINE)
    return {"": first, **{stage.split()[3]: stage for stage in stages}}


def build_chain(target: str) -> str:
    """The stages that make up an image: the target and, before it, all that it starts from."""
    stages = read_stages()
    parent = stages[target].split()[1]
    return (build_chain(parent) if parent in stages else "") + stages[target]


def skaffold() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "skaffold.yaml").read_text(encoding="utf-8"))
    return loaded


def test_every_stage_starts_from_one_base_pinned_by_digest() -> None:
    stages = read_stages()
    assert re.search(r"^ARG BASE_IMAGE=\S+:[\w.-]+@sha256:[0-9a-f]{64}$", stages[""], re.MULTILINE)
    parents = {stage.split()[1] for name, stage in stages.items() if name}
    assert parents <= {"${BASE_IMAGE}", *stages}
    assert ":latest" not in "".join(stages.values())


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_a_plain_user_and_holds_neither_compiler_nor_pip(target: str) -> None:
    chain = build_chain(target)
    assert re.findall(r"^USER (\S+)$", chain, re.MULTILINE) == ["10001:10001"]
    for word in ("g++", "gcc", "python3-dev", "build-essential", "cmake", "pip install", "/opt/tools"):
        assert word not in chain
    assert chain.count("apt-get install") == chain.count("rm -rf /var/lib/apt/lists/*")
    assert "HEALTHCHECK" in chain
    assert "org.opencontainers.image.revision" in chain


@pytest.mark.parametrize("target", ["data", "trainer"])
def test_the_doctor_examines_the_image_of_a_step_when_it_is_built(target: str) -> None:
    chain = build_chain(target)
    examined = chain.index(f"RUN recmill doctor --image {target}")
    assert examined > chain.index("USER 10001:10001")
    assert not re.search(r"^(COPY|ADD) ", chain[examined:], re.MULTILINE)


@pytest.mark.parametrize(("variant", "fbgemm"), [("cpu", "fbgemm-gpu-cpu==1.8.0"), ("cuda", "fbgemm-gpu==1.8.0")])
def test_a_variant_installs_one_build_of_fbgemm_and_the_same_torch(variant: str, fbgemm: str) -> None:
    locked = [line.split()[0] for line in (ROOT / f"requirements/image-{variant}.txt").read_text().splitlines()]
    assert [line for line in locked if line.startswith("fbgemm")] == [fbgemm]
    assert not [line for line in locked if line.startswith("torch==")]  # torch-cpu.txt or torch-cuda.txt has it


def test_skaffold_kustomize_and_components_name_the_same_images() -> None:
    named = {DATA, TRAINER, MLFLOW, SERVER}
    assert {artifact["image"] for artifact in skaffold()["build"]["artifacts"]} == named
    for overlay in ("kind", "cluster"):
        path = ROOT / "manifests/overlays" / overlay / "kustomization.yaml"
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {entry["name"] for entry in body["images"]} == named
    assert {f"recmill/{target}" for target in TARGETS} == named


def test_skaffold_builds_checks_and_deploys_existing_files() -> None:
    body = skaffold()
    for artifact in body["build"]["artifacts"]:
        assert artifact["docker"]["dockerfile"] == "images/Dockerfile"
        assert artifact["image"] == f"recmill/{artifact['docker']['target']}"
        assert artifact["docker"]["target"] in read_stages()
    assert {entry["image"] for entry in body["test"]} == {DATA, TRAINER, MLFLOW, SERVER}
    profiles = {profile["name"]: profile for profile in body["profiles"]}
    assert set(profiles) == {"kind", "gpu"}
    for manifests in (body["manifests"], profiles["kind"]["manifests"]):
        assert all((ROOT / path / "kustomization.yaml").is_file() for path in manifests["kustomize"]["paths"])


def test_the_gpu_profile_changes_the_trainer_and_its_tag() -> None:
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


def test_the_build_context_holds_only_what_images_contain() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", "".join(read_stages().values()), re.M)
    for source in {word for line in copied for word in line.split()}:
        assert f"!{source}" in rules


@pytest.mark.parametrize(
    ("file", "place"), [("retention/cronjob", "jobTemplate.spec.template"), ("scoring/job", "template")]
)
def test_jobs_of_components_call_commands_that_exist_and_ask_for_no_privileges(file: str, place: str) -> None:
    pod = yaml.safe_load((ROOT / f"manifests/components/{file}.yaml").read_text(encoding="utf-8"))["spec"]
    for key in place.split("."):
        pod = pod[key]
    (container,) = pod["spec"]["containers"]
    program, name, *words = container["command"]
    command = cli.get_command(click.Context(cli), name)
    assert program == "recmill"
    assert command is not None
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    values = {entry["name"] for entry in container.get("env", [])}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(words))) == values
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
