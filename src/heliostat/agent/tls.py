"""TLS of one cluster on this node: the node's certificate, the variables that Ray reads, and the contexts of the hub.

Ray's gRPC, in C++ and in Python, compares a node's IP address with the names in its certificate, and requires client
certificates, too. The address is known on the node only, so the agent issues the certificate there with the `openssl`
program. The files of the cluster's certificate authority are in the directory `tls` beside the token; a process that can
read them is a member of the cluster.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import ssl
import subprocess
import tempfile
from typing import Dict, List, Optional, Tuple

from . import files, probe
from .protocol import AgentConfig, RefusalCause, Refused

DIRECTORY = files.TLS
AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"
KEY = "member.key"  # the key of every certificate that the authority issues
CLIENT = "client.crt"  # for programs on hosts that are not nodes
NODE = "node.crt"
OPENSSL_S = 60.0
# The keys are deleted with the cluster. Until then the clocks of its hosts, which may differ, must not matter.
VALID = ("20000101000000Z", "99991231235959Z")
LOCAL_NAMES = [
    "DNS:localhost",
    "IP:127.0.0.1",
    "IP:127.0.0.2",
    "IP:::1",
]  # Ray Client's server connects to localhost
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


class TlsError(Refused):
    """A certificate cannot be issued on this node."""


def shared_directory(config: AgentConfig) -> str:
    """The directory of the cluster's TLS files on this host."""
    return os.path.join(os.path.dirname(config["token_path"]), DIRECTORY)


def prepare(config: AgentConfig, ip: str, temp: str) -> Dict[str, str]:
    """Make the TLS files of this node in its private directory and return the variables of `environment`.

    Does nothing if the cluster has no TLS. Raises TlsError."""
    if not config.get("tls"):
        return environment(config, temp)
    source, target = shared_directory(config), os.path.join(temp, DIRECTORY)
    os.makedirs(target, mode=0o700, exist_ok=True)
    try:
        for name in (AUTHORITY, KEY):
            with open(os.path.join(source, name)) as stream:
                files.write(os.path.join(target, name), stream.read())
    except OSError as error:
        reason = "the cluster's files for TLS cannot be read: %s" % error
        raise TlsError(RefusalCause.TLS_FAILED, reason) from None
    certificate = _issue_member(source, os.path.join(target, KEY), _names(ip))
    files.write(os.path.join(target, NODE), certificate)
    try:  # for programs that a user starts on this host
        files.write(os.path.join(source, "node-%s.crt" % config["node"]), certificate)
    except OSError:
        pass
    return environment(config, temp)


def environment(config: AgentConfig, temp: str) -> Dict[str, str]:
    """The variables of Ray's processes and of drivers on this node, once `prepare` has made the files."""
    if config.get("tls"):
        return _variables(os.path.join(temp, DIRECTORY), NODE)
    # the inherited environment may belong to another cluster; a user may configure other certificates
    return {} if "RAY_USE_TLS" in (config.get("env") or {}) else {"RAY_USE_TLS": "0"}


def exports(config: AgentConfig) -> Dict[str, str]:
    """The variables of a program that a user starts on this host; the files outlive the agent, not the cluster."""
    return _variables(shared_directory(config), "node-%s.crt" % config["node"]) if config.get("tls") else {}


def server_context(config: AgentConfig, temp: str) -> Optional[ssl.SSLContext]:
    """For the hub: clients must have a certificate of the cluster. None if the cluster has no TLS."""
    return _context(ssl.PROTOCOL_TLS_SERVER, temp) if config.get("tls") else None


def client_context(config: AgentConfig, temp: str) -> Optional[ssl.SSLContext]:
    """For a connection to the hub, which must have a certificate for its address."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, temp) if config.get("tls") else None


def make_authority(config: AgentConfig) -> None:
    """Make the files of the authority for a script that a user submitted without the client."""
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
    """The names of this node in its certificate."""
    host = socket.gethostname()
    hosts = [host, host.partition(".")[0]] if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", host) else []
    names = ["IP:" + ip.partition("%")[0], *LOCAL_NAMES, *("DNS:" + name for name in hosts)]
    return list(dict.fromkeys(names))


def _issue_member(directory: str, key: str, names: List[str]) -> str:
    authority, its_key = (os.path.join(directory, name) for name in (AUTHORITY, AUTHORITY_KEY))
    signer = ["-cert", authority, "-extensions", "for_member"]
    return _issue(key, its_key, "/CN=member", names, signer)


def _issue(key: str, authority_key: str, subject: str, names: List[str], signer: List[str]) -> str:
    """A certificate of this key, signed by the authority's key."""
    # `openssl ca`: older versions of `openssl x509` cannot set the start of validity
    with tempfile.TemporaryDirectory(prefix="tls-") as work:
        for name, text in (
            ("config", CONFIG % ",".join(names)),
            ("index", ""),
            ("serial", secrets.token_hex(8)),
        ):
            files.write(os.path.join(work, name), text)
        _openssl(["req", "-new", "-config", "config", "-key", key, "-subj", subject, "-out", "request"], work)
        dates = ["-startdate", VALID[0], "-enddate", VALID[1]]
        argv = ["ca", "-batch", "-notext", "-config", "config", "-keyfile", authority_key, *signer, *dates]
        _openssl([*argv, "-in", "request", "-out", "certificate"], work)
        with open(os.path.join(work, "certificate")) as stream:
            return stream.read()


def _openssl(arguments: List[str], directory: str) -> str:
    program, env = probe.openssl(), dict(os.environ)
    if program is None:
        raise TlsError(
            RefusalCause.OPENSSL_MISSING, "there is no `openssl` program on this host, which TLS needs"
        )
    of_system = os.path.dirname(program) == probe.SYSTEM
    for name in ("OPENSSL_CONF", *(("LD_LIBRARY_PATH", "LD_PRELOAD") if of_system else ())):
        env.pop(
            name, None
        )  # libraries of an environment module may be incompatible with the system's program
    code, out, err = _run([program, *arguments], directory, env)
    if code:
        lines = [line.strip() for line in err.splitlines() if line.strip()]
        text = " | ".join(lines[-2:])[-300:]
        reason = "`openssl %s` failed (code %d): %s" % (arguments[0], code, text)
        raise TlsError(RefusalCause.TLS_FAILED, reason)
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
