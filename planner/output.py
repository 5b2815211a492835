"""Plain data as JSON, YAML or CSV. Keys stay in their fixed order, so equal data are equal bytes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from distplan.hardware.parsing import ParseProblem, number_or_text

FORMATS = ("table", "json", "yaml", "csv")


class _Dumper(yaml.SafeDumper):
    """Quotes text that a YAML 1.2 reader would take for a number (1e3), repeats what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        style = None if isinstance(number_or_text(text, None), str) else "'"
    except ParseProblem:
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line per row, nested fields dotted (time.bubble); lists are joined by spaces, null is empty."""
    flat = [dict(_flat(row)) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            if all(isinstance(item, str | int | float) for item in value):
                yield f"{prefix}{name}", " ".join(str(item) for item in value)
        else:
            yield f"{prefix}{name}", _cell(value)


def _cell(value: Any) -> Any:
    """Booleans as in JSON; text that a spreadsheet would run as a formula gets a quote before it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return "" if value is None else value
