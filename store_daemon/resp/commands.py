"""What each command does and answers. No I/O: replies go into a line, values stay in place."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from emberkv_proto import __version__
from emberkv_proto.errors import EmberError, InvalidRequestError, PoolFullError, UnavailableError
from store_daemon.resp import replies
from store_daemon.resp.replies import OK, Later, ReplyLine
from store_daemon.resp.requests import MAX_WORD_BYTES, Request
from store_daemon.resp.values import Incoming, Leftovers, ValueShelf

MAX_NAME_BYTES = 256
MOST_WRONG_PASSWORDS = 5
SPOKEN_VERSION = "7.0.0"
"""Of Redis, for clients that look at it: whose commands these are, as far as they go."""
_USER = b"default"
_NOT_SET = (
    "ERR AUTH <password> called without any password configured for the default user. Are you sure"
    " your configuration is correct?"
)

Work = Coroutine[object, object, None]


@dataclass(slots=True)
class DoorCounts:
    """What INFO tells of the door."""

    connections: int = 0
    connections_total: int = 0


class Conversation:
    """One client: who it is, what it asks, what it is answered.

    Args:
        work: takes what must be waited for; it fills in a reply that stands in the line already.
        token: what the client must send with AUTH; None: nothing.
    """

    def __init__(
        self,
        shelf: ValueShelf,
        number: int,
        token: bytes | None,
        counts: DoorCounts,
        work: Callable[[Work], None],
    ) -> None:
        self.line = ReplyLine()
        self.is_over = False
        """Whether the connection ends when the line is empty."""
        self.is_authenticated = token is None
        self._shelf = shelf
        self._number = number
        self._token = token
        self._counts = counts
        self._work = work
        self._protocol = 2
        self._name = b""
        self._steps: Iterator[None] | None = None
        """The rest of a request for many keys, a key at a time."""
        self._wrong = 0

    # ---- requests ----

    def answer(self, request: Request) -> None:
        """Put the reply to one request into the line."""
        name = request.words[0].upper()
        self._count("resp_commands")
        if request.is_cut:
            self._error(f"ERR an argument is longer than {MAX_WORD_BYTES} bytes")
        elif not self.is_authenticated and name not in _BEFORE_AUTH:
            self._error("NOAUTH Authentication required.")
        else:
            command = _COMMANDS.get(name)
            arguments = request.words[1:]
            if command is None:
                self._error(f"ERR unknown command '{_shown(request.words[0])}'")
            elif not command.least <= len(arguments) <= command.most:
                self._error(f"ERR wrong number of arguments for '{_shown(name).lower()}' command")
            else:
                command.act(self, arguments)

    def expect(self, key: bytes, byte_count: int, *, may_wait: bool) -> Incoming | bytes | None:
        """A SET has begun: where its value goes, or the error to answer when it has gone by.

        None: there is no room at the moment, and the client `may_wait`.
        """
        if not self.is_authenticated:
            return replies.error("NOAUTH Authentication required.")
        try:
            return self._shelf.begin(key, byte_count)
        except InvalidRequestError:
            self._count("resp_refused_values")
            return replies.error(
                f"ERR a value of {byte_count} bytes exceeds maximum allowed size"
                f" {self._shelf.max_value_bytes} (resp.max_value_bytes, dram.extent_bytes)"
            )
        except PoolFullError as error:
            if may_wait:
                return None
            self._count("resp_refused_values")
            return replies.error(f"OOM command not allowed: {error}")
        except EmberError as error:
            self._count("resp_refused_values")
            return replies.error(f"ERR {error}")

    def received(self, incoming: Incoming) -> None:
        """The value of a SET is complete."""
        try:
            left = self._shelf.commit(incoming)
        except InvalidRequestError as error:
            self._error(f"ERR {error}")
            return
        self._count("resp_commands")
        self._count("resp_stored_values")
        self._after(left, OK)

    def refuse(self, error: bytes) -> None:
        """What `expect` said."""
        self._count("resp_commands")
        self._count("resp_errors")
        self.line.text(error)

    def misunderstood(self, why: str) -> None:
        """What was sent is no request."""
        self._count("resp_protocol_errors")
        self.line.text(replies.error(f"ERR Protocol error: {why}"))
        self.is_over = True

    # ---- values ----

    def get(self, arguments: Sequence[bytes]) -> None:
        outgoing = self._shelf.open(arguments[0])
        self.line.later(outgoing)
        if outgoing.is_waiting:
            self._work(self._shelf.bring(outgoing))

    def mget(self, arguments: Sequence[bytes]) -> None:
        self.line.text(replies.array_header(len(arguments)))
        self._steps = self._get_each(arguments)

    def _get_each(self, keys: Sequence[bytes]) -> Iterator[None]:
        for key in keys:
            self.get((key,))
            yield

    @property
    def has_more(self) -> bool:
        """Whether the request before is not answered to its end: then `answer_more` comes next."""
        return self._steps is not None

    def answer_more(self) -> None:
        """Go on with a request for many keys, which is more than one turn of the loop, or holds
        more than may be held at once."""
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None

    def no_value(self) -> bytes:
        return replies.null(self._protocol)

    def exists(self, arguments: Sequence[bytes]) -> None:
        self._steps = self._count_known(arguments)

    def _count_known(self, keys: Sequence[bytes]) -> Iterator[None]:
        known = 0
        for key in keys:
            known += self._shelf.has(key)
            yield
        self.line.text(replies.integer(known))

    def delete(self, arguments: Sequence[bytes]) -> None:
        self._steps = self._delete_each(arguments)

    def _delete_each(self, keys: Sequence[bytes]) -> Iterator[None]:
        removed, left = 0, Leftovers()
        for key in keys:
            removed += self._shelf.remove(key, left)
            yield
        self._after(left, replies.integer(removed))

    def set(self, arguments: Sequence[bytes]) -> None:
        """Only with options: without, the value does not come as a word."""
        self._error("ERR syntax error: this server knows SET key value, without options")

    def _after(self, left: Leftovers, reply: bytes) -> None:
        """Answer once what is left cannot be found again."""
        if not left:
            self.line.text(reply)
            return
        later = Later()
        self.line.later(later)
        self._work(self._forget(left, later, reply))

    async def _forget(self, left: Leftovers, later: Later, reply: bytes) -> None:
        try:
            await self._shelf.forget(left)
        except UnavailableError as error:
            self._count("resp_errors")
            reply = replies.error(f"ERR {error}")
        finally:
            later.text = reply

    # ---- who it is ----

    def auth(self, arguments: Sequence[bytes]) -> None:
        user = arguments[0] if len(arguments) == 2 else _USER
        if self._token is None:
            self._error(_NOT_SET)
        elif self._admit(user, arguments[-1]):
            self.line.text(OK)

    def hello(self, arguments: Sequence[bytes]) -> None:
        protocol, rest = self._protocol, list(arguments[1:])
        if arguments:
            if arguments[0] not in (b"2", b"3"):
                self._error("NOPROTO unsupported protocol version")
                return
            protocol = int(arguments[0])
        while rest:
            option = rest.pop(0).upper()
            if option == b"AUTH" and len(rest) >= 2:
                if self._token is not None and not self._admit(rest[0], rest[1]):
                    return
                del rest[:2]
            elif option == b"SETNAME" and rest:
                if not self._call_it(rest.pop(0)):
                    return
            else:
                self._error(f"ERR Syntax error in HELLO option '{_shown(option)}'")
                return
        if not self.is_authenticated:
            self._error(
                "NOAUTH HELLO must be called with the client already authenticated, otherwise the"
                " HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client"
            )
            return
        self._protocol = protocol
        facts = [
            ("server", replies.bulk("emberkv")),
            ("version", replies.bulk(__version__)),
            ("proto", replies.integer(protocol)),
            ("id", replies.integer(self._number)),
            ("mode", replies.bulk("standalone")),
            ("role", replies.bulk("master")),
            ("modules", replies.array(())),
        ]
        self.line.text(replies.mapping(protocol, facts))

    def _admit(self, user: bytes, password: bytes) -> bool:
        assert self._token is not None
        if user == _USER and hmac.compare_digest(password, self._token):
            self.is_authenticated = True
            return True
        self._count("resp_wrong_passwords")
        self._wrong += 1
        self.is_over = self._wrong >= MOST_WRONG_PASSWORDS
        self._error("WRONGPASS invalid username-password pair or user is disabled.")
        return False

    def client(self, arguments: Sequence[bytes]) -> None:
        what, rest = arguments[0].upper(), arguments[1:]
        if what == b"SETNAME" and len(rest) == 1:
            if self._call_it(rest[0]):
                self.line.text(OK)
        elif what == b"GETNAME" and not rest:
            self.line.text(replies.bulk(self._name) if self._name else self.no_value())
        elif what == b"SETINFO" and len(rest) == 2:
            self.line.text(OK)
        elif what == b"ID" and not rest:
            self.line.text(replies.integer(self._number))
        else:
            self._error(f"ERR unknown subcommand or wrong arguments of 'client|{_shown(what)}'")

    def _call_it(self, name: bytes) -> bool:
        if len(name) > MAX_NAME_BYTES or any(byte < 33 or byte > 126 for byte in name):
            self._error("ERR Client names cannot contain spaces, newlines or special characters.")
            return False
        self._name = name
        return True

    def select(self, arguments: Sequence[bytes]) -> None:
        if arguments[0] == b"0":
            self.line.text(OK)
        else:
            self._error("ERR DB index is out of range: there is database 0 only")

    def quit(self, arguments: Sequence[bytes]) -> None:
        self.line.text(OK)
        self.is_over = True

    # ---- what the server is ----

    def ping(self, arguments: Sequence[bytes]) -> None:
        self.line.text(replies.bulk(arguments[0]) if arguments else replies.simple("PONG"))

    def echo(self, arguments: Sequence[bytes]) -> None:
        self.line.text(replies.bulk(arguments[0]))

    def info(self, arguments: Sequence[bytes]) -> None:
        store = self._shelf.store
        counters, tenant = store.holdings.counters, self._shelf.tenant
        wanted = {argument.lower() for argument in arguments}
        sections: Mapping[str, Mapping[str, object]] = {
            "Server": {
                "redis_version": SPOKEN_VERSION,
                "server_name": "emberkv",
                "emberkv_version": __version__,
                "redis_mode": "standalone",
            },
            "Clients": {"connected_clients": self._counts.connections},
            "Memory": {
                "used_memory": tenant.dram_bytes,
                "maxmemory": tenant.quota.dram_bytes or 0,
                "used_ssd": tenant.ssd_bytes,
            },
            "Stats": {
                "total_connections_received": self._counts.connections_total,
                "total_commands_processed": counters["resp_commands"],
                "keyspace_hits": counters["resp_hits"],
                "keyspace_misses": counters["resp_misses"],
                "evicted_keys": tenant.evicted_blocks,
            },
            "Replication": {"role": "master"},
        }
        everything = not wanted or wanted & {b"all", b"default", b"everything"}
        text = "\r\n".join(
            "\r\n".join([f"# {title}", *(f"{key}:{fact}" for key, fact in facts.items()), ""])
            for title, facts in sections.items()
            if everything or title.lower().encode() in wanted
        )
        self.line.text(replies.text_block(self._protocol, text))

    def config(self, arguments: Sequence[bytes]) -> None:
        if arguments[0].upper() != b"GET" or len(arguments) < 2:
            self._error("ERR CONFIG GET only: settings are the daemon's, see docs/resp.md")
            return
        known = {
            "maxmemory": str(self._shelf.quota.dram_bytes or 0),
            "proto-max-bulk-len": str(self._shelf.max_value_bytes),
            "databases": "1",
            "save": "",
            "appendonly": "yes" if self._shelf.store.ssd is not None else "no",
        }
        patterns = [argument.decode("utf-8", "replace").lower() for argument in arguments[1:]]
        found = [
            (name, replies.bulk(value))
            for name, value in known.items()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        self.line.text(replies.mapping(self._protocol, found))

    def command(self, arguments: Sequence[bytes]) -> None:
        what = arguments[0].upper() if arguments else b""
        if what == b"COUNT":
            self.line.text(replies.integer(len(_COMMANDS)))
        elif what == b"LIST":
            names = sorted(_COMMANDS)
            self.line.text(replies.array([replies.bulk(name.lower()) for name in names]))
        else:  # what they look like is told in docs/resp.md
            self.line.text(replies.array(()))

    # ---- inner steps ----

    def _error(self, text: str) -> None:
        self._count("resp_errors")
        self.line.text(replies.error(text))

    def _count(self, counter: str) -> None:
        self._shelf.store.holdings.counters[counter] += 1


@dataclass(frozen=True, slots=True)
class _Command:
    act: Callable[[Conversation, Sequence[bytes]], None]
    least: int
    most: int


_MANY = 1 << 20
_COMMANDS: Mapping[bytes, _Command] = {
    b"GET": _Command(Conversation.get, 1, 1),
    b"SET": _Command(Conversation.set, 2, _MANY),
    b"MGET": _Command(Conversation.mget, 1, _MANY),
    b"EXISTS": _Command(Conversation.exists, 1, _MANY),
    b"DEL": _Command(Conversation.delete, 1, _MANY),
    b"UNLINK": _Command(Conversation.delete, 1, _MANY),
    b"PING": _Command(Conversation.ping, 0, 1),
    b"ECHO": _Command(Conversation.echo, 1, 1),
    b"AUTH": _Command(Conversation.auth, 1, 2),
    b"HELLO": _Command(Conversation.hello, 0, _MANY),
    b"CLIENT": _Command(Conversation.client, 1, _MANY),
    b"SELECT": _Command(Conversation.select, 1, 1),
    b"QUIT": _Command(Conversation.quit, 0, 0),
    b"INFO": _Command(Conversation.info, 0, _MANY),
    b"CONFIG": _Command(Conversation.config, 1, _MANY),
    b"COMMAND": _Command(Conversation.command, 0, _MANY),
}
_BEFORE_AUTH = frozenset({b"AUTH", b"HELLO", b"QUIT"})


def _shown(word: bytes) -> str:
    return ascii(word[:64].decode("utf-8", "replace"))[1:-1]
