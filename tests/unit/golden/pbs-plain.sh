#!/bin/bash
#PBS -N lab
#PBS -v HELIOSTAT_JOB=heliostat:0000000000000000
#PBS -l select=3
#PBS -l place=scatter
#PBS -l walltime=24:00:00
#PBS -j oe
#PBS -k oed
#PBS -o pbs.out
#PBS -r n
#PBS -W umask=022
# heliostat: 3 nodes of `lab`; this script is the first
export HELIOSTAT_BEGAN=$(date +%s)
for _ in {1..300}; do [ -e /home/me/.heliostat/clusters/lab/agent.pyz ] && break; sleep 0.2; done
safe() ( cd -P -- "$1" && shift || exit 1; p=$PWD; until [ -z "$p" ]; do set -- "$p" "$@"; p=${p%/*}; done; me=$(id -u) name=$(id -un); all=$(stat -c '%u %A %G %n' -- / "$@") || exit 1; bad=$(printf '%s\n' "$all" | while read -r owner mode rest; do case $owner in "$me"|0) case "$mode $rest" in ?????-??-?\ *|????????-?" $name "*|d????????[tT]\ *) continue ;; esac ;; esac; printf '%s, ' "${rest#* } (owner $owner, $mode)"; done); [ -z "$bad" ] || { echo "another user can change ${bad%, }" >&2; exit 1; }; printf '%s\n' "$PWD" ); d=$(safe /home/me/.heliostat/clusters/lab agent.pyz) || exit 1
exec /usr/bin/python3 "$d"/agent.pyz node <<<'{"schema": 1, "cluster": "lab", "id": "0000000000000000", "mark": "0000000000000000", "folder": "/home/me/.heliostat/clusters/lab", "auth": "token", "token_path": "/home/me/.heliostat/clusters/lab/token", "ray": null, "env": {}, "ports": {"window": null, "offset": 0, "client": false}, "heartbeat_timeout_s": 30, "head_lost_timeout_s": 30, "first_heartbeat_timeout_s": 90, "min_nodes": 3, "command": null, "idle": {"timeout_s": null, "window": null}, "time_limit_s": 86400, "launch": 1, "grace_s": 60, "enforce_time_limit": false, "margin_s": 30, "kill_follows_signal": true, "kill_wait_s": 10, "hosts_variable": "PBS_NODEFILE", "address": {"interface": null, "default": "route"}, "role": "worker", "resources": {"cpus": null, "gpus": null, "memory": null, "object_store": null, "custom": {}, "labels": {}}, "members": [{"node": "head", "role": "head"}, {"node": "w1"}, {"node": "w2"}], "launch_command": ["pbsdsh", "-n", "{line}", "--"], "rank_variable": "HELIOSTAT_RANK"}'
