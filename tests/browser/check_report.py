"""The page of `distplan report` in a real headless browser. Run by .ci/browser; needs selenium, chromium, chromedriver.

Not collected by a plain `pytest`: the name says so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SMALL = "layers: 16\nhidden: 1024\nheads: 16\nkv_heads: 4\nffn: 4096\ngated: true\nvocab: 32000\n"
HOSTILE = '<script>window.hacked=1</script><img src=x onerror="window.hacked=2">'
NAMES = {"hostile": HOSTILE, "long": "a-very-long-name-without-any-blank-" * 6}
PLANS = {
    "pipeline": ("small", ["--gpus", "8", "--pp", "4", "--tp", "2", "--sp"]),
    "interleaved": ("small", ["--gpus", "16", "--pp", "8", "--vpp", "2"]),
    "one GPU": ("small", ["--gpus", "1"]),
    "many stages": ("small", ["--gpus", "16", "--pp", "16"]),
    "hostile": ("hostile", ["--gpus", "8", "--pp", "2"]),
    "long": ("long", ["--gpus", "8", "--dp-shard", "8", "--zero", "3", "--runtime", "torchtitan"]),
}
CHARTS = ("memory", "communication", "timeline", "front", "scaling")
VIEWS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]


def distplan(*arguments: str, cwd: Path) -> None:
    subprocess.run([sys.executable, "-m", "distplan", *arguments], cwd=cwd, check=True, timeout=300)


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every plan's page, in a folder that SCREENSHOTS may name too."""
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    for number, (name, (model, options)) in enumerate(PLANS.items()):
        (folder / "model.yaml").write_text(f"name: {json.dumps(NAMES.get(model, model))}\n{SMALL}")
        job = ["--global-batch", "32", "--seq-len", "1024", "-o", "plan.yaml", "-q"]
        distplan("estimate", "model.yaml", *options, *job, cwd=folder)
        distplan("report", "plan.yaml", "-o", f"{number}.html", "-q", cwd=folder)
        made[name] = folder / f"{number}.html"
    return made


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def opened(browser: Any, page: Path, width: int, scheme: str) -> None:
    """The page drawn whole, at a width and in a colour scheme, with no message on the console."""
    look(browser, scheme)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("browser")
    browser.get(page.as_uri())
    drawn = "return document.documentElement.dataset.charts"
    WebDriverWait(browser, 10).until(lambda driver: driver.execute_script(drawn) == str(len(CHARTS)))
    assert browser.get_log("browser") == []


def look(browser: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


INK = """
const canvas = document.getElementById(arguments[0]);
const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const hex = (v) => v.toString(16).padStart(2, "0");
const seen = {};
for (let i = 0; i < data.length; i += 4)
  if (data[i + 3] > 250) {
    const colour = `#${hex(data[i])}${hex(data[i + 1])}${hex(data[i + 2])}`;
    seen[colour] = (seen[colour] || 0) + 1;
  }
const filled = (value) => value !== 0 && value !== null && value.y !== null;
const sets = Chart.getChart(canvas).data.datasets.filter((set) => set.data.some(filled));
return [canvas.clientWidth, canvas.clientHeight, sets.length, sets.filter((s) => seen[s.backgroundColor] > 3).length];
"""
"""width, height, series that have data, series whose colour is seen"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
LUMINANCE = """
const channel = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
const light = (colour) => {
  const [r, g, b] = colour.match(/[0-9.]+/g).map(Number);
  return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
};
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)$/.test(colour) && colour !== "transparent") return colour;
  }
  return "rgb(255, 255, 255)";
};
return [...document.querySelectorAll("h1, h2, p, dt, dd, code, strong, summary, th, td")].map((node) => {
  const style = getComputedStyle(node), a = light(style.color), b = light(behind(node));
  return [node.tagName, parseFloat(style.fontSize), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
});
"""


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", PLANS)
def test_every_figure_is_drawn_and_nothing_overflows(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    opened(browser, pages[name], width, scheme)
    for chart in CHARTS:
        wide, high, series, seen = browser.execute_script(INK, chart)
        assert wide > 200, chart
        assert high > 80, chart
        silent = (name, chart) == ("one GPU", "communication")
        assert silent or seen > 0, chart
        # thin parts of a stack may be covered by their neighbours' edges; a dashed line has no area
        assert silent or seen >= series / 2, chart
    assert browser.execute_script(OVERFLOW) <= 0


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_tables_unfold_without_widening_the_page(
    browser: Any, pages: dict[str, Path], width: int, scheme: str
) -> None:
    opened(browser, pages["pipeline"], width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert browser.execute_script(OVERFLOW) <= 0
    rows = browser.execute_script(
        "return [...document.querySelectorAll('figure tbody')].map((t) => [t.rows.length, t.clientHeight])"
    )
    assert len(rows) == len(CHARTS)
    assert all(count > 0 and height > 0 for count, height in rows)


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_text_is_large_and_dark_enough(browser: Any, pages: dict[str, Path], width: int, scheme: str) -> None:
    """WCAG 2.1 AA: a contrast of 4.5 for text."""
    opened(browser, pages["pipeline"], width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    for tag, size, contrast in browser.execute_script(LUMINANCE):
        assert size >= 12.0, tag
        assert contrast >= 4.5, tag


def test_nothing_is_asked_of_the_network(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["pipeline"], 1280, "light")
    assert browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)") == []


def test_a_hostile_name_is_shown_and_not_run(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["hostile"], 1280, "light")
    assert browser.execute_script("return window.hacked === undefined")
    assert HOSTILE in browser.execute_script("return document.querySelector('h1').textContent")
    assert HOSTILE in browser.title
    assert browser.execute_script("return document.scripts.length") == 3


def test_a_change_of_scheme_redraws(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["pipeline"], 1280, "light")
    picture = "return document.getElementById('memory').toDataURL()"
    light = browser.execute_script(picture)
    look(browser, "dark")
    WebDriverWait(browser, 10).until(lambda driver: driver.execute_script(picture) != light)
    assert browser.get_log("browser") == []


def test_a_job_tells_its_time_under_the_pointer(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["pipeline"], 1280, "light")
    shown = browser.execute_script(
        "const chart = Chart.getChart('timeline'), bar = chart.getDatasetMeta(0).data[0];"
        "chart.tooltip.setActiveElements([{ datasetIndex: 0, index: 0 }], { x: bar.x, y: bar.y }); chart.update();"
        "return chart.tooltip.body[0].lines[0];"
    )
    assert shown.startswith("F0: 0")
