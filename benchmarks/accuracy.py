"""How close predictions come to published, measured runs.

    python -m benchmarks.accuracy runs.csv [--format json] [--row ID]

Takes any file with the columns of the project's truth files (docs: benchmarks/truth_defaults.yaml says how
what a row leaves out is filled).
"""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.accuracy_predict import Predicted, predict
from benchmarks.accuracy_print import document, text
from benchmarks.accuracy_rows import read_rows, select
from distplan.hardware.errors import DistplanError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("file", help="a truth file (CSV)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    try:
        selection = select(read_rows(options.file))
        predicted = predict(selection.due)
        if options.format == "json":
            print(json.dumps(document(selection, predicted), indent=2))
            return 0
        apart: dict[str, Predicted] = {name: predict(rows) for name, rows in selection.apart.items()}
        print(text(selection, predicted, apart))
    except DistplanError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
