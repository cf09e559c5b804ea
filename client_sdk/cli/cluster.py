"""A whole cluster on this machine: daemons, router and engines as processes on loopback.

    async with Cluster(plan) as cluster:
        await cluster.start()
        ...

Leaving the block by any door ends every process and removes every file the cluster made, except
logs that the caller chose to keep.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from client_sdk.cli.cluster_plan import ClusterPlan
from client_sdk.cli.http_json import get_json
from client_sdk.cli.process import ServerProcess
from emberkv_proto.errors import IntegrityError, InvalidRequestError, UnavailableError

END_SECONDS = 8.0
ROUTED_SECONDS = 60.0
WATCH_SECONDS = 0.2

Progress = Callable[[str], None]


class Cluster:
    """The processes of a plan, by name: node-a, engine-a, ..., router."""

    def __init__(self, plan: ClusterPlan, progress: Progress | None = None) -> None:
        self.plan = plan
        self.processes = {spec.name: ServerProcess(spec) for spec in plan.specs}
        self.endpoints: dict[str, dict[str, Any]] = {}
        self._progress = progress or (lambda _: None)

    async def __aenter__(self) -> Cluster:
        self.plan.create_directories()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start everything, servers before those that use them.

        Raises:
            UnavailableError: a process ended or did not serve in time; shows its last log lines.
        """
        daemons = [node.daemon.name for node in self.plan.nodes]
        engines = [node.engine.name for node in self.plan.nodes]
        for names in ([*daemons, self.plan.router.name], engines):
            self._progress(f"starting {', '.join(names)}")
            for name in names:
                self.spawn(name)
            for name in names:
                await self.wait_ready(name)

    async def start_one(self, name: str) -> None:
        """Start a process that is not running, and wait until it serves."""
        self.spawn(name)
        await self.wait_ready(name)

    def spawn(self, name: str) -> None:
        """Start a process that is not running; returns at once."""
        self._process(name).spawn()

    async def wait_ready(self, name: str) -> None:
        """Wait until a spawned process serves.

        Raises:
            UnavailableError: it ended or did not serve in time; shows its last log lines.
        """
        self.endpoints[name] = await self._process(name).wait_ready()

    async def wait_routed(self) -> None:
        """Wait until the router sends requests to every engine of the plan.

        Raises:
            UnavailableError: it does not in time; says what it knows.
        """
        wanted = {node.engine_url for node in self.plan.nodes}
        deadline = time.monotonic() + ROUTED_SECONDS
        while True:
            answer = await asyncio.to_thread(get_json, f"{self.plan.router_url}/workers")
            states = {w["url"]: w["state"] for w in answer["workers"] if w["is_announced"]}
            if all(states.get(url) == "healthy" for url in wanted):
                return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the router does not use all engines after {ROUTED_SECONDS:.0f} s: {states}"
                    f"\n{self._process(self.plan.router.name).log_tail()}"
                )
            await asyncio.sleep(WATCH_SECONDS)

    def kill(self, name: str) -> None:
        """kill -9."""
        self._process(name).kill()

    async def end_one(self, name: str) -> None:
        """SIGTERM, and SIGKILL if that was not enough."""
        process = self._process(name)
        process.terminate()
        if not await process.ended(time.monotonic() + END_SECONDS):
            process.kill()

    async def watch(self) -> str:
        """Return when a process has ended by itself: its name and the end of its log."""
        while True:
            for process in self.processes.values():
                if process.starts and not process.is_running:
                    return f"{process.spec.name} ended\n{process.log_tail()}"
            await asyncio.sleep(WATCH_SECONDS)

    def is_running(self, name: str) -> bool:
        return self._process(name).is_running

    def pids(self) -> list[int]:
        return [p.pid for p in self.processes.values() if p.pid is not None]

    async def close(self) -> None:
        """End all processes, users before servers, and remove the files. May be called again.

        A cancellation in mid-way (a second Ctrl-C) kills what is left and still removes the files.
        """
        try:
            ordered = [p for p in reversed(list(self.processes.values())) if p.is_running]
            for process in ordered:
                process.terminate()
            deadline = time.monotonic() + END_SECONDS
            for process in ordered:
                await process.ended(deadline)
        finally:
            for process in self.processes.values():
                process.kill()
            self.plan.remove_files()

    def keep_logs(self) -> str:
        """Copy the logs beside the run's directory, which goes away; return where they are."""
        kept = self.plan.run_dir.with_name(self.plan.run_dir.name + "-logs")
        shutil.copytree(self.plan.log_dir, kept, dirs_exist_ok=True)
        return str(kept)

    def check_integrity(self) -> None:
        """Every process is of the plan, and no two live ones share a pid.

        Raises:
            IntegrityError: it does not hold.
        """
        pids = self.pids()
        if len(pids) != len(set(pids)):
            raise IntegrityError(f"two processes share a pid: {pids}")
        if set(self.processes) != {spec.name for spec in self.plan.specs}:
            raise IntegrityError("the processes are not those of the plan")

    def _process(self, name: str) -> ServerProcess:
        process = self.processes.get(name)
        if process is None:
            raise InvalidRequestError(f"no process {name!r}; there are {', '.join(self.processes)}")
        return process


async def until_stopped(cluster: Cluster, stop: asyncio.Event) -> str | None:
    """Wait for `stop` (None) or for the first process that ends by itself (what it logged)."""
    watch = asyncio.ensure_future(cluster.watch())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait({watch, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return None if stopped in done else watch.result()
    finally:
        for task in (watch, stopped):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
