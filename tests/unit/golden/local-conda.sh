#!/bin/bash
# heliostat: one node of `lab` on this host; its config comes on standard input
exec 3<&0 </dev/null
eval "$("${CONDA_EXE:-conda}" shell.bash hook)" || exit 1
conda activate 'my env' || exit 1
exec python3 /HOME/clusters/lab/agent.pyz node <&3 3<&-
