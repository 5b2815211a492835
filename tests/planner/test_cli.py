"""The command line: exit codes, clean stdout, one message for every mistake, and never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import distplan
from distplan.planner.cli import EXIT_CODES, app, run

MODEL = """\
name: small
layers: 8
hidden: 1024
heads: 16
kv_heads: 4
ffn: 4096
gated: true
vocab: 32000
max_seq_len: 4096
"""
SMALL = ["--gpus", "8", "--global-batch", "64", "--seq-len", "2048"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a small model in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.yaml").write_text(MODEL)
    return tmp_path


def command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60} | options
    return subprocess.run([sys.executable, "-m", "distplan", *arguments], check=False, **settings)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """stderr of a command that must end with code 2, one line, no traceback and nothing on stdout."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
    return err


# ---------------------------------------------------------------- what works


def test_search_prints_the_report_and_writes_the_strategy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "model.yaml", *SMALL]) == 0
    out, err = capsys.readouterr()
    for said in ("small on 8 GPUs of dgx-h100", "Step time", "Communication", "Memory", "MFU", "HFU"):
        assert said in out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert err == "wrote strategy.yaml\n"
    assert "\x1b" not in out


def test_estimate_of_the_file_is_what_search_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "model.yaml", *SMALL, "--format", "json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)["best"]
    assert run(["estimate", "strategy.yaml", "--format", "json"]) == 0
    again = json.loads(capsys.readouterr().out)["best"]
    assert again | {"tie": False} == found | {"tie": False}


def test_the_same_search_writes_the_same_bytes(folder: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        assert run(["search", "model.yaml", *SMALL, "-o", name, "-q"]) == 0
    assert Path("a.yaml").read_bytes() == Path("b.yaml").read_bytes()
    assert not Path("strategy.yaml").exists()


@pytest.mark.parametrize("form", ["json", "yaml", "csv"])
def test_data_on_stdout_is_clean(folder: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "model.yaml", *SMALL, "--format", form, "--no-write"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    if form == "csv":
        assert "strategy.tp" in out.splitlines()[0]
    else:
        data = json.loads(out) if form == "json" else yaml.safe_load(out)
        assert data["format_version"] == "1.0"
        assert data["best"]["strategy"].keys() >= {"tp", "pp", "dp_shard", "zero", "recompute"}
    assert not Path("strategy.yaml").exists()


def test_bounds_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounds = ["--tp", "2,4", "--no-sp", "--zero", "1", "--tensor-model-parallel-size", "4", "--dp", "1..2"]
    assert run(["search", "model.yaml", *SMALL, *bounds, "--format", "json", "-q"]) == 0
    shown = json.loads(capsys.readouterr().out)
    for chosen in (shown["best"], *shown["runners_up"]):
        strategy = chosen["strategy"]
        assert (strategy["tp"], strategy["sp"]) == (4, False)
        assert strategy["dp_replicate"] * strategy["dp_shard"] <= 2


def test_several_counts_and_batches_in_one_search(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--gpus", "4..8", "--global-batch", "32,64", "--seq-len", "2048", "--objective", "cost"]
    assert run(["search", "model.yaml", *asked, "--format", "json", "-q"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["gpus"], shown["global_batches"]) == ([4, 8], [32, 64])


def test_hardware_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("lab.yaml").write_text(HARDWARE)
    assert run(["search", "model.yaml", *SMALL, "--hardware", "lab.yaml", "-q"]) == 0
    Path("lab.yaml").unlink()
    assert run(["estimate", "strategy.yaml"]) == 0
    assert "8 GPUs of lab" in capsys.readouterr().out


def test_show_has_parameters_and_sources(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "show", "model.yaml", "--graph", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    # 2 embeddings, and per layer q and out h², k and v h²/4 each, three MLP matrices, two norms; a last norm
    hidden, ffn = 1024, 4096
    layer = 2 * hidden**2 + 2 * hidden * hidden // 4 + 3 * hidden * ffn + 2 * hidden
    assert shown["parameters"] == shown["active_parameters"] == 2 * 32000 * hidden + 8 * layer + hidden
    assert run(["hardware", "show", "h100-sxm", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)["accelerator"]["facts"]
    assert all(fact["status"] in ("measured", "nominal", "unverified") and fact["sources"] for fact in facts.values())


@pytest.mark.parametrize("arguments", [["hardware", "list"], ["models", "list"], ["hardware", "show", "a100-80g"]])
def test_lists_fit_80_columns(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80


def test_version_names_the_data_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"distplan {distplan.__version__}\n")
    assert "sha256:" in out
    assert "megatron" in out


# ---------------------------------------------------------------- exit code 3


def test_nothing_fits_is_3_with_the_binding_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("strategy.yaml").write_text("mine")
    assert run(["search", "llama-3.1-70b", "--gpus", "1", "--global-batch", "8", "--seq-len", "2048"]) == 3
    out = capsys.readouterr().out
    assert "Nothing fits on 1 GPU.\n" in out
    assert "stage 0 lacks" in out
    assert "smallest count that fits" in out
    assert Path("strategy.yaml").read_text() == "mine"


def test_nothing_legal_is_3_with_the_neighbours(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "model.yaml", "--gpus", "11", "--global-batch", "64", "--format", "json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["why_nothing"]["reason"] == "nothing_legal"
    assert "No strategy is legal on 11 GPUs" in err


def test_a_strategy_that_no_rule_allows_is_3_with_its_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "model.yaml", *SMALL, "--pp", "8", "--vpp", "3"]) == 3
    err = capsys.readouterr().err
    assert "DP0" in err
    assert "Traceback" not in err


def test_a_strategy_that_does_not_fit_is_3_and_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "model.yaml", *SMALL, "--memory-limit", "1GiB"]) == 3
    assert "does not fit" in capsys.readouterr().out


# ---------------------------------------------------------------- exit code 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["search", "model.yaml"], "--gpus is missing"),
        (["search", "model.yaml", "--gpus", "0"], "--gpus 0: at least 1"),
        (["search", "model.yaml", "--gpus", "-8"], "--gpus -8"),
        (["search", "model.yaml", "--gpus", "64", "--tp", "x"], "--tp 'x'"),
        (["search", "model.yaml", "--gpus", "64", "--hardware", "h1000"], "unknown hardware 'h1000'; did you mean"),
        (["search", "model.yaml", "--gpus", "64", "--runtime", "megatrn"], "did you mean megatron"),
        (["search", "model.yaml", "--gpus", "64", "--recompute", "ful"], "did you mean full"),
        (["search", "model.yaml", "--gpus", "64", "--precision", "bf61"], "bf16"),
        (["search", "model.yaml", "--gpus", "64", "--optimizer", "adamv"], "adamw"),
        (["search", "model.yaml", "--gpus", "64", "--reserve", "10"], "--reserve '10' has no unit"),
        (["search", "model.yaml", "--gpus", "64", "--memory-limit", "10 parsecs"], "--memory-limit"),
        (["search", "model.yaml", "--gpus", "64", "--memory-limit", "0GiB"], "more than 0"),
        (["search", "model.yaml", "--gpus", "64", "--reserve", "90GiB"], "leaves nothing of the 79.11 GiB"),
        (["estimate", "model.yaml", "--gpus", "64", "--reserve", "90GiB"], "leaves nothing"),
        (["search", "model.yaml", "--gpus", "64", "--hardware", "dgx-v100"], "needs products in bf16"),
        (["search", "", "--gpus", "64"], "'': is no name"),
        (["search", "model.yaml", "--gpus", "64", "--objective", "speed"], "--objective speed"),
        (["search", "model.yaml", "--gpus", "64", "--objective", "cost"], "several"),
        (["search", "model.yaml", "--gpus", "64", "--format", "xml"], "--format xml"),
        (["search", "model.yaml", "--gpus", "64", "--mesh-order", "tp,pp"], "--mesh-order"),
        (["search", "model.yaml", "--gpus", "64", "--global-batch", "0"], "--global-batch 0"),
        (["search", "model.yaml", "--gpus", "64", "--seq-len", "99999999999"], "--seq-len"),
        (["search", "model.yaml", "--gpus", "64", "--topp", "3"], "--topp"),
        (["search", "model.yaml", "--gpus", "64", "--top", "0"], "--top"),
        (["search", "lama-3.1-70b", "--gpus", "64"], "did you mean llama-3.1-70b"),
        (["search", "absent/model.yaml", "--gpus", "64"], "no such file"),
        (["search", ".", "--gpus", "64", "--hardware", "."], "."),
        (["search", "\0", "--gpus", "64"], "path"),
        (["estimate", "model.yaml", "--gpus", "64", "--tp", "7"], "63 or 70"),
        (["estimate", "model.yaml", "--gpus", "64", "--global-batch", "1,2"], "estimate takes one"),
        (["hardware", "show", "h1000"], "did you mean"),
        (["models", "show", "nope.json"], "no such file"),
        (["serch"], "serch"),
    ],
)
def test_bad_usage_is_2_with_one_message(
    folder: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(arguments, capsys)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MODEL.replace("hidden: 1024\n", ""), "'hidden' is missing"),
        (MODEL.replace("hidden:", "hiden:"), "model.yaml"),
        (MODEL.replace("hidden: 1024", "hidden: -1024"), "model.yaml:3: hidden: -1024 is too small"),
        (MODEL.replace("hidden: 1024", "hidden: 1e3"), "model.yaml:3: hidden"),
        (MODEL.replace("hidden: 1024", "hidden: wide"), "model.yaml:3: hidden"),
        (MODEL.replace("layers: 8", "layers: 100000000"), "model.yaml:2: layers"),
        (MODEL.replace("kv_heads: 4", "kv_heads: 3"), "kv_heads"),
        (MODEL + "hiddden: 5\n", "did you mean hidden"),
        (MODEL + "hidden: 5\n", "duplicate key"),
        (MODEL + "x: !!python/object/apply:os.system ['echo']\n", "tag"),
        (BOMB, "aliases"),
        ("[" * 5000, "nesting depth"),
        ("a: b: c", "YAML"),
        ("- 1\n- 2\n", "keys and values"),
        ("", "empty"),
        ("layers: .nan\n", "model.yaml"),
        ("\x00\x01", "model.yaml"),
    ],
    ids=lambda value: str(value)[:24].replace("\n", " "),
)
def test_a_bad_model_file_is_2_with_file_and_place(
    folder: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("model.yaml").write_text(text)
    message = refused(["search", "model.yaml", *SMALL], capsys)
    assert says in message
    assert "model.yaml" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model_type": "resnet", "hidden_sizes": [64, 128], "num_labels": 10}', "resnet"),
        ('{"model_type": "whisper", "d_model": 512, "encoder_layers": 6}', "whisper"),
        ("{}", "config.json"),
        ("[1, 2]", "config.json"),
        ('{"model_type": "llama", "hidden_size": NaN}', "config.json:1"),
        ('{"model_type": "llama"', "JSON"),
        ("nonsense", "JSON"),
    ],
)
def test_a_config_that_is_no_language_model_is_2(
    folder: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("config.json").write_text(text)
    assert says in refused(["search", "config.json", *SMALL], capsys)


HARDWARE = """\
accelerator: a100-sxm4-80gb
gpus_per_node: 4
scaleup: {technology: nvlink3, bandwidth: 300 GB/s}
fabric: {technology: infiniband, bandwidth: 25 GB/s}
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("300 GB/s", "300", "lab.yaml:3: scaleup.bandwidth: 300 has no unit"),
        ("300 GB/s", "300 GiB", "lab.yaml:3: scaleup.bandwidth"),
        ("300 GB/s", "-300 GB/s", "negative"),
        ("25 GB/s", "25 PB/s", "out of range"),
        ("gpus_per_node: 4", "gpus_per_node: 0", "lab.yaml:2: gpus_per_node"),
        ("gpus_per_node: 4", "gpu_per_node: 4", "did you mean gpus_per_node"),
        ("nvlink3", "nvlnk3", "lab.yaml:3: scaleup.technology"),
        ("a100-sxm4-80gb", "a100-sxm4-80g", "lab.yaml:1: accelerator"),
        ("fabric:", "fabrik:", "fabri"),
    ],
)
def test_a_bad_hardware_file_is_2_with_file_line_and_key(
    folder: Path, old: str, new: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lab.yaml").write_text(HARDWARE.replace(old, new))
    assert says in refused(["search", "model.yaml", *SMALL, "--hardware", "lab.yaml"], capsys)


def test_a_sparse_gigabyte_is_refused_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open("model.yaml", "wb") as stream:
        stream.truncate(10**9)
    started = time.monotonic()
    assert "too large" in refused(["search", "model.yaml", *SMALL], capsys)
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize("place", ["/dev/full", ".", "absent/s.yaml", "model.yaml/s.yaml", "/dev/null"])
def test_an_unwritable_output_is_2_and_leaves_nothing(
    folder: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["search", "model.yaml", *SMALL, "-o", place]) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1
    assert place in err
    assert sorted(path.name for path in folder.iterdir()) == ["model.yaml"]


def test_a_full_disk_under_stdout_is_2_without_a_traceback(folder: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = command("models", "list", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == "distplan: standard output: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_fault(folder: Path, closed: str) -> None:
    line = f"{shlex.quote(sys.executable)} -m distplan search model.yaml {' '.join(SMALL)} -o closed.yaml {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, Path("closed.yaml").exists()) == (0, True)
    assert "fault" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_narrow_terminal_loses_no_digit(folder: Path) -> None:
    wide, narrow = (terminal_output(columns, "search", "model.yaml", *SMALL) for columns in (100, 12))
    number = re.compile(r"[\d.,]+ (?:[kMGT]?B|[mµ]?s|GiB|%)(?![\w/])")
    assert number.findall(wide.split("Runners-up")[0]) == number.findall(narrow.split("Runners-up")[0])


def terminal_output(columns: int, *arguments: str) -> str:
    """What the command shows in a terminal of so many columns, lines as it wrote them."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"NO_COLOR": "1"}
    command_line = [sys.executable, "-m", "distplan", *arguments, "--quiet"]
    with subprocess.Popen(command_line, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as running:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says so where the other side has closed
            while piece := os.read(ours, 65536):
                shown += piece
        os.close(ours)
    assert running.returncode == 0
    return shown.decode()


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = command("models", "list", capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- exit codes 1 and 130


def test_a_fault_of_ours_is_1_and_asks_for_a_report(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise RuntimeError("we did\x1b[31m this")

    monkeypatch.setattr("distplan.planner.cli_show.catalogue.models", broken)
    assert run(["models", "list"]) == 1
    err = capsys.readouterr().err
    assert "please report" in err
    assert "\x1b" not in err
    assert "Traceback" not in err
    assert run(["models", "list", "-v"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(folder: Path) -> None:
    asked = ["search", "llama-3.1-405b", "--gpus", "16384", "--runtime", "any", "--sensitivity", "--no-write"]
    # the list of imports says when the command has begun, however busy the machine is
    running = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "distplan", *asked],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stderr
    assert any("distplan.planner.cli_run" in imported for imported in running.stderr)
    time.sleep(0.5)
    assert running.poll() is None, "the search ended before it could be interrupted"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "Traceback" not in err


# ---------------------------------------------------------------- help, terminals


def test_help_is_quick_and_names_the_exit_codes() -> None:
    started = time.monotonic()
    done = command("search", "--help")
    assert time.monotonic() - started < 2.0  # 0.2 s alone; a generous ceiling on a shared machine
    assert done.returncode == 0
    text = " ".join(done.stdout.replace("\n", " ").split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in text
    for option in ("--tp", "--tensor-model-parallel-size", "--global-batch", "--reserve", "--mesh-order", "--format"):
        assert option in text


def test_nothing_but_ascii_where_the_terminal_knows_no_more(folder: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = command("search", "model.yaml", *SMALL, env=environment)
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "#" in done.stdout


def test_completion_is_there() -> None:
    assert any(parameter.name == "show_completion" for parameter in __import__("typer").main.get_command(app).params)
