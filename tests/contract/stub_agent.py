"""Stands in for the agent: the same words in the same files, and no Ray. It is put in the place of agent.pyz.

What it does is written in $CONTRACT_WORLD/behaviour.json, node -> one of
  ready      becomes READY (also when nothing is written)
  refuse     says why it cannot start, and ends
  vanish     ends without a word
  hold       stays STARTING until $CONTRACT_WORLD/go-NODE is there
  stubborn   becomes READY and does not listen when it is told to end
  mute       becomes READY; when it is told to end it says so, but not that it has ended
"""

import glob
import json
import os
import signal
import subprocess
import sys
import time


def start_time(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
        return None if fields[0] == b"Z" else fields[19].decode()
    except OSError:
        return None


def write(path, value):
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w") as stream:
        json.dump(value, stream)
    os.replace(temporary, path)


def mine(config):
    """Our part of a batch job's config, as the real agent takes it."""
    if "members" not in config:
        return config
    first = config["launch_command"] is not None or len(config["members"]) == 1
    place = 0 if first else int(os.environ[config["rank_variable"]]) + 1
    return {**config, **config["members"][place], "allocation_config": config}


class Node:
    def __init__(self, config):
        self.steps = []
        self.config, self.name, self.world = config, config["node"], os.environ["CONTRACT_WORLD"]
        self.folder = os.path.join(os.path.expanduser("~"), config["folder"])
        self.fellows = os.path.join(self.folder, "nodes")
        if not os.path.isabs(config["folder"]):  # each has a folder of its own, on a machine of its own
            ours = os.path.dirname(config["folder"])
            self.fellows = os.path.join(self.world, "hosts", "*", ours, "*", "nodes")
        self.status, self.table, self.told = {}, None, False
        os.makedirs(os.path.join(self.folder, "nodes"), exist_ok=True)

    def how(self):
        try:
            with open(os.path.join(self.world, "behaviour.json")) as stream:
                return json.load(stream).get(self.name, "ready")
        except OSError:
            return "ready"

    def move(self, state, reason=""):
        self.status = {
            "state": state, "reason": reason, "since": time.time(), "launch": self.config["launch"], "ip": "127.0.0.2",
        }  # fmt: skip
        me = {
            "node": self.name,
            "pid": os.getpid(),
            "start": start_time(os.getpid()),
            "mark": self.config["mark"],
            "executable": sys.executable,
        }
        write(os.path.join(self.folder, "nodes", self.name + ".json"), {**me, **self.status})
        self.gather()

    def gather(self, ended=None):
        """The head's table of all nodes, which it knows from their agents."""
        if self.config["role"] != "head":
            return
        table = dict(self.table or {})
        for words in self.spoken("*"):
            silent = words["state"] in ("READY", "STARTING") and start_time(words["pid"]) != words["start"]
            name, pid = words["node"], words.pop("pid")
            table[name] = {
                **words,
                **({"state": "LOST", "reason": "no heartbeat from its agent"} if silent and pid else {}),
            }
        table[self.name] = self.status
        if (table, ended) != (self.table, None):
            self.table = table
            state = {"schema": 1, "nodes": table, "job": None, "started": time.time(), "ended": ended}
            write(os.path.join(self.folder, "state.json"), state)

    def spoken(self, name):
        """The last words of the nodes of this name."""
        for path in glob.glob(os.path.join(self.fellows, name + ".json")):
            try:
                with open(path) as stream:
                    yield json.load(stream)
            except OSError:
                pass  # its folder went in this moment

    def stop(self, *_):
        self.told = True

    def start_others(self):
        """In a batch job the first node starts the agents of the rest, in one step or by one command a host."""
        if self.config.get("hosts_variable") and self.config.get("launch_command"):
            from heliostat.agent import worker_launch

            whole = {**self.config["allocation_config"], "launch_command": None}
            commands, _ = worker_launch.prepare(
                {**self.config, "members": whole["members"]}, whole, self.name
            )
            for name, _, _ in commands:
                os.makedirs(os.path.join(self.folder, "logs", name), exist_ok=True)
            self.steps = [subprocess.Popen(words) for _, _, words in commands]
        elif self.config.get("launch_command"):
            step = subprocess.Popen(self.config["launch_command"], stdin=subprocess.PIPE)
            step.stdin.write(
                json.dumps({**self.config["allocation_config"], "launch_command": None}).encode()
            )
            step.stdin.close()
            self.steps = [step]

    def platform_status(self, *names):
        """These end; the real ones hear it through the hub."""
        for words in (words for name in names for words in self.spoken(name)):
            if words["node"] != self.name and start_time(words["pid"]) == words["start"]:
                os.kill(words["pid"], signal.SIGTERM)

    def read_requests(self):
        for path in glob.glob(os.path.join(self.folder, "requests", "*.json")):
            with open(path) as stream:
                request = json.load(stream)
            os.unlink(path)
            if request["do"] == "leave":
                self.platform_status(request["node"])

    def end_others(self):
        """Who came with us leaves with us, and everybody with the head."""
        deadline = time.monotonic() + 5  # a stubborn one ends with the job
        while any(step.poll() is None for step in self.steps) and time.monotonic() < deadline:
            self.platform_status(*[member["node"] for member in self.config["members"]])
            time.sleep(0.05)

    def run(self):
        how = self.how()
        with open(os.path.join(self.world, "starts"), "a") as stream:
            stream.write(self.name + "\n")
        for number in (signal.SIGTERM, signal.SIGURG):
            signal.signal(number, signal.SIG_IGN if how == "stubborn" else self.stop)
        if how == "vanish":
            os._exit(1)
        self.move("STARTING")
        if how == "refuse":
            return self.end("FAILED", "no Ray in the environment of this test")
        if self.config["role"] == "head":
            place = {"id": self.config["id"], "ip": "127.0.0.2", "gcs": 6379, "hub": 1}
            write(os.path.join(self.folder, "head.json"), place)
        self.start_others()
        while (
            how == "hold"
            and not self.told
            and not os.path.exists(os.path.join(self.world, "go-" + self.name))
        ):
            time.sleep(0.02)
        connection = os.path.join(self.folder, "connection.json")
        if not self.told:
            if self.config["role"] == "head":
                env = {"RAY_ADDRESS": "127.0.0.2:6379", "RAY_AUTH_MODE": "token"}
                write(connection, {"address": "127.0.0.2:6379", "dashboard_port": 1, "ray": "0", "env": env})
            self.move("READY")
        while not self.told:
            time.sleep(0.02)
            self.gather()
            if self.config["role"] == "head":
                self.read_requests()
        self.move("STOPPING", "stop requested")
        self.end_others()
        if how == "mute":
            time.sleep(0.2)  # the head hears this
            os._exit(0)
        if self.config["role"] == "head" and os.path.exists(connection):
            os.unlink(connection)
        return self.end("GONE", "stop requested")

    def end(self, state, reason):
        self.move(state, reason)
        self.gather({"at": time.time(), "reason": reason})
        return {"ok": state == "GONE", "node": self.name, "state": state, "reason": reason}


if __name__ == "__main__":
    if sys.argv[1] != "node":  # ending and verifying is the real one's
        from heliostat.agent.main import main

        sys.exit(main())
    text = sys.stdin.read()
    if not text:
        sys.exit(1)  # whoever started us is gone
    print(json.dumps(Node(mine(json.loads(text))).run()))
