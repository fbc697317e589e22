"""The page: sections in reading order, rendered into the template with inline style and script."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import recmill
from recmill.report.ablation import MeasuredVariant, ablation_section
from recmill.report.checks import checks_of, checks_section
from recmill.report.data import access_section, data_section
from recmill.report.drawing.blocks import Cards, Section
from recmill.report.gains import Trainings, find_trainings, gains_lede, gains_section
from recmill.report.overview import comparison_section, headline, lede, pipeline_section, started
from recmill.report.quality import quality_section
from recmill.report.runs import Run
from recmill.report.setup import config_section, environment_section, notes_section, plan_section
from recmill.report.training import ingestion_section, training_section

FOLDER = Path(__file__).parent


def page_sections(
    runs: Sequence[Run], variants: Sequence[MeasuredVariant] = (), trainings: Trainings | None = None
) -> list[Section]:
    """The sections of the page, top to bottom; with a baseline beside the run, what it gained comes first."""
    trained = trainings.columns if trainings else runs
    return [
        *([gains_section(trainings)] if trainings else []),
        *([ablation_section(variants)] if variants else []),
        *([comparison_section(runs)] if len(runs) > 1 else []),
        pipeline_section(runs, cards=[headline(runs)] if trainings else []),
        training_section(trained),
        quality_section(trained),
        data_section(runs),
        *([checks_section(runs)] if any(checks_of(run) for run in runs) else []),
        access_section(runs),
        ingestion_section(runs),
        plan_section(runs),
        config_section(runs),
        environment_section(runs),
        notes_section(runs),
    ]


def render_page(runs: Sequence[Run], *, title: str | None = None, variants: Sequence[MeasuredVariant] = ()) -> str:
    """The page as HTML; `variants` add the section on switches.

    Names from the data are escaped; only our own style and script are inserted unescaped.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    trainings = find_trainings(runs[0]) if len(runs) == 1 else None
    page = environment.get_template("page.html.j2").render(
        title=title or " / ".join(run.label for run in runs),
        runs=runs,
        started=started(runs[0]),
        lede=" ".join(filter(None, [lede(runs), gains_lede(trainings) if trainings else ""])),
        headline=Cards(cards=[]) if trainings else headline(runs),
        sections=page_sections(runs, variants, trainings),
        num_missing=sum(len(run.missing) for run in runs),
        version=recmill.__version__,
        made_at=f"{datetime.now(tz=UTC):%d %B %Y, %H:%M} UTC",
        style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup((FOLDER / "page.js").read_text(encoding="utf-8")),
    )
    return page.lstrip()
