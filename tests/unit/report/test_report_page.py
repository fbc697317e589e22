import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recmill.artifacts import InputError
from recmill.artifacts.manifest import sign_manifest
from recmill.data.schema import Feature
from recmill.report import build_report
from tests.unit.report.report_runs import write_json, write_run

SECTIONS = ["pipeline", "training", "quality", "data", "access", "ingestion", "plan", "config", "environment", "notes"]
VOID = {"meta", "link", "br", "img", "input", "hr", "line"}


class Page(HTMLParser):
    """What a page holds: its elements with attributes, its text, and whether its tags close as they should."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID or self.get_starttag_text() == "":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text += data

    def ids(self, tag: str) -> list[str | None]:
        return [attributes.get("id") for name, attributes in self.elements if name == tag and "id" in attributes]


@pytest.fixture(scope="module")
def single(baseline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_report([baseline], out=tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def several(baseline: Path, faster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_report([baseline, faster], out=tmp_path_factory.mktemp("page") / "report.html", title="Ablation")


def test_a_page_has_every_section_in_reading_order(single: Path, several: Path) -> None:
    assert Page(single).ids("section") == ["headline", *SECTIONS]
    assert Page(several).ids("section") == ["headline", "comparison", *SECTIONS]


def test_the_tags_of_a_page_are_balanced(single: Path, several: Path) -> None:
    assert Page(single).open == []
    assert Page(several).open == []


def test_the_headline_numbers_are_on_the_page(single: Path) -> None:
    text = Page(single).text.replace("\u00a0", " ")
    for expected in (
        "0.7934",
        "best reachable 0.8123",
        "8 k",
        "36.6 MiB",
        "96 B per sample",
        "DLRM trained on 360,000 samples",
    ):
        assert expected in text


def test_several_runs_show_the_ratio_to_the_first(several: Path) -> None:
    text = Page(several).text
    assert "Ablation" in text
    assert "2.00×" in text
    assert "4.00×" in text
    assert "+0.0016" in text


def test_settings_that_differ_come_first(several: Path) -> None:
    text = re.sub(r"\s+", " ", Page(several).text)
    assert "Training settings that differ" in text
    assert "batch_size 2048 4096" in text


def test_what_all_runs_share_is_shown_once(several: Path) -> None:
    assert Page(several).text.count("its most read rows serve, one line per table") == 1


def test_the_page_fetches_nothing(several: Path) -> None:
    page = Page(several)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(name) or "#").startswith("#")
    source = several.read_text(encoding="utf-8")
    assert not re.search(r"https?://", source)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|localStorage", source)


def test_the_page_stays_small_with_many_runs_and_long_curves(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{n}", speed=1 + n / 10, num_steps=20_000) for n in range(8)]
    assert build_report(runs, out=tmp_path / "page.html").stat().st_size < 2_000_000


def test_many_tables_share_one_legend_entry(tmp_path: Path) -> None:
    extra = tuple(Feature(name=f"f{n}", kind="sparse", num_rows=1_000 + n, dim=16) for n in range(40))
    page = build_report([write_run(tmp_path / "run", extra=extra)], out=tmp_path / "page.html")
    assert "38 other tables" in Page(page).text
    assert page.stat().st_size < 2_000_000


def test_names_from_the_data_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')<\\script>"
    run = write_run(
        tmp_path / "run", name='"><img src=x>', extra=(Feature(name=evil, kind="sparse", num_rows=1_000, dim=16),)
    )
    path = build_report([run], out=tmp_path / "page.html", title="<script>alert(1)</script>")
    page = Page(path)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "img" not in [tag for tag, _ in page.elements]
    assert evil in page.text


@pytest.mark.parametrize(
    "part", ["dataset", "profile", "plan", "allocation", "train", "steps", "run.json", "dataset/schema.json"]
)
def test_a_missing_part_is_said_and_the_rest_is_shown(part: str, baseline: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(baseline, run)
    shutil.rmtree(run / part) if (run / part).is_dir() else (run / part).unlink()
    page = Page(build_report([run], out=tmp_path / "page.html"))
    assert page.ids("section") == ["headline", *SECTIONS]
    names = {
        "train": "train/result.json is missing",
        "steps": "steps/*.json are missing",
        "run.json": "run.json is missing",
    }
    assert names.get(part, f"{part.removesuffix('/schema.json')}/") in page.text
    assert "missing" in page.text


def test_a_run_that_holds_only_its_name_makes_a_page(tmp_path: Path) -> None:
    write_json(tmp_path / "run/run.json", {"format_version": 1, "kind": "run", "name": "bare"})
    page = Page(build_report([tmp_path / "run"], out=tmp_path / "page.html"))
    assert page.ids("section") == ["headline", *SECTIONS]
    assert "no training result" in page.text


def test_empty_parts_make_a_page(tmp_path: Path) -> None:
    for file in ("run.json", "dataset/schema.json", "train/result.json"):
        write_json(tmp_path / "run" / file, {"format_version": 1})
    for kind in ("dataset", "profile", "plan", "allocation"):
        manifest = tmp_path / "run" / kind / f"{kind}.json"
        manifest.parent.mkdir(exist_ok=True)
        manifest.write_text(json.dumps(sign_manifest({"format_version": 1})))
    write_json(tmp_path / "run/steps/train_model.json", {"step": "train_model"})
    assert Page(build_report([tmp_path / "run"], out=tmp_path / "page.html")).ids("section") == ["headline", *SECTIONS]


def test_a_broken_run_leaves_the_old_page_alone(baseline: Path, tmp_path: Path) -> None:
    out = build_report([baseline], out=tmp_path / "page.html")
    before = out.read_bytes()
    run = tmp_path / "run"
    shutil.copytree(baseline, run)
    (run / "train/result.json").write_text(json.dumps({"format_version": 1})[:-3])
    with pytest.raises(InputError, match=r"train/result\.json: not valid JSON"):
        build_report([run], out=out)
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_a_page_that_cannot_be_written_is_named(baseline: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        build_report([baseline], out=tmp_path / "file/folder/page.html")


def test_no_run_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder given"):
        build_report([], out=tmp_path / "page.html")
