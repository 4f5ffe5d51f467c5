#!/usr/bin/env bash
# Trains under Slurm, one task per accelerator that trains; every node's SGLang servers are started by the run itself. What runs where is
# decided by the layout file; colocated and disaggregated differ in nothing else.
#
#   sbatch --nodes=16 --ntasks-per-node=8 examples/launch/slurm.sh examples/layouts/colocated_16nodes.toml MODEL TRAIN EVAL [--set a.b=value]...
#   sbatch --nodes=16 --ntasks-per-node=4 examples/launch/slurm.sh examples/layouts/disaggregated_16nodes.toml MODEL TRAIN EVAL [--set a.b=value]...
#
# Submit it from the root of the checkout. Ten minutes before the time limit every worker gets SIGTERM: the run saves, the job is requeued,
# and continues. It is requeued as well after a failure that another attempt may not meet, until run.max_fruitless_attempts attempts in a row
# made no train step. If nodes are healthy and sglang.keep_seconds is above 0, SGLang's servers stay and only the trainer starts again
# in the same job; checkpoint.memory_copies keeps its last checkpoint in the nodes' memory. COMMAND=pretrain-value before it pretrains the
# critic of a layout of VAPO or T-PPO. Several nodes are measured first, and a slow one ends the job: PREFLIGHT=0 leaves that out. With
# nodes.action = "exclude" a node that is found faulty is left out of the requeued job.
#
# NCCL finds its interfaces by itself. Where it takes a wrong one, export before sbatch, as the site's administrators say, for example
#   NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_4,mlx5_5    the cards of the compute network, without those of storage (ibdev2netdev lists them)
#   NCCL_SOCKET_IFNAME=eth0                    the interface of NCCL's first connections (gloo's is GLOO_SOCKET_IFNAME)
# NCCL_DEBUG=INFO shows what it took.
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
set -euo pipefail

if [ $# -lt 4 ]; then
    sed -n '2,18p' "$0"
    exit 2
fi
layout=$1
settings=(--set "model.path=$2" --set "data.train_paths=['$3']" --set "data.eval_paths=['$4']")
shift 4

command=${COMMAND:-train}
inputs=--inputs
if [ "${SLURM_RESTART_COUNT:-0}" != 0 ]; then inputs=--no-inputs; fi # they were read when the job began
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}                                   # the first; a pipe into head would end the script when scontrol writes on
[ -z "${MASTER_PORT:-}" ] || export MASTER_PORT # the dry run checks it
megatron-dapo "$command" "$layout" "${settings[@]}" "$@" --dry-run "$inputs"
options=()
for option in "$@"; do [ "$option" = --verbose ] || options+=("$option"); done # the pre-flight has no more to say
if [ "$command" = pretrain-value ]; then
    set -- "$@" --pretrain-value
fi
worker=(python -m megatron_dapo.run.worker "$layout" "${settings[@]}" "$@")
# Noted before anything may fail: what is not on record then has been unmounted. Prints the number of the attempt and a free port.
answer=$("${worker[@]}" --begin)
read -r attempt port <<<"$answer"
export MASTER_PORT=${MASTER_PORT:-$port}
# When the job ends: the time left after a signal decides whether a checkpoint is begun.
SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$(date +%s -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" || true)}
export SLURM_JOB_END_TIME OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 MEGATRON_DAPO_SERVERS_ARE_KEPT=1
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # NCCL says why it fails
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # else each rank warns that an address has no reverse name
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} # NVLS takes 2 GB of a GPU for each process group
# All cores of the node, and none bound to a task: SGLang's servers and the verifiers of rewards are children of these tasks. A
# task moves itself to the cores next to its GPU.
cpus=$((SLURM_CPUS_ON_NODE / ${SLURM_NTASKS_PER_NODE:?give sbatch --ntasks-per-node}))
# A node that is lost before a step begins leaves the job smaller than its steps: srun would wait for it forever.
step=(srun --overlap --immediate=120 --kill-on-bad-exit=1)
# If nothing binds tasks, srun warns of the option in every step.
if scontrol show config | grep -qE '^TaskPlugin .*(affinity|cgroup)'; then step+=(--cpu-bind=none); fi
is_smaller() {
    local left
    left=$(squeue -h -j "$SLURM_JOB_ID" -o %D) && [ -n "$left" ] && [ "$left" != "$SLURM_JOB_NUM_NODES" ] || return 1
    echo "a node of this job is lost: it has $left of $SLURM_JOB_NUM_NODES; it starts again on others" >&2
}
# has_others NODES: the partition has enough nodes without NODES; a job that asks for more would wait forever.
has_others() {
    local others
    others=$(sinfo -h -N -p "$SLURM_JOB_PARTITION" -t idle,alloc,mix,comp -o %N | sort -u | grep -cvxF "${1//,/$'\n'}") || true
    [ "${others:-0}" -ge "$SLURM_JOB_NUM_NODES" ] && return
    echo "$1 should be left out, but partition $SLURM_JOB_PARTITION has only ${others:-0} other nodes for $SLURM_JOB_NUM_NODES" >&2
    return 1
}
# requeue NODES: start the job again, without NODES. One that scancel or its time limit is ending is not: its tasks end as at every stop.
requeue() {
    [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ] || return 0
    trap '' TERM # the requeue sends it before the next line is done
    scontrol requeue "$SLURM_JOB_ID"
    if [ -n "$1" ] && has_others "$1"; then
        # Found by their metrics (nodes.action) or by failures (run.max_node_failures). What sbatch --exclude named stays out too.
        before=$(squeue -h -j "$SLURM_JOB_ID" -o %x)
        scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$1${before:+,$before}"
    fi
}
if is_smaller; then
    requeue ""
    exit 75
fi
# Every node is measured first, and a slow one named: see docs/nodes.md.
if [ "${PREFLIGHT:-$((SLURM_JOB_NUM_NODES > 1))}" = 1 ]; then
    "${step[@]}" --cpus-per-task="$cpus" megatron-dapo preflight "$layout" "${settings[@]}" "${options[@]}" \
        --directory "${PREFLIGHT_DIRECTORY:-.}"
fi
# A separate step, as what a step has started ends with it. Without servers or copies of checkpoints to keep it ends at once.
"${step[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --cpus-per-task="$SLURM_CPUS_ON_NODE" "${worker[@]}" --keep-servers </dev/null &
supervisors=$!
trap 'kill "$supervisors" 2>/dev/null || true' EXIT
while :; do
    export MEGATRON_DAPO_ATTEMPT=$attempt
    if "${step[@]}" --cpus-per-task="$cpus" "${worker[@]}"; then
        exit 0
    fi
    # The record in the run directory decides, because the code of srun may be that of a task which it has killed itself.
    code=0
    answer=$("${worker[@]}" --verdict "$attempt") || code=$?
    attempt=$((attempt + 1))
    read -r scope excluded <<<"$answer"
    if [ "$scope" != trainer ] || ! kill -0 "$supervisors" 2>/dev/null; then
        break
    fi
done
if [ "$code" != 0 ] && is_smaller; then
    code=75
fi
if [ "$code" = 75 ]; then
    requeue "$excluded"
fi
exit "$code"
