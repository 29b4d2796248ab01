#!/bin/bash
#SBATCH --job-name=lab
#SBATCH --comment=heliostat:0000000000000000
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --output=/home/me/.heliostat/clusters/lab/logs/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --time=240
#SBATCH --signal=B:USR1@90
#SBATCH --requeue
#SBATCH --cpus-per-task=8
#SBATCH --mem=51200M
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --nodelist=n[1-9]
#SBATCH --exclude=n7
#SBATCH --constraint=a100&nvme
#SBATCH --gres=gpu:a100:2
#SBATCH --exclusive
#SBATCH --mail-type=END
#SBATCH --reservation="a b"
# heliostat: 3 nodes of `lab`; this script is the first of them
module load cuda
source /envs/ray/bin/activate || exit 1
exec python3 /home/me/.heliostat/clusters/lab/agent.pyz node < /home/me/.heliostat/clusters/lab/agents.json
