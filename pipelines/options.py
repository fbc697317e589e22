"""Options that the commands of pipelines share: switches, variants, and what is compiled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from components.form import FIELDS, LAYOUTS, RARE, RunForm, check_partitions, read_form
from recmill.cli.output import settings_option
from recmill.data.sources.raw_log import is_log_yaml
from recmill.training.config import settings_from_flags
from recmill.training.switches import Switch

SWITCHES = tuple(switch.value for switch in Switch)
NOT_OF_FORM = ("workdir", "partitions", "ablations")
PIPELINES = {"train": "recmill.yaml", "partitions": "recmill-partitions.yaml", "ablations": "recmill-ablations.yaml"}
SWITCH_VALUES = {"auto": "auto", "on": "on", "true": "on", "off": "off", "false": "off"}


# Keys of `settings` that have a flag of their own.
ABOUT_RARE = {
    "layout": "Layout in which the dataset is stored; auto: what suits how much lists repeat inside sessions.",
    "eval_fraction": "Share of sessions held out for evaluation.",
    "strict": "Fail if a check of the data that a log.yaml describes warns.",
    "from": "Checkpoint of a trained model to go on with; the vocabulary of a log.yaml extends the model's.",
    "deploy": "Serve the model if it beats the one that serves: a folder that recmill serve watches, or JSON "
    "(docs/serving.md).",
    "compress": "Let tables share parameters: auto, a factor (10) or a size (64MiB).",
}


def form_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option per field of a run's form; one that is not given is None. `read_options` makes parameters of them."""
    fields = {name: field for name, field in FIELDS.items() if field.flag}
    options = [
        *(_form_option(name, field.about, field.default, field.choices) for name, field in fields.items()),
        *(_form_option(name, about, RARE[name], _choices(name)) for name, about in ABOUT_RARE.items()),
        settings_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _form_option(name: str, about: str, default: Any, choices: tuple[str, ...]) -> Callable[..., Any]:
    if isinstance(default, bool):
        return click.option(f"--{name}", is_flag=True, default=None, help=about)
    kind = click.Choice(choices) if choices else type(default)
    if name in SWITCHES:
        kind = click.Choice(list(SWITCH_VALUES))
    told = f" Default: {default}." if default != "" else ""
    metavar = "auto|on|off" if name in SWITCHES else None
    return click.option(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=about + told)


def _choices(name: str) -> tuple[str, ...]:
    return LAYOUTS if name == "layout" else ()


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """The pipeline parameters that `form_options` gave; takes them out of a command's options."""
    settings: dict[str, Any] = dict(settings_from_flags(options.pop("flags")))
    settings |= {name: value for name in ABOUT_RARE if (value := options.pop(name)) is not None}
    fields = {name: options.pop(name) for name in FIELDS if name in options}
    parameters = {name: value for name, value in fields.items() if value is not None}
    parameters |= {name: SWITCH_VALUES[value] for name, value in parameters.items() if name in SWITCHES}
    return parameters | ({"settings": json.dumps(settings)} if settings else {})


def is_prepared(parameters: Mapping[str, Any]) -> bool:
    """Whether the run's data is a log.yaml, so that the pipeline begins with prepare_log."""
    return parameters.get("preset", "auto") in ("auto", "parquet") and is_log_yaml(parameters.get("data"))


def is_deployed(parameters: Mapping[str, Any]) -> bool:
    """Whether the settings name a folder that servers watch, so that the pipeline ends with deploy_model."""
    settings = json.loads(parameters.get("settings") or "{}")
    return settings.get("deploy", RARE["deploy"]) not in ("", RARE["deploy"])


def check_form(parameters: Mapping[str, Any]) -> RunForm:
    """Check the parameters of a run as its first step will."""
    check_partitions(parameters.get("partitions", []))
    own = {name: value for name, value in parameters.items() if name not in (*SWITCHES, *NOT_OF_FORM)}
    return read_form(**own, switches={name: parameters[name] for name in SWITCHES if name in parameters})


def variant_options(command: Callable[..., None]) -> Callable[..., None]:
    """Which trainings run beside that of the model."""
    baseline = click.option(
        "--baseline/--no-baseline",
        "with_baseline",
        default=True,
        help="Train the same model with every switch off too, and compare.",
    )
    sharing = click.option(
        "--with-sharing", is_flag=True, help="Train a variant with shared parameters (a tenth of the size) too."
    )
    return baseline(sharing(command))


def package_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of the commands that compile: which pipeline, in which images, with which placement."""
    for option in reversed(
        (
            variant_options,
            click.option(
                "--pipeline",
                "kind",
                type=click.Choice(list(PIPELINES)),
                default="train",
                help="'partitions': cluster a log's folders in parallel; 'ablations': each switch alone, and all.",
            ),
            click.option("--image-tag", help="Tag of the images; must be immutable. Default: the version of recmill."),
            click.option(
                "--image-registry",
                "registry",
                default="",
                show_default=False,
                help="Registry and path prefix of the images. Default: none.",
            ),
            click.option(
                "--placement", help="YAML file with resources, GPUs, nodes, volumes and timeouts (docs/kubernetes.md)."
            ),
            click.option(
                "--profile",
                type=click.Choice(["laptop", "small", "gpu"]),
                help="Size of the steps: 'laptop' fits a node with 2 cores and 8 GiB, 'small' nodes with 4 cores and "
                "16 GiB, 'gpu' trains on a GPU. Default: the placement's, else laptop.",
            ),
            click.option(
                "--gpus",
                type=click.IntRange(min=0),
                help="GPUs per node of the training step. Default: the placement's, else 0.",
            ),
            click.option("--gpu-type", help="Resource name of the GPUs. Default: nvidia.com/gpu."),
        )
    ):
        command = option(command)
    return command
