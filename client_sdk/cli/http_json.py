"""JSON over HTTP to servers of ours. Blocking: on an event loop, call it in a thread."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from emberkv_proto.errors import ConfigError, InvalidRequestError, UnavailableError

HTTP_SECONDS = 5.0


def get_json(url: str, token: str = "") -> dict[str, Any]:
    """GET an object, with a bearer token if there is one. Raises as `post_json`."""
    return _ask(url, None, token)


def post_json(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST an object and return the one that is answered.

    Raises:
        ConfigError: no http URL.
        InvalidRequestError: refused (4xx), or no JSON object came back.
        UnavailableError: nobody there, a 5xx, or no answer in time.
    """
    return _ask(url, json.dumps(body).encode())


def _ask(url: str, data: bytes | None, token: str = "") -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} must start with http:// or https://")
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    request = Request(url, data, headers)  # noqa: S310 - the scheme is checked above
    try:
        with urlopen(request, timeout=HTTP_SECONDS) as response:  # noqa: S310
            loaded = json.load(response)
    except HTTPError as error:
        with error:
            text = error.read(500).decode(errors="replace")
        kind = UnavailableError if error.code >= 500 else InvalidRequestError
        raise kind(f"{url} answered {error.code}: {text}") from None
    except (URLError, TimeoutError, ConnectionError) as error:
        raise UnavailableError(f"{url}: {error}") from None
    except ValueError:
        raise InvalidRequestError(f"{url} answered what is not JSON") from None
    if not isinstance(loaded, dict):
        raise InvalidRequestError(f"{url} answered {type(loaded).__name__}, not an object")
    return loaded
