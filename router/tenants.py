"""Who a request is from, what it may do, and the salt that keeps its cache apart.

A tenant's blocks are hashed under a salt made of its name and the cluster's secret, so nobody
without its key finds them or learns by timing that they are there. A client's own cache_salt goes
into that salt and is never used as it came: else it could choose another tenant's.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import blake3

from emberkv_proto.errors import ConfigError
from router.http_message import Request, Response, error_response
from router.keys import KeyFile, KeyRing, read_keys
from router.request_body import RequestBody
from router.tenant_budget import Overdrawn, TenantBudget
from router.waiting import Priority

log = logging.getLogger(__name__)
audit = logging.getLogger("router.audit")
SALT_CONTEXT = "emberkv router tenant cache salt v1"
SECRET_HEADERS = frozenset({b"authorization", b"x-api-key"})


class TenantRefusedError(Exception):
    """What to answer instead of serving. `why` is the label of a counter."""

    def __init__(self, why: str, response: Response) -> None:
        super().__init__(why)
        self.why = why
        self.response = response


class Visit:
    """One request of a tenant, counted among those it has running."""

    def __init__(self, name: str, budget: TenantBudget, clock: Callable[[], float]) -> None:
        self.name = name
        self._budget = budget
        self._clock = clock

    def leave(self) -> None:
        """The request is over. Once."""
        self._budget.leave()

    def check_model(self, model: str) -> None:
        """Raises TenantRefusedError (403) where the tenant may not use it."""
        allowed = self._budget.limits.models
        if allowed is not None and model not in allowed:
            text = f"this key may not use model {model!r}"
            response = error_response(403, text, code="model_not_allowed")
            raise TenantRefusedError("forbidden", response)

    def allowed(self, wanted: Priority) -> Priority:
        return max(wanted, Priority[self._budget.limits.highest_priority.upper()])

    def spend_prompt(self, tokens: int) -> None:
        """Raises TenantRefusedError (429) where its tokens of the minute are used up."""
        _refuse_overdrawn("tenant_tokens", self._budget.spend_prompt(tokens, self._clock()))

    def return_prompt(self, tokens: int) -> None:
        self._budget.return_prompt(tokens, self._clock())

    def spend_answer(self, tokens: int) -> None:
        self._budget.spend_answer(tokens, self._clock())


class Tenants:
    """All tenants of a key file. On the event loop."""

    def __init__(self, path: Path, secret: bytes, clock: Callable[[], float]) -> None:
        """Raises ConfigError, as `read_keys`."""
        self._path = path
        self._salt_key = blake3.blake3(secret, derive_key_context=SALT_CONTEXT).digest()
        self._clock = clock
        self._stamp = self._stamp_now()
        self._ring = KeyRing(read_keys(path))
        self._budgets: dict[str, TenantBudget] = {}
        self.failed_reads = 0

    def identified(self, request: Request) -> Request:
        """Return the request with its tenant, and without the key, which no engine has to see.

        Raises:
            TenantRefusedError: 401.
        """
        tenant = self._ring.tenant_of(_key_in(request))
        if tenant is None:
            text = "no valid API key: send one as `authorization: Bearer <key>`"
            challenge = ((b"www-authenticate", b"Bearer"),)
            response = error_response(401, text, challenge, "invalid_api_key")
            raise TenantRefusedError("unauthorized", response)
        headers = [item for item in request.headers if item[0] not in SECRET_HEADERS]
        return replace(request, headers=headers, tenant=tenant)

    def enter(self, tenant: str) -> Visit:
        """Count a request of the tenant until `leave` of the visit.

        Raises:
            TenantRefusedError: 429, it has too many, or had too many in this minute.
        """
        budget = self._budgets.get(tenant)
        if budget is None:
            budget = TenantBudget(self._ring.limits_of(tenant), self._clock())
            self._budgets[tenant] = budget
        _refuse_overdrawn("tenant_requests", budget.enter(self._clock()))
        return Visit(tenant, budget, self._clock)

    @contextmanager
    def visit(self, tenant: str) -> Iterator[Visit]:
        """As `enter`, for a block."""
        visit = self.enter(tenant)
        try:
            yield visit
        finally:
            visit.leave()

    def salt(self, tenant: str, own: object) -> str:
        """The salt of a tenant's requests that came with `own` as their cache_salt."""
        name = tenant.encode()
        told = own.encode("utf-8", "surrogatepass") if isinstance(own, str) else b""
        message = len(name).to_bytes(4, "big") + name + told
        return blake3.blake3(message, key=self._salt_key).hexdigest()

    def sealed(self, request: Request, body: RequestBody) -> Request:
        """Put the tenant's salt into `body` and into the bytes that go to the engine.

        A `priority` that the tenant may not ask for becomes 0 there: engines may go by it too.
        """
        is_changed = "cache_salt" in body
        limits = self._ring.limits_of(request.tenant)
        if limits.highest_priority != "high" and not _is_normal(body.get("priority", 0)):
            body["priority"] = 0
            is_changed = True
        salt = self.salt(request.tenant, body.get("cache_salt"))
        body["cache_salt"] = salt
        return replace(request, body=with_salt(request.body, body, salt, is_changed=is_changed))

    def refresh(self) -> None:
        """Read the file again where it changed; a wrong one leaves the keys as they are."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            file = read_keys(self._path)
        except ConfigError as error:
            self.failed_reads += 1
            log.error("keys stay as they were: %s", error)
            return
        _audit_changes(self._ring.file, file)
        self._ring = KeyRing(file)
        for tenant, budget in tuple(self._budgets.items()):
            budget.change(self._ring.limits_of(tenant), self._clock())

    def check_integrity(self) -> None:
        for budget in self._budgets.values():
            budget.check_integrity()

    def active_requests(self) -> int:
        return sum(budget.active for budget in self._budgets.values())

    def _stamp_now(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError:
            return (0, 0, 0)
        # A chmod, which may be what was wrong, changes only the ctime.
        return (status.st_ctime_ns, status.st_ino, status.st_size)


def _is_normal(priority: object) -> bool:
    """Whether it asks for no more than the normal class. Engines read "-1" and -1.0 as numbers."""
    return type(priority) is int and priority >= 0


def with_salt(raw: bytes, body: RequestBody, salt: str, *, is_changed: bool) -> bytes:
    """The body's bytes with `salt` as their cache_salt.

    It is put in front, and all other bytes stay as they came. A body that had a salt (perhaps
    twice, or spelt with escapes), that `is_changed`, or that is no UTF-8 is written anew.
    """
    if is_changed or json.detect_encoding(raw) != "utf-8":
        return json.dumps({**body, "cache_salt": salt}).encode()
    at = raw.index(b"{") + 1
    comma = b"" if len(body) == 1 else b","  # the salt is in `body` already
    return b'%s"cache_salt":"%s"%s%s' % (raw[:at], salt.encode(), comma, raw[at:])


def _key_in(request: Request) -> bytes:
    given = request.header(b"authorization")
    if given is None:
        return request.header(b"x-api-key") or b""
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _refuse_overdrawn(why: str, found: Overdrawn | None) -> None:
    if found is None:
        return
    after = ((b"retry-after", b"%d" % max(1, math.ceil(found.seconds))),)
    text = f"the limit of this key's tenant is reached: {found.limit}"
    raise TenantRefusedError(why, error_response(429, text, after, "rate_limit_exceeded"))


def _audit_changes(old: KeyFile, new: KeyFile) -> None:
    before = {key.key_id: key for key in old.keys}
    after = {key.key_id: key for key in new.keys}
    for key_id, key in after.items():
        known = before.get(key_id)
        if known is None:
            audit.info("key %s of tenant %s is new", key_id, key.tenant)
        elif known.revoked is None and key.revoked is not None:
            audit.info("key %s of tenant %s is revoked", key_id, key.tenant)
        elif known != key:
            audit.info("key %s of tenant %s is changed", key_id, key.tenant)
    for key_id in before.keys() - after.keys():
        audit.info("key %s of tenant %s is gone", key_id, before[key_id].tenant)
    for tenant in sorted(old.tenants.keys() | new.tenants.keys()):
        if old.tenants.get(tenant) != new.tenants.get(tenant):
            audit.info("limits of tenant %s are changed", tenant)
