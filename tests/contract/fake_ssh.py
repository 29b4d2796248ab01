#!/usr/bin/env python3
"""Stands in for ssh where there are no other machines: each target is a home of its own in $CONTRACT_WORLD/hosts.

It takes the options that OpenSSH takes and we use, runs the words in a shell there, and says what OpenSSH 9 was seen to say
of a machine that cannot be reached. Every call is a line of $CONTRACT_WORLD/calls.
"""

import base64
import fcntl
import json
import os
import re
import sys
from pathlib import Path

WORLD = Path(os.environ["CONTRACT_WORLD"])
WITH_VALUE = ("-o", "-p", "-i", "-J", "-l", "-W")


def refuse(target):
    sys.stderr.write(f"ssh: connect to host {target} port 22: Connection refused\n")
    sys.exit(255)


def its_turn():
    """Whether this launch is the one that is refused; the file says how many are still to come."""
    path = WORLD / "refuse-launch"
    with open(WORLD / "ssh.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            return False
        left = int(path.read_text()) - 1
        path.write_text(str(left))
        return left == 0


def main():
    words, options = sys.argv[1:], {}
    if words == ["-V"]:
        sys.stderr.write("OpenSSH_9.2p1\n")
        return
    while words and words[0].startswith("-") and words[0] != "--":
        option = words.pop(0)
        if option not in (*WITH_VALUE, "-G"):
            sys.exit(f"unknown option -- {option}")
        options.setdefault(option, []).append(words.pop(0) if option in WITH_VALUE else "")
    if words[0] == "--":
        words.pop(0)
    target = words.pop(0).rpartition("@")[2]
    if "-G" in options:  # a question about the configuration: nobody is called
        print(f"host {target}\ncontrolpath none")
        return
    text = " ".join(words)
    coded = re.search(r"echo (\S+) \| base64 -d", text)
    plain = base64.b64decode(coded[1]).decode() if coded else text
    with open(WORLD / "calls", "a") as stream:
        stream.write(json.dumps([*sys.argv[1:], plain]) + "\n")
    if "-W" in options:  # no port is open there
        refuse(target)
    if "setsid" in plain and its_turn():
        refuse(target)
    if "agent.pyz stop" in plain and (WORLD / "refuse-cancel").exists():
        refuse(target)
    home = WORLD / "hosts" / target
    home.mkdir(parents=True, exist_ok=True)
    os.environ["HOME"] = str(home)
    os.chdir(home)
    os.execvp("sh", ["sh", "-c", text])


if __name__ == "__main__":
    main()
