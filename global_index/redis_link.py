"""The connection to Redis: found again with back-off, and known to be away without asking."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisClusterException, RedisError

from client_sdk import aio
from emberkv_proto.errors import UnavailableError
from global_index.redis_settings import RedisKeys

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_SECONDS = 2.0
CALL_SECONDS = 5.0
"""A command of the writer; queries have their own, shorter deadline."""
RETRY_FIRST_SECONDS = 0.1
RETRY_MAX_SECONDS = 2.0
FAILURES = (RedisError, RedisClusterException, OSError)
"""The second is no RedisError: no node of a Cluster can be reached, or nobody has a slot."""
LATE_QUERIES = 3
"""So many in a row without an answer in time, and Redis counts as away until it answers."""


class RedisAwayError(UnavailableError):
    """Redis does not answer, or not in time."""


class RedisFullError(UnavailableError):
    """Redis is at its `maxmemory`, and takes no more rows."""


@dataclass(slots=True)
class LinkCounts:
    """What the connection went through; never goes down."""

    connects: int = 0
    losses: int = 0
    late: int = 0
    """Calls that were not answered in time."""
    full: int = 0


class RedisLink:
    """One client for all of a process's calls. `run` keeps it connected until cancelled."""

    def __init__(self, section: RedisKeys) -> None:
        self._section = section
        self._password = section.password()
        self._client: Any = None
        self._lost_client: Any = None
        self._is_lost = asyncio.Event()
        self._late_in_row = 0
        self.counts = LinkCounts()
        self.problem = "not connected yet"
        """Why Redis is away; empty while it is there."""

    @property
    def is_up(self) -> bool:
        return self._client is not None

    @property
    def client(self) -> Any:
        """Raises RedisAwayError while there is no connection."""
        if self._client is None:
            raise RedisAwayError(f"Redis is away: {self.problem}")
        return self._client

    async def run(self) -> None:
        """Connect, wait for the loss, connect again: soon at first, then every 2 s or so."""
        delay = RETRY_FIRST_SECONDS
        try:
            while True:
                try:
                    async with aio.timeout(CONNECT_SECONDS):
                        self._client = await self._connected()
                except (*FAILURES, asyncio.TimeoutError, TimeoutError) as error:
                    if self.problem != _reason(error):
                        log.warning("Redis at %s is away: %s", self._section.redis_url, error)
                    self.problem = _reason(error)
                    # Jitter keeps many routers from knocking in step.
                    await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311
                    delay = min(2 * delay, RETRY_MAX_SECONDS)
                    continue
                self.counts.connects += 1
                self.problem, delay = "", RETRY_FIRST_SECONDS
                log.info("connected to Redis at %s", self._section.redis_url)
                await self._is_lost.wait()
                await self._hang_up()
        finally:
            await self._hang_up()

    async def call(self, do: Callable[[Any], Awaitable[T]], seconds: float = CALL_SECONDS) -> T:
        """What `do` makes of the client.

        Raises:
            RedisAwayError: no answer, or none in time; the connection is given up.
            RedisFullError: Redis takes no more.
        """
        client = self.client
        try:
            async with aio.timeout(seconds):
                return await do(client)
        except (asyncio.TimeoutError, TimeoutError) as error:
            self.counts.late += 1
            self.lost(client, f"no answer within {seconds} s")
            raise RedisAwayError(f"Redis did not answer within {seconds} s") from error
        except OutOfMemoryError as error:
            self.counts.full += 1
            raise RedisFullError(f"Redis is full: {error}") from error
        except FAILURES as error:
            self.lost(client, _reason(error))
            raise RedisAwayError(f"Redis is away: {error}") from error

    async def ask(self, do: Callable[[Any], Awaitable[T]], seconds: float) -> T:
        """As `call`, for queries: one late answer is a miss, several in a row are a loss."""
        client = self.client
        try:
            async with aio.timeout(seconds):
                answer = await do(client)
        except (asyncio.TimeoutError, TimeoutError) as error:
            self.counts.late += 1
            self._late_in_row += 1
            if self._late_in_row >= LATE_QUERIES:
                self.lost(client, f"{LATE_QUERIES} queries without an answer within {seconds} s")
            raise RedisAwayError(f"Redis did not answer within {seconds} s") from error
        except FAILURES as error:
            self.lost(client, _reason(error))
            raise RedisAwayError(f"Redis is away: {error}") from error
        self._late_in_row = 0
        return answer

    def lost(self, client: Any, problem: str) -> None:
        """Give a connection up; `run` looks for the next one."""
        if client is not self._client or client is None:
            return  # of an earlier connection
        log.warning("Redis at %s is lost: %s", self._section.redis_url, problem)
        self.counts.losses += 1
        self.problem, self._late_in_row = problem, 0
        self._lost_client, self._client = client, None
        self._is_lost.set()

    async def _hang_up(self) -> None:
        self._is_lost.clear()
        for client in {id(c): c for c in (self._client, self._lost_client) if c}.values():
            await _close(client)
        self._client = self._lost_client = None

    async def _connected(self) -> Any:
        options: dict[str, Any] = {
            "username": self._section.redis_username or None,
            "password": self._password or None,
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": CALL_SECONDS,
        }
        if self._section.redis_url.startswith("rediss://") and self._section.redis_ca_file:
            options["ssl_ca_certs"] = str(self._section.redis_ca_file)
        no_retry = Retry(NoBackoff(), 0)
        alone = redis.asyncio.Redis.from_url(self._section.redis_url, **options, retry=no_retry)
        try:
            info = await alone.info()
        except BaseException:
            await _close(alone)
            raise
        if info.get("maxmemory_policy", "noeviction") != "noeviction" and info.get("maxmemory"):
            log.warning(
                "Redis evicts keys when full (maxmemory-policy %s): blocks will be missing from"
                " answers; set it to noeviction",
                info["maxmemory_policy"],
            )
        if "cluster" not in (info.get("redis_mode"), info.get("server_mode")):  # the latter: Valkey
            return alone
        await _close(alone)
        cluster = RedisCluster.from_url(self._section.redis_url, **options, retry=no_retry)
        try:
            return await cluster.initialize()
        except BaseException:
            await _close(cluster)
            raise


async def _close(client: Any) -> None:
    """Close without waiting for a peer that may never answer."""
    try:
        async with aio.timeout(CONNECT_SECONDS):
            await client.aclose()
    except (*FAILURES, asyncio.TimeoutError, TimeoutError) as error:
        log.debug("closing a lost connection to Redis: %s", error)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
