#!/bin/bash
#$ -N ray-lab
#$ -ac HELIOSTAT=heliostat:0000000000000000
#$ -o /home/me/.heliostat/clusters/lab/logs/gridengine.out
#$ -j y
#$ -r n
#$ -S /bin/bash
#$ -pe ray 6
#$ -l h_rt=14400
#$ -q gpu.q
#$ -l gpu=1
# heliostat: 3 nodes of `lab`; this script is the first
export HELIOSTAT_BEGAN=$(date +%s) HELIOSTAT_HOSTS=$TMPDIR/heliostat-hosts
awk '{print $1}' "$PE_HOSTFILE" >"$HELIOSTAT_HOSTS" || exit 1
module load cuda
source /envs/ray/bin/activate || exit 1
for _ in {1..300}; do [ -e /home/me/.heliostat/clusters/lab/agent.pyz ] && break; sleep 0.2; done
exec python3 /home/me/.heliostat/clusters/lab/agent.pyz node <<<'{"schema": 1, "cluster": "lab", "id": "0000000000000000", "mark": "0000000000000000", "folder": "/home/me/.heliostat/clusters/lab", "auth": "token", "token_path": "/home/me/.heliostat/clusters/lab/token", "ray": null, "env": {}, "ports": {"window": null, "offset": 0, "client": false}, "heartbeat_timeout_s": 30, "head_lost_timeout_s": 30, "first_heartbeat_timeout_s": 90, "min_nodes": 3, "command": null, "idle": {"timeout_s": null, "window": null}, "time_limit_s": 14400, "launch": 1, "grace_s": 60, "enforce_time_limit": false, "margin_s": 30, "hosts_variable": "HELIOSTAT_HOSTS", "address": {"interface": null, "default": "route"}, "role": "worker", "resources": {"cpus": 2, "gpus": null, "memory": null, "object_store": null, "custom": {}, "labels": {}}, "members": [{"node": "head", "role": "head"}, {"node": "w1"}, {"node": "w2"}], "launch_command": ["sh", "-c", "host=$(sed -n \"$(($1 + 1))p\" \"$HELIOSTAT_HOSTS\"); shift; exec qrsh -inherit -nostdin \"$host\" \"$@\"", "sh", "{line}"], "rank_variable": "HELIOSTAT_RANK"}'
