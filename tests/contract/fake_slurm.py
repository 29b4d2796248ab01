#!/usr/bin/env python3
"""Stands in for SLURM's commands where no real one is: sbatch, squeue, scancel, sinfo, scontrol and srun, by the name it is called.

State is in $CONTRACT_WORLD/slurm: a file a job. A job is a process group that lives until its script ends or it is
cancelled. It answers in the words that Slurm 22.05 was seen to use.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

WORLD = Path(os.environ["CONTRACT_WORLD"])
JOBS = WORLD / "slurm"
FIELDS = {"i": "id", "T": "state", "k": "comment", "N": "nodes"}


def start_time(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] == b"Z" else fields[19].decode()
    except OSError:
        return None


def fail(text):
    sys.stderr.write(text + "\n")
    sys.exit(1)


def options(name):
    """Values of a long option, wherever it stands."""
    return [word.partition("=")[2] for word in sys.argv[1:] if word.startswith(f"--{name}=")]


def load():
    found = {}
    for path in sorted(JOBS.glob("*.json")):
        job = json.loads(path.read_text())
        if job["state"] == "RUNNING" and start_time(job["pid"]) != job["start"]:
            end_group(job["pid"])  # the script has ended: the scheduler ends what is left of the job
            job["state"] = "COMPLETED"
            save(job)
        found[job["id"]] = job
    return found


def save(job):
    path = JOBS / f"{job['id']}.json"
    path.with_suffix(".tmp").write_text(json.dumps(job))
    path.with_suffix(".tmp").replace(path)


def end_group(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def sbatch():
    script = Path(sys.argv[-1])
    if (WORLD / "refuse-launch").exists():
        left = int((WORLD / "refuse-launch").read_text()) - 1
        (WORLD / "refuse-launch").write_text(str(left))
        if left == 0:
            fail("sbatch: error: Batch job submission failed: Requested node configuration is not available")
    text = script.read_text()
    said = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.M))
    number = str(1 + max((int(path.stem) for path in JOBS.glob("*.json")), default=0))
    output = said["output"].strip('"').replace("%j", number).replace("%%", "%")
    env = {**os.environ, "SLURM_JOB_ID": number}
    with open(output, "ab") as out:
        process = subprocess.Popen(
            ["bash", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,
        )
    job = {"id": number, "state": "RUNNING", "pid": process.pid, "start": start_time(process.pid),
           "comment": said["comment"], "nodes": "n1"}  # fmt: skip
    save(job)
    print(number)


def squeue():
    jobs = load()
    wanted = options("jobs")[0].split(",") if options("jobs") else list(jobs)
    every = bool(options("states"))
    shown = [jobs[i] for i in wanted if i in jobs and (every or jobs[i]["state"] == "RUNNING")]
    if options("jobs") and not any(i in jobs for i in wanted):
        fail("slurm_load_jobs error: Invalid job id specified")
    for job in shown:
        print(
            re.sub(r"%(\w)", lambda m, job=job: str(job.get(FIELDS.get(m[1]), "None")), options("format")[0])
        )


def scancel():
    jobs = load()
    if (WORLD / "refuse-cancel").exists():
        return
    for number in [word for word in sys.argv[1:] if not word.startswith("-")]:
        job = jobs.get(number)
        if job is None or job["state"] != "RUNNING":
            continue
        if "--batch" in sys.argv:
            os.kill(job["pid"], getattr(signal, "SIG" + options("signal")[0]))
            continue
        end_group(job["pid"])
        while start_time(job["pid"]) == job["start"]:
            time.sleep(0.02)
        save({**job, "state": "CANCELLED"})


def sinfo():
    print("debug*|up|infinite|100|64|256000|(null)|1-infinite")


def scontrol():
    print("KillWait                = 30 sec")


def srun():
    count = int(options("ntasks")[0])
    command = sys.argv[next(i for i, word in enumerate(sys.argv) if i and not word.startswith("-")) :]
    text = sys.stdin.buffer.read()  # --input=all: each task gets a copy
    tasks = []
    for rank in range(count):
        task = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "SLURM_PROCID": str(rank)})
        task.stdin.write(text)
        task.stdin.close()
        tasks.append(task)
    sys.exit(max([task.wait() for task in tasks]))


if __name__ == "__main__":
    JOBS.mkdir(parents=True, exist_ok=True)
    name = Path(sys.argv[0]).name
    if "--version" in sys.argv:
        sys.exit(print("slurm-wlm 22.05.8"))
    if name == "srun":
        srun()
    with open(JOBS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "sinfo": sinfo, "scontrol": scontrol}[name]()
