"""Run as a process: imports Ray, then for each port on standard input says when that head has an alive node."""

from __future__ import annotations

import socket
import sys
import time

POLL_S = 0.1
SECONDS = 180.0
ALIVE = 0


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def main() -> None:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    print("imported", flush=True)
    for line in sys.stdin:
        port, deadline, said = int(line), time.monotonic() + SECONDS, "nothing listens"
        while time.monotonic() < deadline:
            if answers(port):  # a client of nobody blocks for minutes
                try:
                    nodes = GcsClient(address=f"127.0.0.1:{port}").get_all_node_info(timeout=2).values()
                    if any(node.state == ALIVE for node in nodes):
                        print(f"alive {time.monotonic()}", flush=True)
                        break
                    said = "no node is alive"
                except Exception as error:  # the head is not ready: it may say so in many ways
                    said = " ".join(str(error).split())[:200]
            time.sleep(POLL_S)
        else:
            print(said, flush=True)


if __name__ == "__main__":
    main()
