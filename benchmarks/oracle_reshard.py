"""Our resharding against the programs that PaddlePaddle 3.3.1 inserts (paddle_reshard*)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.oracle_schedules import read_lines
from benchmarks.oracle_spmd import SpmdTally
from distplan.costmodel.paddle_attr import RuleRefusedError
from distplan.costmodel.paddle_reshard import Transition, reshard

ELEMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float64": 8.0}


def answer(case: Mapping[str, Any]) -> Transition:
    return reshard(
        case["mesh"],
        case["shape"],
        case["src"],
        case["dst"],
        element_bytes=ELEMENT_BYTES[case["dtype"]],
        to_other_mesh="dst_mesh_ids" in case,
    )


def agrees(case: Mapping[str, Any]) -> bool:
    """Operators in order; collectives with ranks and bytes (shapes only, where the file has no more)."""
    try:
        ours = answer(case)
    except RuleRefusedError:
        return "error" in case
    if "error" in case or list(ours.ops) != case["ops"] or len(ours.collectives) != len(case["comm"]):
        return False
    for mine, real in zip(ours.collectives, case["comm"], strict=True):
        payload = real.get("bytes_in_local", math.prod(real["in_local"]) * ELEMENT_BYTES[case["dtype"]])
        if mine.op != real["op"] or mine.payload_bytes != payload:
            return False
        if "ranks" in real and list(mine.ranks) != real["ranks"]:
            return False
    return True


def check(path: Path) -> dict[str, SpmdTally]:
    """Tally per mesh and kind of transition."""
    tallies: dict[str, SpmdTally] = {}
    for case in read_lines(path):
        where = "across meshes" if "dst_mesh_ids" in case else f"{len(case['mesh'])}-d mesh"
        tally = tallies.setdefault(f"reshard, {where}", SpmdTally())
        tally.total += 1
        if agrees(case):
            tally.agree += 1
            tally.refused += "error" in case
        else:
            tally.differ.append(f"{case['id']} {where}")
    return tallies
