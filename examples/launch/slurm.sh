#!/usr/bin/env bash
# Trains under Slurm, one task an accelerator that trains; every node's SGLang servers are started by the run itself. What runs where is the
# layout file alone: colocated and disaggregated differ in nothing else.
#
#   sbatch --nodes=16 --ntasks-per-node=8 examples/launch/slurm.sh examples/layouts/colocated_16nodes.toml MODEL TRAIN EVAL [--set a.b=value]...
#   sbatch --nodes=16 --ntasks-per-node=4 examples/launch/slurm.sh examples/layouts/disaggregated_16nodes.toml MODEL TRAIN EVAL [--set a.b=value]...
#
# Submit it from the root of the checkout. Ten minutes before the time limit every worker gets SIGTERM: the run saves and ends, and the
# same command continues it. COMMAND=pretrain-value before it pretrains the critic of a layout of VAPO or T-PPO.
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --signal=TERM@600
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
set -euo pipefail

if [ $# -lt 4 ]; then
    sed -n '2,9p' "$0"
    exit 2
fi
layout=$1
settings=(--set "model.path=$2" --set "data.train_paths=['$3']" --set "data.eval_paths=['$4']")
shift 4

command=${COMMAND:-train}
megatron-dapo "$command" "$layout" "${settings[@]}" "$@" --dry-run
if [ "$command" = pretrain-value ]; then
    set -- "$@" --pretrain-value
fi
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*} # the first; a pipe into head would end the script when scontrol writes on
MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000)) # one for each job: two jobs may share a node
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
# All cores of the node, and none bound to a task: SGLang's servers and the verifiers of rewards are children of these tasks.
cpus=$((SLURM_CPUS_ON_NODE / ${SLURM_NTASKS_PER_NODE:?give sbatch --ntasks-per-node}))
exec srun --kill-on-bad-exit=1 --cpus-per-task="$cpus" --cpu-bind=none python -m megatron_dapo.launch.worker "$layout" "${settings[@]}" "$@"
