"""Options that the commands of pipelines share: switches, variants, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from recmill.training.switches import Switch

PIPELINES = {"train": "recmill.yaml", "partitions": "recmill-partitions.yaml", "ablations": "recmill-ablations.yaml"}
SWITCH_VALUES = {"auto": "auto", "on": "true", "true": "true", "off": "false", "false": "false"}


def switch_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option per switch, each `auto`, `on` or `off`."""
    about = {
        Switch.DEDUP: "Train each distinct list of a batch once (RecD).",
        Switch.TIERS: "Place rows by how often they are read (FlexShard).",
        Switch.HOT_BATCHES: "Train samples that read only hot rows separately (FAE).",
        Switch.SHARING: "Let cold rows share parameters, another model (PSS); on: as --compress 10.",
        Switch.TUNING: "Adjust ingestion workers while training runs (InTune).",
    }
    for switch in reversed(Switch):
        command = click.option(
            f"--{switch.value.replace('_', '-')}",
            switch.value,
            type=click.Choice(list(SWITCH_VALUES)),
            metavar="auto|on|off",
            help=f"{about[switch]} Default: {'off' if switch == Switch.SHARING else 'auto'}.",
        )(command)
    return command


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


def read_switches(options: dict[str, Any]) -> dict[str, str]:
    """The settings of the switches that were given; takes them out of a command's options."""
    given = {switch.value: options.pop(switch.value) for switch in Switch}
    return {name: SWITCH_VALUES[value] for name, value in given.items() if value}


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
