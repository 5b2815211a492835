"""Our job lists against those that Paddle and PyTorch made: paddle_jobs*.jsonl, torch_schedules*.jsonl.

`check(path)` reads either format, plain or .gz, and counts per rule how many cases agree.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distplan.costmodel.schedules import Schedule, ScheduleError, build_schedule, with_communication
from distplan.costmodel.schedules_orders import Job

PADDLE_NAMES = {
    "FThenB": ("f_then_b", "paddle"),
    "1F1B": ("1f1b", "paddle"),
    "Eager1F1B": ("eager_1f1b", "paddle"),
    "ZBH1": ("zb_h1", "paddle"),
    "VPP": ("interleaved", "paddle"),
    "ZBVPP": ("zb_v", "paddle"),
}
TORCH_NAMES = {
    "GPipe": "f_then_b",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipe_v",
}
PADDLE_KINDS = {
    "F": "forward", "B": "backward", "I": "backward_b", "W": "backward_w", "RECV_F": "recv_forward",
    "SEND_B": "send_backward", "OPT": "optimizer",
}  # fmt: skip
TORCH_KINDS = {"REDUCE": "REDUCE_GRAD"}


@dataclass(slots=True)
class Tally:
    """Cases of one rule: how many agree, and the first that differ, each in a sentence."""

    agree: int = 0
    total: int = 0
    differ: list[str] = field(default_factory=list)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl or .jsonl.gz file."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    yield from (json.loads(line) for line in text.splitlines() if line.strip())


def check(path: Path) -> dict[str, Tally]:
    """Per rule (schedule, and its variant) the tally of a file whose name begins with paddle_jobs or torch_schedules.

    Raises ValueError for any other name.
    """
    if path.name.startswith("paddle_jobs"):
        compare = compare_paddle
    elif path.name.startswith("torch_schedules"):
        compare = compare_torch
    else:
        raise ValueError(f"{path.name}: neither paddle_jobs nor torch_schedules")
    tallies: dict[str, Tally] = {}
    for number, case in enumerate(read_lines(path), 1):
        rule, difference = compare(case)
        tally = tallies.setdefault(rule, Tally())
        tally.total += 1
        if difference:
            tally.differ.append(f"{path.name}:{number} {rule}: {difference}")
        else:
            tally.agree += 1
    return tallies


def compare_paddle(case: Mapping[str, Any]) -> tuple[str, str]:
    """(rule, what differs or '')."""
    name, dialect = PADDLE_NAMES[case["schedule"]]
    if name == "interleaved" and not case["pir"]:
        dialect = "megatron"
    rule = f"paddle {case['schedule']}" + ("" if case["pir"] else " without PIR")
    if case.get("door") == "pass":
        rule, dialect = rule + " pass", "paddle_pass"
    options: dict[str, Any] = {"split_backward": bool(case.get("split_backward"))}
    if case.get("door") == "VScheduleCreator":
        rule += " " + str(case["program_runtimes"])
        options["times"] = dict(zip(("F", "I", "W", "loss", "comm"), case["program_runtimes"], strict=True))
    try:
        made = build_schedule(
            name, stages=case["stages"], micro_batches=case["micro_batches"], chunks=case["vpp"], dialect=dialect,
            **options,
        )  # fmt: skip
    except ScheduleError as refusal:
        return rule, "" if "error" in case else f"we refuse: {refusal}"
    if "error" in case:
        return rule, f"Paddle refuses: {case['error']['text']}"
    numbered = name in ("interleaved", "zb_v")
    ours = [[paddle_job(job, numbered) for job in rank if job] for rank in made.jobs]
    if name == "zb_v":
        ours = [[job for job in rank if job[0] != "optimizer"] for rank in ours]
    return rule, _first_difference(ours, case["jobs_per_stage"])


def paddle_job(job: Job, numbered: bool) -> list[Any]:
    """[type, micro batch] as Paddle names it."""
    chunk = str(job.chunk) if numbered and job.kind != "OPT" else ""
    return [PADDLE_KINDS[job.kind] + chunk, job.micro_batch]


def compare_torch(case: Mapping[str, Any]) -> tuple[str, str]:
    """(rule, what differs or '')."""
    rule = f"torch {case['schedule']}"
    try:
        made = build_schedule(
            TORCH_NAMES[case["schedule"]], stages=case["ranks"], micro_batches=case["micro_batches"],
            chunks=case["stages_per_rank"], dialect="torch",
        )  # fmt: skip
    except ScheduleError as refusal:
        return rule, "" if "error" in case else f"we refuse: {refusal}"
    if "error" in case:
        return rule, f"PyTorch refuses: {case['error']['text']}"
    difference = _first_difference(torch_ranks(made), _by_rank(case["actions"]))
    if difference:
        return rule, difference
    if case["length"] != max(map(len, made.jobs)):
        return rule, f"{max(map(len, made.jobs))} slots, not {case['length']}"
    idle = {str(r): sum(job is None for job in rank) for r, rank in enumerate(made.jobs)}
    if case["bubbles"] != idle:
        return rule, f"idle slots {idle}, not {case['bubbles']}"
    if case.get("with_comms"):
        difference = _first_difference(torch_ranks(with_communication(made)), _by_rank(case["with_comms"]))
    return rule, difference and f"with communication: {difference}"


def _by_rank(ranks: Mapping[str, list[Any]]) -> list[list[Any]]:
    return [ranks[key] for key in sorted(ranks, key=int)]


def torch_ranks(schedule: Schedule) -> list[list[str | None]]:
    """Every rank's actions as PyTorch prints them."""
    return [[torch_action(schedule, r, job) for job in rank] for r, rank in enumerate(schedule.jobs)]


def torch_action(schedule: Schedule, rank: int, job: Job | None) -> str | None:
    if job is None:
        return None
    if job.parts:
        return f"({';'.join(str(torch_action(schedule, rank, part)) for part in job.parts)})OVERLAP_F_B"
    whole = job.kind in ("REDUCE", "UNSHARD", "RESHARD")
    kind = TORCH_KINDS.get(job.kind, job.kind)
    # PyTorch prints the forwards of 1F1B's last stage one too high (there is no micro-batch m); the order is the same.
    printed_from = 1 if schedule.name == "1f1b" and job.kind == "F" and rank == schedule.stages - 1 else 0
    return f"{schedule.virtual(rank, job.chunk)}{kind}{'' if whole else job.micro_batch + printed_from}"


def _first_difference(ours: list[Any], theirs: list[Any]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} stages, not {len(theirs)}"
    for stage, (mine, real) in enumerate(zip(ours, theirs, strict=True)):
        for k in range(max(len(mine), len(real))):
            a = mine[k] if k < len(mine) else "nothing"
            b = real[k] if k < len(real) else "nothing"
            if a != b:
                return f"stage {stage}, job {k}: {a}, not {b}"
    return ""
