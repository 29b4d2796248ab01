"""TLS of one cluster on the client: its files, and the context of connections to the hub.

The files are created, copied and deleted with the token. `agent/tls.py` has the nodes' part and the reasons."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.common.errors import Code, HeliostatError

if TYPE_CHECKING:
    import ssl  # loads the system's OpenSSL

DIRECTORY = "tls"
AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"
KEY = "member.key"  # the key of every certificate that the authority issues
CLIENT = "client.crt"  # for programs on hosts without a node
FILES = tuple(f"{DIRECTORY}/{name}" for name in (AUTHORITY, AUTHORITY_KEY, KEY, CLIENT))


def make(cluster_id: str) -> dict[str, bytes]:
    """A new certificate authority, its keys and the client's certificate: path in the cluster's directory -> content."""
    try:
        from heliostat.remote import certificates
    except ImportError as error:
        raise HeliostatError(
            "could not make the certificates of `security.tls`",
            cause=str(error),
            hint="pip install cryptography",
            code=Code.TLS_CERTIFICATES,
        ) from None
    return dict(zip(FILES, certificates.make(cluster_id), strict=True))


def environment(directory: Path, node: str | None = None, of_head: str = "") -> dict[str, str]:
    """The variables of a Ray program on this host. node: a node on this host. of_head: the path of the head's certificate.

    A driver uses the address of the node on its host, and Ray connects to it there: it needs that node's certificate."""
    node_certificates = [directory / f"node-{node}.crt", Path(of_head)] if node else []
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(
            next((path for path in node_certificates if path.is_file()), directory / CLIENT)
        ),
        "RAY_TLS_SERVER_KEY": str(directory / KEY),
        "RAY_TLS_CA_CERT": str(directory / AUTHORITY),
    }


def find_node_on(host: str, nodes: Mapping[str, Mapping[str, object]]) -> str | None:
    """The first node on this host. nodes: the reports of the head's agent by node."""
    return next((name for name, node in nodes.items() if node.get("host") == host), None)


def context(read: Callable[[str], bytes]) -> ssl.SSLContext:
    """The context of a connection to a member of the cluster. read: returns the content of one of the files."""
    import ssl

    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        made.load_verify_locations(cadata=read(AUTHORITY).decode())
        # Python loads a certificate with its key only from files
        with tempfile.TemporaryDirectory(prefix="heliostat-") as folder:
            for name in (CLIENT, KEY):
                _write(Path(folder) / name, read(name))
            made.load_cert_chain(Path(folder) / CLIENT, Path(folder) / KEY)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise HeliostatError(
            "could not use the cluster's certificates",
            cause=str(error),
            hint="heliostat doctor, with the cluster's name",
            code=Code.TLS_CERTIFICATES,
        ) from None
    return made


def _write(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(data)
