"""TLS of one cluster on this node: the node's certificate, the variables that Ray reads, and the contexts of the hub.

Ray's gRPC compares a node's IP address with the names in its certificate, in C++ and in Python, and asks clients for a certificate, too.
The address is known here only, so the certificate is issued here, by the `openssl` program. The cluster's certificate authority comes
with the token, in the directory `tls` beside it: whoever may read the one may read the other, and is a member of the cluster.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import ssl
import subprocess
import tempfile
from typing import Any, Dict, List, Optional, Tuple

from . import files, probe

Json = Dict[str, Any]
DIRECTORY = files.TLS
AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"
KEY = "member.key"  # of every certificate that the authority issues
CLIENT = "client.crt"  # for programs on hosts that are no nodes
NODE = "node.crt"
OPENSSL_S = 60.0
# The keys are deleted with the cluster. Until then no clock matters: those of a lab's hosts may differ.
VALID = ("20000101000000Z", "99991231235959Z")
LOCAL_NAMES = [
    "DNS:localhost",
    "IP:127.0.0.1",
    "IP:127.0.0.2",
    "IP:::1",
]  # Ray Client's server asks for localhost
CONFIG = """
[ca]
default_ca = authority
[authority]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = policy
[policy]
commonName = supplied
[req]
distinguished_name = subject
[subject]
[for_authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[for_member]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = %s
"""


class TlsError(ValueError):
    """This node cannot have a certificate."""


def shared_directory(config: Json) -> str:
    """Where the cluster's files for TLS are, on this host."""
    return os.path.join(os.path.dirname(config["token_path"]), DIRECTORY)


def prepare(config: Json, ip: str, temp: str) -> Dict[str, str]:
    """Makes the files of this node in its private directory and returns the variables of `environment`.

    Does nothing where the cluster has no TLS. Raises TlsError."""
    if not config.get("tls"):
        return environment(config, temp)
    source, target = shared_directory(config), os.path.join(temp, DIRECTORY)
    os.makedirs(target, mode=0o700, exist_ok=True)
    try:
        for name in (AUTHORITY, KEY):
            with open(os.path.join(source, name)) as stream:
                files.write(os.path.join(target, name), stream.read())
    except OSError as error:
        raise TlsError("the cluster's files for TLS cannot be read: %s" % error) from None
    certificate = _issue_member(source, os.path.join(target, KEY), _names(ip))
    files.write(os.path.join(target, NODE), certificate)
    try:  # for programs that a person starts on this host
        files.write(os.path.join(source, "node-%s.crt" % config["node"]), certificate)
    except OSError:
        pass
    return environment(config, temp)


def environment(config: Json, temp: str) -> Dict[str, str]:
    """The variables of Ray's processes and of drivers on this node, once `prepare` has made the files."""
    if config.get("tls"):
        return _variables(os.path.join(temp, DIRECTORY), NODE)
    # the shell that started us may have another cluster's; a person may give Ray certificates of their own
    return {} if "RAY_USE_TLS" in (config.get("env") or {}) else {"RAY_USE_TLS": "0"}


def exports(config: Json) -> Dict[str, str]:
    """The variables of a program that a person starts on this host: the paths outlive no cluster, but the agent."""
    return _variables(shared_directory(config), "node-%s.crt" % config["node"]) if config.get("tls") else {}


def server_context(config: Json, temp: str) -> Optional[ssl.SSLContext]:
    """For a server of ours: clients must have a certificate of the cluster. None: the cluster has no TLS."""
    return _context(ssl.PROTOCOL_TLS_SERVER, temp) if config.get("tls") else None


def client_context(config: Json, temp: str) -> Optional[ssl.SSLContext]:
    """For a connection to such a server, which must have a certificate for the address that we connect to."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, temp) if config.get("tls") else None


def make_authority(config: Json) -> None:
    """The files that the client makes elsewhere: nobody has made the record of a script that is submitted by hand."""
    directory = shared_directory(config)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    key = os.path.join(directory, AUTHORITY_KEY)
    for path in (key, os.path.join(directory, KEY)):
        files.write(path, _openssl(["ecparam", "-name", "prime256v1", "-genkey", "-noout"], directory))
    signer = ["-selfsign", "-extensions", "for_authority"]
    subject = "/CN=heliostat %s" % config["id"]
    files.write(os.path.join(directory, AUTHORITY), _issue(key, key, subject, LOCAL_NAMES, signer))
    certificate = _issue_member(directory, os.path.join(directory, KEY), LOCAL_NAMES)
    files.write(os.path.join(directory, CLIENT), certificate)


def _variables(directory: str, certificate: str) -> Dict[str, str]:
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": os.path.join(directory, certificate),
        "RAY_TLS_SERVER_KEY": os.path.join(directory, KEY),
        "RAY_TLS_CA_CERT": os.path.join(directory, AUTHORITY),
    }


def _context(protocol: int, temp: str) -> ssl.SSLContext:
    directory = os.path.join(temp, DIRECTORY)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(os.path.join(directory, NODE), os.path.join(directory, KEY))
    context.load_verify_locations(os.path.join(directory, AUTHORITY))
    return context


def _names(ip: str) -> List[str]:
    """What this node is called by those who connect to it."""
    host = socket.gethostname()
    hosts = [host, host.partition(".")[0]] if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", host) else []
    names = ["IP:" + ip.partition("%")[0], *LOCAL_NAMES, *("DNS:" + name for name in hosts)]
    return list(dict.fromkeys(names))


def _issue_member(directory: str, key: str, names: List[str]) -> str:
    authority, its_key = (os.path.join(directory, name) for name in (AUTHORITY, AUTHORITY_KEY))
    signer = ["-cert", authority, "-extensions", "for_member"]
    return _issue(key, its_key, "/CN=member", names, signer)


def _issue(key: str, authority_key: str, subject: str, names: List[str], signer: List[str]) -> str:
    """A certificate of this key, signed by the authority's."""
    # `openssl ca`, since older `openssl x509` can give a certificate no other start than now
    with tempfile.TemporaryDirectory(prefix="tls-") as work:
        for name, text in (
            ("config", CONFIG % ",".join(names)),
            ("index", ""),
            ("serial", secrets.token_hex(8)),
        ):
            files.write(os.path.join(work, name), text)
        _openssl(["req", "-new", "-config", "config", "-key", key, "-subj", subject, "-out", "request"], work)
        dates = ["-startdate", VALID[0], "-enddate", VALID[1]]
        words = ["ca", "-batch", "-notext", "-config", "config", "-keyfile", authority_key, *signer, *dates]
        _openssl([*words, "-in", "request", "-out", "certificate"], work)
        with open(os.path.join(work, "certificate")) as stream:
            return stream.read()


def _openssl(words: List[str], directory: str) -> str:
    program, env = probe.openssl(), dict(os.environ)
    if program is None:
        raise TlsError("there is no `openssl` program on this host, which TLS needs")
    of_system = os.path.dirname(program) == probe.SYSTEM
    for name in ("OPENSSL_CONF", *(("LD_LIBRARY_PATH", "LD_PRELOAD") if of_system else ())):
        env.pop(name, None)  # a module's libraries do not fit the system's program
    code, out, err = _run([program, *words], directory, env)
    if code:
        lines = [line.strip() for line in err.splitlines() if line.strip()]
        raise TlsError("`openssl %s` failed (code %d): %s" % (words[0], code, " | ".join(lines[-2:])[-300:]))
    return out


def _run(argv: List[str], directory: str, env: Dict[str, str]) -> Tuple[int, str, str]:
    pipe = subprocess.PIPE
    try:
        done = subprocess.run(
            argv,
            cwd=directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            timeout=OPENSSL_S,
        )
    except OSError as error:
        return 127, "", str(error)
    except subprocess.TimeoutExpired:
        return 124, "", "no answer within %d s" % OPENSSL_S
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
