"""Component folders as kubeflow/pipelines-components asks for them: README.md, metadata.yaml, OWNERS match the code."""

from __future__ import annotations

from datetime import datetime

import kfp
import pytest
import yaml

from components.images import IMAGES
from pipelines.readmes import COMPONENTS, component_of, metadata_of, readme_of

FOLDERS = sorted(path.parent.name for path in COMPONENTS.glob("*/component.py"))
FIELDS = {"name", "stability", "dependencies", "tags", "lastVerified"}


def test_every_folder_is_a_step_that_has_an_image() -> None:
    assert sorted(IMAGES) == FOLDERS


@pytest.mark.parametrize("step", FOLDERS)
def test_metadata_names_the_component_and_the_version_of_kubeflow(step: str) -> None:
    folder = COMPONENTS / step
    text = (folder / "metadata.yaml").read_text(encoding="utf-8")
    assert text == metadata_of(step), "run python -m pipelines.readmes"
    metadata = yaml.safe_load(text)
    assert set(metadata) == FIELDS
    assert metadata["name"] == step == component_of(step).python_func.__name__
    (pipelines,) = metadata["dependencies"]["kubeflow"]
    assert kfp.__version__.startswith(pipelines["version"].removeprefix(">="))
    assert isinstance(metadata["lastVerified"], datetime)


@pytest.mark.parametrize("step", FOLDERS)
def test_the_readme_lists_every_input_and_output(step: str) -> None:
    text = (COMPONENTS / step / "README.md").read_text(encoding="utf-8")
    assert text == readme_of(step), "run python -m pipelines.readmes"
    spec = component_of(step).component_spec
    assert all(f"| `{name}` |" in text for name in (*(spec.inputs or {}), *(spec.outputs or {})))


@pytest.mark.parametrize("step", FOLDERS)
def test_owners_are_named(step: str) -> None:
    owners = yaml.safe_load((COMPONENTS / step / "OWNERS").read_text(encoding="utf-8"))
    assert set(owners) == {"approvers", "reviewers"}
    assert owners["approvers"]
