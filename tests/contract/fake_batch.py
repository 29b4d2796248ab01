#!/usr/bin/env python3
"""Stands in for a scheduler's commands where no real one is, by the name it is called: SLURM's sbatch, squeue, scancel, sinfo,
scontrol and srun; PBS's qsub, qstat, qselect, qdel, qsig and pbsdsh.

State is in $CONTRACT_WORLD/jobs: a file a job. A job is a process group that lives until its script ends or it is
cancelled. It answers in the words that Slurm 22.05 and OpenPBS 23.06 were seen to use.

While $CONTRACT_WORLD/queue holds a number, the job with this number stays in the queue; it starts when the file is gone.
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
JOBS = WORLD / "jobs"
FIELDS = {"i": "id", "T": "state", "k": "comment", "N": "nodes", "r": "reason"}
LIVING = ("PENDING", "RUNNING")


def start_time(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] == b"Z" else fields[19].decode()
    except OSError:
        return None


def fail(text, code=1):
    sys.stderr.write(text + "\n")
    sys.exit(code)


def options(name):
    """Values of a long option, wherever it stands."""
    return [word.partition("=")[2] for word in sys.argv[1:] if word.startswith(f"--{name}=")]


def load():
    found = {}
    for path in sorted(JOBS.glob("*.json")):
        job = json.loads(path.read_text())
        if job["state"] == "PENDING" and not is_queued(job["id"]):
            job = run(job)
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


def refuse(text, code):
    if (WORLD / "refuse-launch").exists():
        left = int((WORLD / "refuse-launch").read_text()) - 1
        (WORLD / "refuse-launch").write_text(str(left))
        if left == 0:
            fail(text, code)


def next_number():
    return str(1 + max((int(path.stem.partition(".")[0]) for path in JOBS.glob("*.json")), default=0))


def sbatch():
    script = Path(sys.argv[-1])
    refuse("sbatch: error: Batch job submission failed: Requested node configuration is not available", 1)
    text = script.read_text()
    said = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.M))
    number = next_number()
    output = said["output"].strip('"').replace("%j", number).replace("%%", "%")
    print(start(number, script, output, said["comment"], {"SLURM_JOB_ID": number}))


def is_queued(number):
    path = WORLD / "queue"
    return path.exists() and path.read_text().strip() == number.partition(".")[0]


def start(number, script, output, mark, more):
    job = {"id": number, "state": "PENDING", "reason": "Priority", "pid": 0, "start": None, "comment": mark,
           "nodes": "", "script": str(script), "output": os.path.abspath(output), "env": more}  # fmt: skip
    save(job) if is_queued(number) else run(job)
    return number


def run(job):
    env = {**os.environ, **job["env"]}
    with open(job["output"], "ab") as out:
        process = subprocess.Popen(
            ["bash", job["script"]],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,
        )
    job = {
        **job,
        "state": "RUNNING",
        "reason": "None",
        "pid": process.pid,
        "start": start_time(process.pid),
        "nodes": "n1",
    }
    save(job)
    return job


def squeue():
    jobs = load()
    wanted = options("jobs")[0].split(",") if options("jobs") else list(jobs)
    every = bool(options("states"))
    shown = [jobs[i] for i in wanted if i in jobs and (every or jobs[i]["state"] in LIVING)]
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
        if job is None or job["state"] not in LIVING:
            continue
        if "--batch" in sys.argv and job["pid"]:
            os.kill(job["pid"], getattr(signal, "SIG" + options("signal")[0]))
            continue
        cancel(job)


def cancel(job):
    if job["pid"]:
        end_group(job["pid"])
    while job["pid"] and start_time(job["pid"]) == job["start"]:
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


def qsub():
    script = Path(sys.argv[-1])
    refuse("qsub: Illegal attribute or resource value select.ncpus", 166)
    said = dict(re.findall(r"^#PBS (-\w(?: select)?)[ =](.*)$", script.read_text(), re.M))
    number = next_number() + ".fake"
    hosts = sum(int(chunk.partition(":")[0]) for chunk in said["-l select"].split("+"))
    (JOBS / f"{number}.hosts").write_text("".join(f"n{i}\n" for i in range(1, hosts + 1)))
    env = {"PBS_JOBID": number, "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": str(JOBS / f"{number}.hosts")}
    print(start(number, script, said["-o"], said["-v"].partition("=")[2], env))


def qstat():
    jobs, document = load(), {"pbs_version": "23.06.06"}
    if "-Q" in sys.argv:
        return print(json.dumps({**document, "Queue": {"workq": {"enabled": "True"}}}))
    if "-B" in sys.argv:
        return print(json.dumps({**document, "Server": {"fake": {"default_queue": "workq"}}}))
    wanted = sys.argv[-1]
    if wanted not in jobs or jobs[wanted]["state"] not in LIVING:
        print(json.dumps(document))
        fail(f"qstat: Unknown Job Id {wanted}", 153)
    running = jobs[wanted]["state"] == "RUNNING"
    about = {
        "job_state": "R" if running else "Q",
        "substate": 42 if running else 10,
        "Variable_List": {"HELIOSTAT_JOB": jobs[wanted]["comment"]},
    }
    print(json.dumps({**document, "Jobs": {wanted: about}}))


def qselect():
    print("".join(f"{number}\n" for number, job in load().items() if job["state"] in LIVING), end="")


def qdel():
    jobs, numbers = load(), [word for word in sys.argv[1:] if word not in ("-W", "force")]
    for number in numbers:
        if number not in jobs:
            fail(f"qdel: Unknown Job Id {number}.fake", 153)
        if not (WORLD / "refuse-cancel").exists() and jobs.get(number, {}).get("state") in LIVING:
            cancel(jobs[number])


def qsig():
    jobs = load()
    for number in sys.argv[3:]:
        if not (WORLD / "refuse-cancel").exists() and jobs.get(number, {}).get("state") == "RUNNING":
            os.killpg(jobs[number]["pid"], getattr(signal, "SIG" + sys.argv[2]))


def pbsdsh():
    """The task's own environment and output come with its script; its exit code does not come back."""
    env = {k: v for k, v in os.environ.items() if k.startswith("PBS_")} | {"PATH": "/bin:/usr/bin"}
    subprocess.run(sys.argv[sys.argv.index("--") + 1 :], stdin=subprocess.DEVNULL, env=env, cwd="/")
    sys.exit(0)


if __name__ == "__main__":
    JOBS.mkdir(parents=True, exist_ok=True)
    name = Path(sys.argv[0]).name
    if "--version" in sys.argv:
        sys.exit(print("pbs_version = 23.06.06" if name.startswith("q") else "slurm-wlm 22.05.8"))
    if name in ("srun", "pbsdsh"):
        {"srun": srun, "pbsdsh": pbsdsh}[name]()
    with open(JOBS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        globals()[name]()
