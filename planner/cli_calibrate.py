"""`calibrate`: what was typed, the errors before and after on stdout, the hardware file beside and renamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from distplan.costmodel.workload import default
from distplan.hardware.documents import write_atomically
from distplan.hardware.fit_collectives import COLLECTIVES
from distplan.planner.calibrate import benchmark_script, calibrate, document, write_hardware
from distplan.planner.cli_show import show
from distplan.planner.inputs import InputError, one_number, one_word
from distplan.planner.report import heading, line, table
from distplan.planner.terminal import clean, say, write_data
from distplan.planner.wording import gib

Options = dict[str, Any]


def run_calibrate(files: Sequence[str], options: Options) -> int:
    """Exit code 0. Raises DistplanError for a file that is wrong; the output is then as it was."""
    output, quiet = options["output"], options["quiet"]
    if options["emit_benchmark"]:
        if files:
            raise InputError("--emit-benchmark writes the script and reads no file")
        if not output:
            write_data(benchmark_script())
            return 0
        write_atomically(output, benchmark_script())
        say(f"wrote {output}: run it with python, or with torchrun for collectives", quiet=quiet)
        return 0
    if not files:
        raise InputError("a file is missing: bench.json, nccl-tests' text or runs.csv (or --emit-benchmark)")
    hardware = default("hardware") if options["hardware"] is None else options["hardware"]
    given = {name: None if options[name] is None else one_number(f"--{name}", options[name]) for name in _COUNTS}
    named = options["collective"]
    cluster, done = calibrate(
        files,
        hardware,
        runtime=options["runtime"],
        collective=None if named is None else one_word("--collective", named, COLLECTIVES),
        **given,
    )
    shown = document(cluster, done)
    rows = [{"file": each["file"], **row} for each in shown["files"] for row in each["residuals"]]
    if output:
        write_hardware(output, hardware, cluster)
    code = show(shown, rows, options, list(report(shown)))
    for each in shown["files"]:
        for note in each["notes"]:
            say(f"distplan: {each['file']}: {clean(note)}", quiet=quiet)
    said = f"wrote {output}" if output else "nothing is written; -o FILE writes a hardware file with these constants"
    say(said, quiet=quiet)
    return code


_COUNTS = ("ranks", "nodes")


def report(shown: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(f"Calibration of {clean(shown['hardware'])}", style="bold")
    for each in shown["files"]:
        number = f"{each['measurements']} {'runs' if each['kind'] == 'runs' else 'measurements'}"
        yield heading(f"{each['file']}: {number}; error, median and 90th percentile")
        rows = [(row["kind"], str(row["points"]), *_errors(row)) for row in each["residuals"]]
        yield table(("", "n", "before", "", "after", ""), rows)
        if each["constants"]:
            yield line("")
            moved = [
                (row["name"], _value(row["name"], row["before"]), _value(row["name"], row["after"]), str(row["points"]))
                for row in each["constants"]
            ]
            yield table(("constant", "before", "after", "n"), moved)


def _errors(row: Mapping[str, Any]) -> Iterator[str]:
    for name in ("before_median", "before_p90", "after_median", "after_p90"):
        yield f"{100 * row[name]:.1f} %"


def _value(name: str, value: float) -> str:
    return gib(value) if name.endswith("bytes") else f"{value:.4g}"
