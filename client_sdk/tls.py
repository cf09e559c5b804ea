"""Mutual TLS between our processes: three PEM files, for what one serves and what it calls.

Who has a certificate of the CA may connect, on either side. A name check applies as everywhere:
the host by which a server is called must stand in its certificate, or the one name that was agreed
on for all servers (`tls_server_name`).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

import grpc

from client_sdk.settings import TlsFiles
from emberkv_proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """The files' content, read and checked once."""

    cert: bytes
    key: bytes
    ca: bytes
    server_name: str = ""
    """Of whom this process calls; empty: the host it calls them by."""

    @classmethod
    def read(cls, files: TlsFiles) -> Tls:
        """Raises ConfigError: a file cannot be read or is no PEM, or key and certificate differ."""
        try:
            content = cls(
                files.cert.read_bytes(),
                files.key.read_bytes(),
                files.ca.read_bytes(),
                files.server_name,
            )
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.cert, files.key, password=_no_password)
            context.load_verify_locations(files.ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"TLS files {files.cert}, {files.key}, {files.ca} do not fit:"
                f" {error.reason or error}"
            ) from None
        except OSError as error:
            raise ConfigError(f"TLS file {error.filename}: {error.strerror}") from None
        return content

    def server_credentials(self) -> grpc.ServerCredentials:
        """Asks every client for a certificate of the CA."""
        return grpc.ssl_server_credentials(
            [(self.key, self.cert)], self.ca, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def _no_password() -> str:
    raise ConfigError("a TLS key file with a password cannot be used; store the key without one")


def open_channel(
    address: str, tls: Tls | None, options: tuple[tuple[str, int], ...]
) -> grpc.aio.Channel:
    """A channel to host:port, with TLS if there is any. Connects when it is used."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    names = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=(*options, *names))


def bind(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    """Listen on host:port, with TLS if there is any; return the port. Raises RuntimeError."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.server_credentials())


def open_blocking_channel(
    address: str, tls: Tls | None, options: tuple[tuple[str, int], ...]
) -> grpc.Channel:
    """As `open_channel`, for threads."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    names = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return grpc.secure_channel(address, tls.channel_credentials(), options=(*options, *names))
