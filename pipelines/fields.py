"""The form that Kubeflow shows for a pipeline: descriptions, drop-downs, and other defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfp.dsl.base_component import BaseComponent

from components.form import FIELDS
from recmill.artifacts import InputError


def with_fields(pipeline: BaseComponent) -> BaseComponent:
    """The same pipeline; each of its parameters says what it is and, if they can be listed, which values it takes.

    kfp's decorator has no way to list values, which the server checks and the UI offers as a drop-down.
    """
    for name, parameter in pipeline.pipeline_spec.root.input_definitions.parameters.items():
        parameter.description = FIELDS[name].about
        for choice in FIELDS[name].choices:
            parameter.literals.add().string_value = choice
    return pipeline


def with_defaults(pipeline: BaseComponent, given: Mapping[str, Any]) -> BaseComponent:
    """The same pipeline; its form is filled in with the given values."""
    parameters = pipeline.pipeline_spec.root.input_definitions.parameters
    for name, value in given.items():
        if name not in parameters:
            raise InputError(f"{name}: this pipeline has no such parameter, but {', '.join(sorted(parameters))}")
        kind = "number_value" if isinstance(value, int | float) else "string_value"
        setattr(parameters[name].default_value, kind, value)
    return pipeline
