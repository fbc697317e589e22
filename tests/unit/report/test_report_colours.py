"""The series colours of page.css can be told apart by every kind of eye, in light and in dark."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import recmill.report
from recmill.report.drawing.svg import NUM_COLOURS

STYLE = (Path(recmill.report.__file__).parent / "page.css").read_text(encoding="utf-8")
LIGHT, DARK, PRINT = (
    dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.S)
)

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
EYES = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
# Ottosson 2020: linear RGB to cone responses, their cube roots to Oklab.
TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    return TO_OKLAB @ np.cbrt(TO_CONES @ np.clip(rgb, 0, 1))


def contrast(one: str, other: str) -> float:
    dark, bright = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) for colour in (one, other))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_any_two_series_can_be_told_apart(mode: str, eye: str) -> None:
    colours = LIGHT if mode == "light" else DARK
    seen = {n: oklab(EYES[eye] @ linear(colours[f"c{n}"])) for n in range(1, NUM_COLOURS + 1)}
    for one, other in itertools.combinations(seen, 2):
        assert 100 * np.linalg.norm(seen[one] - seen[other]) >= 10, (one, other)


@pytest.mark.parametrize("colours", [LIGHT, DARK, PRINT], ids=["light", "dark", "print"])
def test_marks_and_text_stand_out_from_the_card(colours: dict[str, str]) -> None:
    for n in range(NUM_COLOURS + 1):
        assert contrast(colours[f"c{n}"], colours["card"]) >= 3, n
    for name in ("ink", "soft", "good", "bad"):
        assert contrast(colours[name], colours["card"]) >= 4.5, name
    assert contrast(colours["good"], colours["good-back"]) >= 4.5
    assert contrast(colours["bad"], colours["bad-back"]) >= 4.5
