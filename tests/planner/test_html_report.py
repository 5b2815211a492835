"""The page of `distplan report`: self-contained, escaped, the same every time, and its numbers are the estimate's."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from distplan.planner import html_report
from distplan.planner.cli import run
from distplan.planner.html_report import scaled_counts

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
MODEL = "layers: 8\nhidden: 1024\nheads: 16\nkv_heads: 4\nffn: 4096\ngated: true\nvocab: 32000\n"
JOB = ["--gpus", "8", "--global-batch", "32", "--seq-len", "2048", "--pp", "2", "--tp", "2", "--sp", "-o", "plan.yaml"]
VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """Elements with their attributes, the text of each script, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a model with a hostile name, and its page."""
    where = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        Path("model.yaml").write_text(f"name: {json.dumps(HOSTILE)}\n{MODEL}")
        assert run(["estimate", "model.yaml", *JOB]) == 0
        assert run(["report", "plan.yaml", "-o", "page.html", "--gpus", "4,8,16", "-q"]) == 0
    return where


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


@pytest.fixture(scope="module")
def data(page: Page) -> Any:
    return json.loads(page.scripts[0])


def test_nothing_is_loaded_from_anywhere(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes
        assert attributes.get("href") in (None, "data:,")
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "unsafe" not in policy


def test_only_our_scripts_may_run_and_they_are_the_whole_page_has(html: str, page: Page) -> None:
    allowed = re.findall(r"'sha256-([^']+)'", html.split("<style>", maxsplit=1)[0])
    style = html.split("<style>")[1].split("</style>", maxsplit=1)[0]
    assert len(page.scripts) == 3
    inline = [style, *page.scripts[1:]]
    assert allowed == [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]


def test_a_hostile_name_is_only_text(html: str, page: Page) -> None:
    assert HOSTILE in page.text
    assert "<script>alert" not in html
    assert not [a for tag, a in page.elements if any(name.startswith(("on", "style")) for name in a)]


def test_the_licence_of_the_library_travels_with_it(page: Page) -> None:
    assert "Released under the MIT License" in page.scripts[1]
    assert "sourceMappingURL" not in page.scripts[1]


def test_the_same_plan_gives_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch, html: str) -> None:
    monkeypatch.chdir(folder)
    assert run(["report", "plan.yaml", "-o", "again.html", "--gpus", "4,8,16", "-q"]) == 0
    assert Path("again.html").read_text(encoding="utf-8") == html


def test_every_figure_has_a_canvas_and_its_numbers(page: Page, data: Any) -> None:
    canvases = [a["id"] for tag, a in page.elements if tag == "canvas"]
    assert canvases == ["memory", "communication", "timeline", "front", "scaling"] == list(data)
    assert len([tag for tag, _ in page.elements if tag == "figure"]) == len(canvases)


def test_the_numbers_are_the_estimates(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Any
) -> None:
    monkeypatch.chdir(folder)
    assert run(["estimate", "plan.yaml", "--format", "json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    gib = 2.0**30
    stacks = [sum(part["gib"][stage] for part in data["memory"]["parts"]) for stage in range(2)]
    assert max(stacks) == pytest.approx(best["device_bytes"] / gib, rel=1e-4)
    assert data["memory"]["usable"] == pytest.approx(best["usable_bytes"] / gib, rel=1e-5)
    moved = sum(row["seconds"] for row in best["communication"])
    drawn = sum(data["communication"]["exposed"]) + sum(data["communication"]["hidden"])
    assert drawn == pytest.approx(moved, rel=1e-4)
    assert data["front"]["plan"]["x"] == best["step_seconds"]
    unit = {"s": 1.0, "ms": 1e3}[data["timeline"]["unit"]]
    assert data["timeline"]["end"] == pytest.approx(best["step_seconds"] * unit, rel=1e-4)
    scaling = data["scaling"]
    assert scaling["counts"] == [4, 8, 16]
    assert scaling["same"][1] == pytest.approx(best["tokens_per_second_per_gpu"] * 8 / 1e3, rel=1e-5)


def test_the_front_falls_and_nothing_at_a_count_beats_the_best(data: Any) -> None:
    points = sorted((point["x"], point["y"]) for point in data["front"]["points"])
    assert len(points) > 1
    assert [memory for _, memory in points] == sorted((memory for _, memory in points), reverse=True)
    for same, best in zip(data["scaling"]["same"], data["scaling"]["best"], strict=True):
        assert same is None or best is None or best >= same * (1 - 1e-6)


def test_the_timeline_holds_every_job(data: Any) -> None:
    boxes = data["timeline"]["boxes"]
    for stage in range(2):
        mine = [box for box in boxes if box[0] == stage]
        assert sorted(box[4] for box in mine if box[1] == 0) == sorted(f"F{i}" for i in range(16))
        assert sorted(box[4] for box in mine if box[1] == 1) == sorted(f"B{i}" for i in range(16))
        assert [box[4] for box in mine if box[1] == 4] == ["optimizer"]


@pytest.mark.parametrize(
    ("gpus", "per_node", "expected"),
    [(64, 8, (16, 32, 64, 128, 256)), (1, 8, (1, 2, 4)), (8, 8, (2, 4, 8, 16, 32)), (24, 8, (24, 48, 96))],
)
def test_counts_are_nodes_or_parts_of_one(gpus: int, per_node: int, expected: tuple[int, ...]) -> None:
    assert scaled_counts(gpus, per_node) == expected


def test_a_single_gpu_has_a_report_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text(f"name: small\n{MODEL}")
    job = ["--gpus", "1", "--global-batch", "8", "--seq-len", "2048", "-o", "plan.yaml", "-q"]
    assert run(["estimate", "model.yaml", *job]) == 0
    assert run(["report", "plan.yaml", "-q"]) == 0
    made = Page(Path("report.html").read_text(encoding="utf-8"))
    assert "nobody to talk to" in made.text
    assert json.loads(made.scripts[0])["scaling"]["counts"] == [1, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.yaml"], "absent.yaml"),
        (["model.yaml"], "model.yaml"),
        (["plan.yaml", "--gpus", "1..4096"], "at most 16"),
        (["plan.yaml", "--gpus", "x"], "--gpus 'x'"),
        (["plan.yaml", "--gpus", "8", "-o", "absent/page.html"], "absent/page.html"),
    ],
)
def test_refusals_are_one_line_and_exit_2(
    arguments: list[str], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert run(["report", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not Path("report.html").exists()


def test_an_interrupt_writes_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.chdir(folder)
    monkeypatch.setattr(html_report, "search_setting", interrupted)
    assert run(["report", "plan.yaml", "-o", str(tmp_path / "page.html")]) == 130
    assert list(tmp_path.iterdir()) == []
