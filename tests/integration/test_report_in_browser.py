"""The report in a real browser: it renders, fits, sorts and says nothing on the console."""

from __future__ import annotations

import html
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from recmill.report import build_report

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    # A sandboxed frame in a process of its own answers after the page has been dumped.
    "--disable-features=IsolateSandboxedIframes",
    "--enable-logging=stderr",
)
DARK = "--blink-settings=preferredColorScheme=0"
SECTIONS = [
    "headline",
    "comparison",
    "pipeline",
    "training",
    "quality",
    "data",
    "access",
    "ingestion",
    "plan",
    "config",
    "environment",
    "notes",
]

# Looks at the page from inside and tells whoever holds it: itself, or the page whose frame it is in.
PROBE = """
<script>
function heightOf(element) { return element.getBoundingClientRect().height; }
addEventListener("load", function () {
  var visible = Array.from(document.querySelectorAll("section")).filter(function (s) { return s.offsetHeight > 40; });
  var table = document.querySelector("#access table.sortable");
  var head = table.querySelectorAll("th")[1];
  head.querySelector("button").click();
  var rows = Array.from(table.tBodies[0].rows).map(function (row) { return Number(row.cells[1].dataset.sort); });
  var chart = document.querySelector("svg.lines"), box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 50 }));
  var tip = document.querySelector(".tip");
  var hovered = tip.hidden ? "" : tip.textContent;
  chart.dispatchEvent(new PointerEvent("pointerleave"));
  document.documentElement.style.scrollBehavior = "auto";
  document.querySelector('nav a[href="#notes"]').click();
  var found = {
    sections: visible.map(function (s) { return s.id; }), sorted: rows, order: head.getAttribute("aria-sort"),
    hovered: hovered, tip_hidden: tip.hidden, scrolled: scrollY, width: innerWidth,
    needed: document.documentElement.scrollWidth, background: getComputedStyle(document.body).backgroundColor,
    flows: Array.from(document.querySelectorAll("#pipeline > .blocks > figure .flow")).map(heightOf).map(Boolean),
    small_text: Array.from(document.querySelectorAll(".chart text")).filter(function (text) {
      return heightOf(text) > 0 && heightOf(text) < 10;
    }).map(function (text) { return text.textContent; })
  };
  (parent === window ? window : parent).postMessage(JSON.stringify(found), "*");
});
</script>
"""
LISTENER = """
<script>
addEventListener("message", function (event) {
  var pre = document.body.appendChild(document.createElement("pre"));
  pre.id = "probe";
  pre.textContent = event.data;
});
</script>
"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed: the page is not looked at in a browser"
)


def browse(page: Path, scratch: Path, *flags: str) -> str:
    """The page's DOM after its scripts ran; fails if anything was said on the console."""
    profile = scratch / f"profile-{len(list(scratch.iterdir()))}"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=4000", "--dump-dom", *flags]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    return done.stdout


def probe(dom: str) -> dict[str, Any]:
    match = re.search(r'<pre id="probe">(.*?)</pre>', dom, flags=re.DOTALL)
    assert match, "the page's script did not report"
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_run = runpy.run_path(str(Path(__file__).parents[1] / "unit/report/report_runs.py"))["write_run"]
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "baseline"), write_run(folder / "dedup", speed=2.0, auc=0.795, data_bytes=9_600_000)]
    return build_report(runs, out=folder / "report.html")


@pytest.fixture(scope="module")
def probed(page: Path) -> Path:
    """The page with our eyes in it."""
    path = page.with_name("probed.html")
    path.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    return path


def framed(path: Path, attributes: str) -> Path:
    path.write_text(
        f"<!doctype html><body style='margin:0'>{LISTENER}<iframe {attributes}></iframe></body>", encoding="utf-8"
    )
    return path


def test_every_section_shows_and_the_page_reacts(probed: Path, tmp_path: Path) -> None:
    listening = tmp_path / "page.html"
    listening.write_text(probed.read_text(encoding="utf-8").replace("<main>", LISTENER + "<main>"), encoding="utf-8")
    found = probe(browse(listening, tmp_path, "--window-size=1200,900"))
    assert found["sections"] == SECTIONS
    assert found["sorted"] == [200_000, 80_000, 5_000, 600]
    assert found["order"] == "descending"
    assert "baseline: 0." in found["hovered"]
    assert "dedup: 0." in found["hovered"]
    assert found["tip_hidden"] is True
    assert found["scrolled"] > 1_000
    assert found["needed"] <= found["width"]
    assert found["flows"] == [True, False]


def test_a_telephone_needs_no_sideways_scrolling(probed: Path, tmp_path: Path) -> None:
    # Chromium's window is never narrower than 500 pixels; a frame is.
    frame = framed(tmp_path / "frame.html", f'src="{probed.as_uri()}" width="375" height="800" style="border:0"')
    found = probe(browse(frame, tmp_path))
    assert found["width"] == 375
    assert found["needed"] <= 375
    assert found["sections"] == SECTIONS
    assert found["flows"] == [False, True]
    assert found["small_text"] == []


def test_the_page_works_in_the_sandboxed_frame_of_the_pipelines_ui(probed: Path, tmp_path: Path) -> None:
    source = html.escape(probed.read_text(encoding="utf-8"), quote=True)
    frame = framed(tmp_path / "frame.html", f'sandbox="allow-scripts" srcdoc="{source}" width="900" height="600"')
    found = probe(browse(frame, tmp_path))
    assert found["sections"] == SECTIONS
    assert found["scrolled"] > 1_000
    assert found["needed"] <= found["width"]
    assert found["small_text"] == []


def test_light_and_dark_are_drawn_and_differ(page: Path, tmp_path: Path) -> None:
    brightness = {}
    for name, flags in {"light": (), "dark": (DARK,)}.items():
        picture = tmp_path / f"{name}.png"
        browse(page, tmp_path, "--window-size=1200,2400", f"--screenshot={picture}", *flags)
        with Image.open(picture) as image:
            assert image.size == (1200, 2400)
            colours = image.convert("RGB").getcolors(maxcolors=2**24)
        assert colours is not None
        assert len(colours) > 100  # a blank page has one
        brightness[name] = sum(count * sum(colour) / 3 for count, colour in colours) / (1200 * 2400)
    assert brightness["light"] > 225
    assert brightness["dark"] < 60


def test_a_run_with_little_in_it_makes_a_clean_page(page: Path, tmp_path: Path) -> None:
    partial = build_report([page.parent / "baseline/train"], out=tmp_path / "partial.html")
    dom = browse(partial, tmp_path)
    assert "7 parts missing" in dom
    assert "has no profile/profile.json" in dom


def test_the_page_can_be_printed(page: Path, tmp_path: Path) -> None:
    paper = tmp_path / "report.pdf"
    browse(page, tmp_path, f"--print-to-pdf={paper}")
    printed = paper.read_bytes()
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= 3


GAINS_PROBE = """
<script>
addEventListener("load", function () {
  var tables = Array.from(document.querySelectorAll("#gains .scroll"));
  var last = document.querySelector("#gains .prose tr:last-child").getBoundingClientRect();
  var found = {
    needed: document.documentElement.scrollWidth,
    switches: document.querySelectorAll("#gains .prose tr td .change").length,
    cut: tables.filter(function (t) { return t.scrollWidth > t.clientWidth; }).length, bottom: last.bottom
  };
  (parent === window ? window : parent).postMessage(JSON.stringify(found), "*");
});
</script>
"""


@pytest.mark.parametrize(("width", "height"), [(480, 1600), (1280, 1000)])
def test_a_baseline_and_every_switch_are_on_the_first_screen(tmp_path: Path, width: int, height: int) -> None:
    write_variant = runpy.run_path(str(Path(__file__).parents[1] / "unit/report/test_report_gains.py"))["write_variant"]
    write_variant(tmp_path / "run", speed=2.0, seconds_per_part=1.0)
    write_variant(tmp_path / "run/baseline", seconds_per_part=2.0)
    page = build_report([tmp_path / "run"], out=tmp_path / "report.html")
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", GAINS_PROBE + "</body>"), encoding="utf-8")
    size = f'width="{width}" height="{height}" style="border:0"'
    found = probe(browse(framed(tmp_path / "frame.html", f'src="{page.as_uri()}" {size}'), tmp_path))
    assert found["needed"] <= width
    assert found["cut"] == 0  # no table scrolls sideways
    assert found["switches"] == 5
    assert found["bottom"] < height
