"""The report as one HTML page that needs nothing else: no network, no script, plots inside it as SVG. Its content comes from report.py, its form from report.html."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from areal_hpc import __version__
from areal_hpc.observe.plots import Chart

if TYPE_CHECKING:
    from areal_hpc.observe.report import Table


def write(
    path: Path, title: str, paragraphs: Sequence[str], summary: str, charts: Sequence[Chart], tables: Sequence[Table], config: str, num_samples: int
) -> None:
    """Write the page.

    `summary`: aligned lines; `config`: YAML; either may be empty. `num_samples`: answers on samples.html beside the page, which is linked when there are any.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pictures = [{"name": chart.name, "title": chart.title, "about": chart.about, "uri": chart.svg_uri()} for chart in charts]
    parts = {"title": title, "paragraphs": paragraphs, "summary": summary, "charts": pictures, "tables": tables, "config": config, "num_samples": num_samples}
    path.write_text(environment.get_template("report.html").render(parts, version=__version__), encoding="utf-8")
