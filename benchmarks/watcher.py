"""Run as a process: imports Ray, then for each `PORT [HOST [NODES]]` on standard input says when that head has so many
alive nodes, in both clocks: `alive MONOTONIC TIME`."""

from __future__ import annotations

import socket
import sys
import time

POLL_S = 0.1
SECONDS = 300.0
ALIVE = 0


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def main() -> None:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    print("imported", flush=True)
    for line in sys.stdin:
        words = line.split()
        port, host = int(words[0]), words[1] if len(words) > 1 else "127.0.0.1"
        nodes = int(words[2]) if len(words) > 2 else 1
        deadline, said = time.monotonic() + SECONDS, "nothing listens"
        while time.monotonic() < deadline:
            if answers(host, port):  # a client of nobody blocks for minutes
                try:
                    known = GcsClient(address=f"{host}:{port}").get_all_node_info(timeout=2).values()
                    alive = sum(node.state == ALIVE for node in known)
                    if alive >= nodes:
                        print(f"alive {time.monotonic()} {time.time()}", flush=True)
                        break
                    said = f"{alive} of {nodes} nodes alive"
                except Exception as error:  # the head is not ready: it may say so in many ways
                    said = " ".join(str(error).split())[:200]
            time.sleep(POLL_S)
        else:
            print(said, flush=True)


if __name__ == "__main__":
    main()
