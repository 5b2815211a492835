"""A Dask cluster that exists already, as an executor for a sweep. An extra: pip install 'distplan[cluster]'."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, cast

from distplan.hardware.errors import DistplanError

PATIENCE_SECONDS = 10


@contextmanager
def cluster_executor(address: str) -> Iterator[Executor]:
    """Sends searches to the workers of the scheduler at `address` (tcp://host:8786), which must have the same
    distplan. Raises DistplanError where the extra is missing, nobody answers, or there is no worker.
    """
    try:
        import distributed
    except ImportError:
        raise DistplanError("--cluster needs Dask: pip install 'distplan[cluster]'") from None
    try:
        client: Any = cast(Any, distributed).Client(address, timeout=PATIENCE_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError, TimeoutError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DistplanError(f"--cluster {address}: no scheduler answers: {first}") from None
    try:
        _check(client, address)
        yield cast(Executor, client.get_executor(pure=False))
    finally:
        client.close()


def _check(client: Any, address: str) -> None:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    if not workers:
        raise DistplanError(f"--cluster {address}: the scheduler has no workers")
    ours = version()
    for worker, theirs in sorted(client.run(version, on_error="return").items()):
        if theirs != ours:
            raise DistplanError(f"--cluster {address}: worker {worker} has distplan {theirs}, here it is {ours}")


def version() -> str:
    """What decides that two machines compute the same: the program and its data."""
    from distplan.planner.catalogue import versions

    known = versions()
    return f"{known['distplan']}, data {known['hardware_data']} {known['model_data']}"
