"""A plan as the file that a launcher reads; what the launcher cannot say is said in it, and returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distplan.hardware.documents import Document, take
from distplan.hardware.errors import UnknownNameError
from distplan.planner.export_accelerate import accelerate
from distplan.planner.export_deepspeed import deepspeed
from distplan.planner.export_megatron import megatron, megatron_bridge
from distplan.planner.export_nanotron import nanotron
from distplan.planner.export_paddle import paddle_fleet
from distplan.planner.export_paddle_auto import paddle_auto
from distplan.planner.export_torchtitan import torchtitan
from distplan.planner.launcher import Exported, Job
from distplan.planner.plan_file import PlanFile, read_plan
from distplan.planner.terminal import clean


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What writes the file, and what the file is, in words. JSON has no comments, so it carries its own."""

    write: Callable[[Job], Exported]
    form: str
    comments: bool = True


LAUNCHERS: Mapping[str, Launcher] = {
    "megatron": Launcher(write=megatron, form="arguments for Megatron-LM's pretrain_gpt.py"),
    "megatron-bridge": Launcher(write=megatron_bridge, form="overrides for Megatron Bridge's ConfigContainer"),
    "deepspeed": Launcher(write=deepspeed, form="DeepSpeed's JSON", comments=False),
    "torchtitan": Launcher(write=torchtitan, form="overrides for torchtitan.train"),
    "accelerate": Launcher(write=accelerate, form="configuration for accelerate launch"),
    "paddle-fleet": Launcher(write=paddle_fleet, form="fleet.DistributedStrategy of Paddle, manual parallelism"),
    "paddle-auto": Launcher(write=paddle_auto, form="ProcessMesh, placements and dist.Strategy of Paddle"),
    "nanotron": Launcher(write=nanotron, form="nanotron's YAML"),
}


def export(job: Job, launcher: str) -> Exported:
    """The file for `launcher`, one of LAUNCHERS. Raises DistplanError where the launcher has no such model."""
    if launcher not in LAUNCHERS:
        raise UnknownNameError("launcher", launcher, LAUNCHERS)
    chosen = LAUNCHERS[launcher]
    made = chosen.write(job)
    if not chosen.comments:
        return made
    head = f"{chosen.form}, written by distplan for {job.model.name} on {job.strategy.gpus} GPUs"
    lines = [f"# {clean(line)}" for line in (head, *made.sentences)]
    return Exported(text="\n".join(lines) + "\n\n" + made.text, unsaid=made.unsaid, remarks=made.remarks)


def read_job(document: Document) -> tuple[Job, PlanFile]:
    """The plan of a strategy.yaml, with the layers that its estimate found to recompute. Raises DocumentError."""
    plan = read_plan(document)
    estimate = take(document, "estimate", Document, default=None)
    layers = 0 if estimate is None else take(estimate, "recompute_layers", int, default=0, minimum=0)
    return Job.of(plan, recompute_layers=layers), plan
