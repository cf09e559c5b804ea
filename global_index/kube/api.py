"""Calls of the Kubernetes API: get, create, watch. Over aiohttp; every wait has a deadline."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from emberkv_proto.errors import ConfigError, EmberError, InvalidRequestError, UnavailableError
from global_index.dns_nodes import HostPort

CALL_SECONDS = 30.0
CONNECT_SECONDS = 10.0
WATCH_SECONDS = 120
"""After which the server is to end a watch; a dead connection is found out that late."""
WATCH_GRACE_SECONDS = 15.0
MAX_BODY_BYTES = 128 << 20
MAX_LINE_BYTES = 8 << 20
"""Of a watch; etcd takes objects up to 1.5 MiB."""


class RefusedError(EmberError):
    """The server answered with an error; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the Kubernetes API says {status}: {message}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API is and as whom to ask it. `ca_file` None: http, or the system's CAs."""

    url: str
    ca_file: Path | None = None
    token_file: Path | None = None
    certificate: tuple[Path, Path] | None = None
    """Of a client: PEM with its chain, and its key."""


def server_url(environ: Mapping[str, str] | None = None) -> str:
    """Where a pod finds the API. Raises ConfigError outside of one."""
    environ = os.environ if environ is None else environ
    host, port = (environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host or not port.isdigit():
        raise ConfigError("not in a Kubernetes pod: KUBERNETES_SERVICE_HOST and _PORT are not set")
    return f"https://{HostPort(host, int(port))}"


class KubeApi:
    """Use as a context manager; calls come from one event loop."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> KubeApi:
        timeout = aiohttp.ClientTimeout(
            total=CALL_SECONDS, connect=CONNECT_SECONDS, sock_connect=CONNECT_SECONDS
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls(), limit=64), timeout=timeout
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Raises RefusedError, UnavailableError, InvalidRequestError (the answer is no JSON)."""
        return await self._call("GET", path, parameters, None)

    async def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises what `get` raises."""
        return await self._call("POST", path, {}, body)

    @asynccontextmanager
    async def watch(self, path: str, **parameters: str) -> AsyncIterator[AsyncIterator[Any]]:
        """A running watch: its events, until the server ends it.

        Raises what `get` raises, also while events are read.
        """
        asked = {
            **parameters,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(
            total=None,
            connect=CONNECT_SECONDS,
            sock_connect=CONNECT_SECONDS,
            sock_read=WATCH_SECONDS + WATCH_GRACE_SECONDS,
        )
        try:
            async with self._open().get(
                self._access.url + path, params=asked, headers=self._headers(), timeout=timeout
            ) as answer:
                if answer.status != 200:
                    raise RefusedError(answer.status, await _complaint(answer))
                yield _events(answer.content)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise UnavailableError(_reason(error)) from error

    async def _call(
        self, method: str, path: str, parameters: Mapping[str, str], body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        try:
            async with self._open().request(
                method,
                self._access.url + path,
                params=dict(parameters),
                json=body,
                headers=self._headers(),
            ) as answer:
                if answer.status not in (200, 201):
                    raise RefusedError(answer.status, await _complaint(answer))
                raw = bytearray()
                async for piece in answer.content.iter_any():
                    raw += piece
                    if len(raw) > MAX_BODY_BYTES:
                        raise InvalidRequestError(f"an answer has over {MAX_BODY_BYTES} bytes")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise UnavailableError(_reason(error)) from error
        return _object(bytes(raw))

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside of its block"
        return self._session

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._access.token_file is not None:
            try:
                token = self._access.token_file.read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UnavailableError(f"the account's token cannot be read: {error}") from error
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _tls(self) -> ssl.SSLContext | bool:
        if not self._access.url.startswith("https:"):
            return True
        try:
            context = ssl.create_default_context(cafile=self._access.ca_file)
            if self._access.certificate is not None:
                context.load_cert_chain(*self._access.certificate)
        except OSError as error:  # SSLError is one
            raise ConfigError(
                f"the Kubernetes API's certificates cannot be read: {error}"
            ) from error
        return context


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """One JSON object a line; a line that the end of the stream cut off is dropped."""
    held = bytearray()
    async for piece in content.iter_any():
        held += piece
        *lines, rest = held.split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise InvalidRequestError(f"a watch event has over {MAX_LINE_BYTES} bytes")
        held = bytearray(rest)
        for line in lines:
            if line.strip():
                yield _object(bytes(line))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        loaded = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"not JSON: {str(error)[:100]}") from None
    if not isinstance(loaded, dict):
        raise InvalidRequestError("not a JSON object")
    return loaded


async def _complaint(answer: aiohttp.ClientResponse) -> str:
    raw = await answer.content.read(4096)
    try:
        return str(json.loads(raw)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return raw.decode(errors="replace")[:200].strip() or str(answer.reason)


def _reason(error: Exception) -> str:
    return f"the Kubernetes API cannot be reached: {str(error) or type(error).__name__}"
