"""What a planner must get right by users' own accounts: the verdict on every row of an acceptance file.

    python -m benchmarks.acceptance FILE [--format json] [--row ID]

holds, fails, undecided (a fact is missing, and its extremes disagree), cannot answer (with the reason). The words of
the rows are in acceptance_words.yaml. Ends with 1 if a row fails, 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from benchmarks.acceptance_measured import answered, fits, gpu_counts, memory, rank, rate
from benchmarks.acceptance_rows import VERDICTS, Answer, Row
from benchmarks.acceptance_rules import least_gpus, rule
from distplan.hardware.errors import DistplanError

ASK = {"rules": rule, "fits": fits, "memory": memory, "rank": rank, "rate": rate}
SECTIONS = ("rules", "min_gpus", "fits", "memory", "rank", "rate")


def read(path: str) -> Mapping[str, Sequence[Row]]:
    """Sections of rows, each with an id. Raises DistplanError."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise DistplanError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise DistplanError(f"{path}: sections {', '.join(SECTIONS)} are expected")
    unknown = sorted(set(content) - set(SECTIONS))
    if unknown:
        raise DistplanError(f"{path}: section '{unknown[0]}' is not one of {', '.join(SECTIONS)}")
    for section, rows in content.items():
        if not isinstance(rows, list) or not all(isinstance(row, dict) and "id" in row for row in rows):
            raise DistplanError(f"{path}: {section}: rows with an id are expected")
    return content


def answers(sections: Mapping[str, Sequence[Row]], only: str | None = None) -> Iterator[Answer]:
    for section in SECTIONS:
        for row in sections.get(section, ()):
            if only not in (None, row["id"]):
                continue
            ask = ASK.get(section) or (least_gpus if "min_gpus" in row else gpu_counts)
            yield answered(ask, row, section)


def lines(found: Sequence[Answer]) -> Iterator[str]:
    for answer in found:
        yield f"{answer.id:5} {answer.kind:8} {answer.verdict:13} {answer.said}"
        if answer.missing:
            yield f"{'':29}not given: {', '.join(answer.missing)}"
    counts = Counter(answer.verdict for answer in found)
    yield "  ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)


def document(found: Sequence[Answer]) -> dict[str, Any]:
    counts = Counter(answer.verdict for answer in found)
    return {"rows": [asdict(answer) for answer in found], "counts": {verdict: counts[verdict] for verdict in VERDICTS}}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("file", help="rows in the form of tests/data/acceptance.yaml")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--row", help="only the row with this id")
    options = parser.parse_args(arguments)
    try:
        found = list(answers(read(options.file), options.row))
    except DistplanError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(document(found), indent=2) if options.format == "json" else "\n".join(lines(found)))
    return int(any(answer.verdict == "fails" for answer in found))


if __name__ == "__main__":
    sys.exit(main())
