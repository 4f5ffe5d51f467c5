#!/usr/bin/env bash
# DAPO on Qwen2.5-32B under Slurm, one task an accelerator: sbatch examples/launch/dapo_qwen2.5_32b_slurm.sh MODEL TRAIN EVAL [--set a.b=value]...
# Submit it from the root of the checkout. Ten minutes before the time limit every worker gets SIGTERM: the run saves and ends, and the
# same command continues it.
#SBATCH --job-name=dapo_qwen2.5_32b
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --signal=TERM@600
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,4p' "$0"
    exit 2
fi
settings=(--set "model.path=$1" --set "data.train_paths=['$2']" --set "data.eval_paths=['$3']")
shift 3
recipe=examples/recipes/dapo_qwen2.5_32b.toml

megatron-dapo train "$recipe" "${settings[@]}" "$@" --dry-run
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*} # the first; a pipe into head would end the script when scontrol writes on
MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000)) # one for each job: two jobs may share a node
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
# All cores of the node, and none bound to a task: SGLang's servers and the verifiers of rewards are children of these tasks.
cpus=$((SLURM_CPUS_ON_NODE / ${SLURM_NTASKS_PER_NODE:?give sbatch --ntasks-per-node}))
exec srun --kill-on-bad-exit=1 --cpus-per-task="$cpus" --cpu-bind=none python -m megatron_dapo.launch.worker "$recipe" "${settings[@]}" "$@"
