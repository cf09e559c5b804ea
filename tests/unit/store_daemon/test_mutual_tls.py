"""TLS on the gRPC ports: who shows a certificate of the CA gets in, on either side."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
from pathlib import Path

import grpc
import pytest

from client_sdk.aio import timeout
from client_sdk.index_client import CHANNEL_OPTIONS, IndexClient, ember_error
from client_sdk.settings import TlsFiles
from client_sdk.tls import Tls, open_channel
from emberkv_proto.errors import ConfigError, EmberError, UnavailableError
from emberkv_proto.types import Incarnation, NodeId, Tier
from emberkv_proto.v1 import store_pb2, store_pb2_grpc
from global_index.config import IndexSection
from global_index.embedded import GlobalIndex
from global_index.service import start_server
from store_daemon.config import DaemonSection
from store_daemon.peer_client import PeerClient
from tests.helpers.certificates import Authority
from tests.helpers.peer_doubles import chain, small_namespace
from tests.helpers.peer_node import PeerNode, peer_node

NAMESPACE = small_namespace()
SECONDS = 60.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


async def state_of(address: str, tls: Tls | None) -> str:
    """What an operator reads there. Raises EmberError."""
    async with open_channel(address, tls, CHANNEL_OPTIONS) as channel:
        stub = store_pb2_grpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
        try:
            return str((await stub.Status(store_pb2.StatusRequest(), timeout=90)).state)
        except grpc.aio.AioRpcError as error:
            raise ember_error(error, "daemon") from None


async def test_only_who_has_a_certificate_of_the_ca_gets_in(
    authority: Authority, stranger: Authority
) -> None:
    with peer_node(NAMESPACE, tls=Tls.read(authority.issue("daemon"))) as node:
        address = node.grpc_address
        ours = Tls.read(authority.issue("operator"))
        async with timeout(SECONDS):
            assert await state_of(address, ours) == "serving"
        theirs = stranger.issue("operator")
        # Trusts our daemon, but shows a certificate that nobody here knows.
        unknown = Tls.read(dataclasses.replace(theirs, ca=authority.cert))
        for tls in (None, unknown):
            with pytest.raises(EmberError):
                await state_of(address, tls)
        # Has the right certificate, and does not trust our daemon.
        wary = dataclasses.replace(ours, ca=stranger.cert.read_bytes())
        with pytest.raises(UnavailableError):
            await state_of(address, wary)


async def test_one_name_may_stand_for_all_servers(authority: Authority) -> None:
    """As where all pods have the certificate of one Secret, and each an address of its own."""
    shared = authority.issue("pods", "subjectAltName=DNS:emberkv")
    with peer_node(NAMESPACE, tls=Tls.read(shared)) as node:
        with pytest.raises(UnavailableError):
            await state_of(node.grpc_address, Tls.read(shared))
        for name, is_right in (("emberkv", True), ("other", False)):
            tls = Tls.read(dataclasses.replace(shared, server_name=name))
            if is_right:
                assert await state_of(node.grpc_address, tls) == "serving"
            else:
                with pytest.raises(UnavailableError):
                    await state_of(node.grpc_address, tls)


def test_a_server_name_without_certificates_is_refused() -> None:
    for section in (DaemonSection, IndexSection):
        with pytest.raises(ValueError, match="go together"):
            section(tls_server_name="emberkv")


async def test_peers_lease_over_tls(authority: Authority) -> None:
    hashes = chain(NAMESPACE, 3)
    with peer_node(NAMESPACE, tls=Tls.read(authority.issue("owner"))) as node:
        node.store.put(hashes)
        client = PeerClient(NodeId("b"), Tls.read(authority.issue("asker")))
        bare = PeerClient(NodeId("c"))
        try:
            granted = await client.acquire(node.grpc_address, NAMESPACE, hashes, 5.0, SECONDS)
            assert granted.grant.usable_blocks == 3
            await client.release(node.grpc_address, granted.grant.lease_id, SECONDS)
            with pytest.raises(EmberError):
                await bare.acquire(node.grpc_address, NAMESPACE, hashes, 5.0, 3.0)
        finally:
            await client.close()
            await bare.close()


async def test_the_index_follows_daemons_and_answers_over_tls(authority: Authority) -> None:
    files = authority.issue("index")
    with peer_node(NAMESPACE, tls=Tls.read(authority.issue("daemon"))) as node:
        section = IndexSection(
            nodes=(node.grpc_address,),
            backend="python",
            tls_cert_file=files.cert,
            tls_key_file=files.key,
            tls_ca_file=files.ca,
        )
        async with GlobalIndex(section) as index:
            server, port = await start_server(index, "127.0.0.1", 0, lambda _: None)
            client = IndexClient(
                f"127.0.0.1:{port}", timeout_seconds=5, tls=Tls.read(authority.issue("router"))
            )
            bare = IndexClient(f"127.0.0.1:{port}", timeout_seconds=3)
            try:
                await followed(client, node)
                with pytest.raises(EmberError):
                    await bare.nodes()
            finally:
                await client.close()
                await bare.close()
                await server.stop(None)


async def followed(client: IndexClient, node: PeerNode) -> None:
    """Store three blocks at the node and wait until the index counts them."""
    asyncio.run_coroutine_threadsafe(_store(node), node.loop).result(30)
    async with timeout(SECONDS):
        while True:
            known = await client.nodes()
            counted = [t.blocks for n in known for t in n.tiers if t.tier is Tier.DRAM]
            if counted == [3]:
                assert known[0].incarnation == Incarnation(3)
                return
            await asyncio.sleep(0.02)


async def _store(node: PeerNode) -> None:
    node.residency.store(Tier.DRAM, {1, 2, 3})


def test_files_that_do_not_fit_are_refused_by_name(authority: Authority, tmp_path: Path) -> None:
    files, other = authority.issue("a"), authority.issue("b")
    with pytest.raises(ConfigError, match=str(other.key)):
        Tls.read(TlsFiles(files.cert, other.key, files.ca))
    with pytest.raises(ConfigError, match=r"none\.pem"):
        Tls.read(TlsFiles(tmp_path / "none.pem", files.key, files.ca))
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    for broken in (
        TlsFiles(empty, files.key, files.ca),
        TlsFiles(files.cert, empty, files.ca),
        TlsFiles(files.cert, files.key, empty),
    ):
        with pytest.raises(ConfigError, match=r"empty\.pem"):
            Tls.read(broken)


def test_a_key_with_a_password_is_refused_and_never_asks(
    authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue("locked")
    locked = tmp_path / "locked.key"
    paths = ("-in", str(files.key), "-out", str(locked))
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-passout", "pass:secret", *paths],
        check=True,
        capture_output=True,
        timeout=90,
    )
    with pytest.raises(ConfigError, match="password"):
        Tls.read(TlsFiles(files.cert, locked, files.ca))


@pytest.mark.parametrize("kind", [DaemonSection, IndexSection])
def test_the_three_files_go_together(kind: type[DaemonSection | IndexSection]) -> None:
    with pytest.raises(ValueError, match="go together"):
        kind.model_validate({"tls_cert_file": "a"})
    with pytest.raises(ValueError, match="go together"):
        kind.model_validate({"tls_cert_file": "a", "tls_ca_file": "b"})
    whole = kind.model_validate({"tls_cert_file": "a", "tls_key_file": "b", "tls_ca_file": "c"})
    assert whole.tls_files() == TlsFiles(Path("a"), Path("b"), Path("c"))
    assert kind().tls_files() is None
