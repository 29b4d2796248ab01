#!/bin/bash
#PBS -N lab
#PBS -v HELIOSTAT_JOB=heliostat:0000000000000000
#PBS -l select=3:ncpus=8:mem=51200mb:ngpus=2:model=a100
#PBS -l place=scatter:excl
#PBS -l walltime=04:00:00
#PBS -j oe
#PBS -k oed
#PBS -o pbs.out
#PBS -r y
#PBS -W umask=027
#PBS -q gpu
#PBS -A 'a lab'
#PBS -P p
#PBS -m e
#PBS -M ann@x.edu
#PBS -W group_list=g
#PBS -l 'software=it'"'"'s "x"'
# heliostat: 3 nodes of `lab`; this script is the first
export HELIOSTAT_BEGAN=$(date +%s)
module load cuda
source /envs/ray/bin/activate || exit 1
for _ in {1..300}; do [ -e /home/me/.heliostat/clusters/lab/agent.pyz ] && break; sleep 0.2; done
safe() ( cd -P -- "$1" && shift || exit 1; p=$PWD; until [ -z "$p" ]; do set -- "$p" "$@"; p=${p%/*}; done; me=$(id -u) name=$(id -un); all=$(stat -c '%u %A %G %n' -- / "$@") || exit 1; bad=$(printf '%s\n' "$all" | while read -r owner mode rest; do case $owner in "$me"|0) case "$mode $rest" in ?????-??-?\ *|????????-?" $name "*|d????????[tT]\ *) continue ;; esac ;; esac; printf '%s, ' "${rest#* } (owner $owner, $mode)"; done); [ -z "$bad" ] || { echo "another user can change ${bad%, }" >&2; exit 1; }; printf '%s\n' "$PWD" ); d=$(safe /home/me/.heliostat/clusters/lab agent.pyz) || exit 1
exec python3 "$d"/agent.pyz node <<<'{"schema": 1, "cluster": "lab", "id": "0000000000000000", "mark": "0000000000000000", "folder": "/home/me/.heliostat/clusters/lab", "auth": "token", "token_path": "/home/me/.heliostat/clusters/lab/token", "ray": null, "env": {}, "ports": {"window": null, "offset": 0, "client": false}, "heartbeat_timeout_s": 30, "head_lost_timeout_s": 30, "first_heartbeat_timeout_s": 90, "min_nodes": 2, "command": null, "idle": {"timeout_s": null, "window": null}, "time_limit_s": 14400, "launch": 1, "grace_s": 60, "enforce_time_limit": false, "margin_s": 30, "kill_follows_signal": true, "kill_wait_s": 10, "hosts_variable": "PBS_NODEFILE", "address": {"interface": null, "default": "route"}, "role": "worker", "resources": {"cpus": 8, "gpus": 2, "memory": 53687091200, "object_store": null, "custom": {}, "labels": {}}, "members": [{"node": "head", "role": "head"}, {"node": "w1"}, {"node": "w2"}], "launch_command": ["pbsdsh", "-n", "{line}", "--"], "rank_variable": "HELIOSTAT_RANK"}'
