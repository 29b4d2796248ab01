#!/bin/bash
# heliostat: one node of `lab` on this host; its config comes on standard input
exec 3<&0 </dev/null
module load cuda/12.4
export A='b c'
source '/opt/it'"'"'s a venv/bin/activate' || exit 1
exec python3 /HOME/clusters/lab/agent.pyz node <&3 3<&-
