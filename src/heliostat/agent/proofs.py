"""The proof that both sides of a hub connection know the cluster's secret: an HMAC of the other side's challenge."""

from __future__ import annotations

import hashlib
import hmac


def proof(secret: str, side: str, challenge: str, name: str) -> str:
    """side: "client", "worker" or "head"; name: of the node that connects, in the proofs of both sides."""
    text = "%s %s %s" % (side, challenge, name)
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_equal(received: object, expected: str) -> bool:
    """Compare in constant time. `received` may be any JSON value."""
    return hmac.compare_digest(str(received).encode("utf-8", "backslashreplace"), expected.encode())
