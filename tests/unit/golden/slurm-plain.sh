#!/bin/bash
#SBATCH --job-name=lab
#SBATCH --comment=heliostat:0000000000000000
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --output=/home/me/.heliostat/clusters/lab/logs/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --time=1440
#SBATCH --signal=B:USR1@90
#SBATCH --no-requeue
# heliostat: 3 nodes of `lab`; this script is the first of them
exec /usr/bin/python3 /home/me/.heliostat/clusters/lab/agent.pyz node < /home/me/.heliostat/clusters/lab/agents.json
