"""The report's HTML page in a real browser: no request, no complaint, every plot shows something, nothing overflows a desktop's or a phone's window."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from areal_hpc.observe import plots
from areal_hpc.observe.compare import Group
from areal_hpc.observe.report import write_comparison, write_report
from areal_hpc.observe.runs import load


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


synthetic, browser = _load("synthetic"), _load("browser")
PROGRAM = browser.find_browser()
COLOURED = """
async function coloured(image) {
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [400, Math.round(400 * image.naturalHeight / image.naturalWidth)];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let k = 0; k < pixels.length; k += 4) count += Math.max(pixels[k], pixels[k + 1], pixels[k + 2]) - Math.min(pixels[k], pixels[k + 1], pixels[k + 2]) > 40;
  return 4 * count / pixels.length;
}
"""
"""Share of the pixels of a plot that have a colour: axes, grid and text are grey."""
LEAST_COLOURED = 0.001


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of one run with two attempts, of three runs, and of a run without a step."""
    folder = tmp_path_factory.mktemp("runs")
    config = "recipe: laptop\nseed: {seed}\nnote: a | <b>bar</b>\n"
    for seed in (0, 1, 2):
        attributes = {
            "cores": 8,
            "cpu_model": "a <processor>",
            "attempt": 1,
            "resumed_from_step": -1,
            "config": config.format(seed=seed) + ("setting: other\n" if seed else ""),
            "fingerprint": "f00d" * 16,
        }
        synthetic.write_attempt(folder / f"run-{seed}", 1, synthetic.Shape(seed=seed, eta=1 + seed // 2, attributes=attributes))
    resumed = {"cores": 8, "cpu_model": "a <processor>", "attempt": 2, "resumed_from_step": 29, "config": config.format(seed=0)}
    synthetic.write_attempt(folder / "run-0", 2, synthetic.Shape(first_step=30, last_step=60, seed=7, eta=1, attributes=resumed))
    (folder / "run-0" / "attempt-1" / "failure.json").write_text(
        '{"name": "rank 3 (training 0) on host n1", "error": "RuntimeError: <script>alert(1)</script>"}'
    )
    synthetic.Log.create(_made(folder / "empty" / "attempt-1") / "log.h5", {}).close()
    reports = {name: write_report(folder / name) for name in ("run-0", "empty")}
    reports["three"] = write_comparison([folder / f"run-{seed}" for seed in (0, 1, 2)], folder / "three")
    return {name: report.with_name("report.html") for name, report in reports.items()}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_page_is_whole_in_itself(pages: dict[str, Path]) -> None:
    for page in pages.values():
        text = page.read_text()
        addresses = re.findall(r"""(?:src|href)=["']([^"']*)""", text)
        assert all(address.startswith(("data:", "#")) or address == "samples.html" for address in addresses)
        assert "<script" not in text and "default-src 'none'" in text and not re.search(r"url\(|@import", text)


def test_page_says_what_the_run_was(pages: dict[str, Path]) -> None:
    text = pages["run-0"].read_text()
    assert '<p class="first">The run was training bound: ' in text and "would balance" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "a &lt;processor&gt;" in text
    titles = ["Reward", "Held-out accuracy", "Throughput", "Where the training time went", "Where the wall time went", "Staleness", "Length of the answers"]
    for title in [*titles, "Queue before training", "Weight pushes", "Ring", "Rewards by status"]:
        assert f"<h2>{title}</h2>" in text
    for title in ("Attempts and failures", "Where it ran", "Ring, last attempt", "Trajectories and rewards by status", "Events"):
        assert title in text
    assert "no training step finished" in pages["empty"].read_text() and "Options that differ" in pages["three"].read_text()


@pytest.mark.slow
def test_plots_of_a_long_run_stay_small(tmp_path: Path) -> None:
    """30,000 steps: a page that a browser opens at once."""
    synthetic.write_attempt(tmp_path, 1, synthetic.Shape(last_step=3, ranks=2))
    run, num = load(tmp_path), 30_000
    draws = np.random.default_rng(0)

    def longer(rows: np.ndarray, column: str) -> np.ndarray:
        out = np.resize(rows, num)
        for name in rows.dtype.names or ():
            if rows.dtype[name].kind == "f":
                out[name] = draws.random(num)
        out[column] = np.arange(1, num + 1)
        return out

    sampled = run.sampled | {"ring": [longer(run.sampled["ring"][0], "time_s")], "ranks": [longer(run.sampled["ranks"][0], "time_s")]}
    long = replace(run, steps=longer(run.steps, "step"), pushes=longer(run.pushes, "version"), trajectories=longer(run.trajectories, "batch"), sampled=sampled)
    sizes = {}
    for chart in plots.charts([Group("long", (long,))]):
        sizes[chart.name] = len(chart.svg_uri())
        chart.close()
    assert len(sizes) == 16 and max(sizes.values()) < 500_000, sizes


def test_every_number_of_the_time_table_is_there_and_sums_to_100(pages: dict[str, Path]) -> None:
    table = pages["run-0"].read_text().rpartition("Where the time went, in % of")[2]
    rows = re.findall(r"<tr><td>\d+</td><td>(?:generation|training)</td>(.*?)</tr>", table.partition("</table>")[0])
    assert len(rows) == 4
    for row in rows:
        *phases, total = (float(cell) for cell in re.findall(r"<td>([\d.]+)</td>", row))
        assert total == pytest.approx(100, abs=1) and sum(phases) == pytest.approx(total, abs=0.05 * len(phases))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    if PROGRAM is None:
        pytest.skip("no Chromium on this machine (Debian: chromium); AREAL_HPC_BROWSER names another one")
    with browser.Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.mark.parametrize(("width", "height", "mobile"), [(1280, 900, False), (390, 844, True)], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["run-0", "three", "empty"])
def test_page_in_a_browser(pages: dict[str, Path], opened: browser.Browser, name: str, width: int, height: int, mobile: bool) -> None:
    opened.events.clear()
    opened.open(pages[name], width, height, mobile=mobile)
    opened.screenshot(pages[name].with_name(f"{name}-{width}.png"))
    assert opened.complaints == []
    assert {url.partition("?")[0] for url in opened.requests} == {pages[name].resolve().as_uri()}
    assert opened.value("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
    shares = opened.value(f"{COLOURED} Promise.all(Array.from(document.images, coloured))")
    titles = opened.value("Array.from(document.images, image => image.alt)")
    assert len(shares) == {"run-0": 16, "three": 12, "empty": 0}[name]
    assert all(share > LEAST_COLOURED for share in shares), list(zip(titles, shares, strict=True))
    small = opened.value("Array.from(document.images, image => image.getBoundingClientRect().width)")
    assert all(width_of_plot >= 330 for width_of_plot in small), "plots that can be read"


def test_an_empty_plot_would_be_noticed(pages: dict[str, Path], opened: browser.Browser) -> None:
    """The measure of the test above, on axes without data."""
    figure, axis = plots.new_figure()
    axis.set(xlabel="training step", ylabel="nothing")
    chart = plots.Chart("empty", "Empty", "", figure)
    opened.open(pages["empty"], 1280, 900)
    share = opened.value(f'{COLOURED} (() => {{ const image = new Image(); image.src = "{chart.svg_uri()}"; return coloured(image); }})()')
    chart.close()
    assert share < LEAST_COLOURED / 10
