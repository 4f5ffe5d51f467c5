#!/usr/bin/env bash
# DAPO on Qwen2.5-32B under Slurm, one task an accelerator: sbatch examples/launch/dapo_qwen2.5_32b_slurm.sh MODEL TRAIN EVAL [--set a.b=value]...
# Submit it from the root of the checkout. slurm.sh next to it says how it ends and is continued.
#SBATCH --job-name=dapo_qwen2.5_32b
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,3p' "$0"
    exit 2
fi
exec bash examples/launch/slurm.sh examples/recipes/dapo_qwen2.5_32b.toml "$@"
