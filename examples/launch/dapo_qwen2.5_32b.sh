#!/usr/bin/env bash
# DAPO on Qwen2.5-32B with torchrun: run this on each of 16 nodes with 8 accelerators.
#
#   NODE_RANK=0 MASTER_ADDR=node0 examples/launch/dapo_qwen2.5_32b.sh MODEL TRAIN EVAL [--set a.b=value]...
#
# MODEL: Hugging Face directory of Qwen2.5-32B. TRAIN: dapo-math-17k.parquet. EVAL: aime-2024.parquet. All on storage every node sees,
# as is this checkout, whose directory runs/ takes the output. To end it with a checkpoint send SIGTERM to a worker, whose process ids are in
# runs/dapo_qwen2.5_32b/workers (all stop): torchrun itself kills its workers 30 s after a signal. torchrun starts the workers again after a failure;
# what would repeat, and what a signal stopped, they end within a second.
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,9p' "$0"
    exit 2
fi
: "${NODE_RANK:?the rank of this node, 0 to 15}"
: "${MASTER_ADDR:?the host name of node 0}"
settings=(--set "model.path=$(realpath "$1")" --set "data.train_paths=['$(realpath "$2")']" --set "data.eval_paths=['$(realpath "$3")']")
cd "$(dirname "$0")/../.."
shift 3
recipe=examples/recipes/dapo_qwen2.5_32b.toml

if [ "$NODE_RANK" = 0 ]; then
    megatron-dapo train "$recipe" "${settings[@]}" "$@" --dry-run --nodes 16 --gpus-per-node 8
fi
# A wrong interface: export NCCL_IB_HCA and NCCL_SOCKET_IFNAME, see slurm.sh.
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" # NVLS takes 2 GB of a GPU for each process group
rendezvous=(--nnodes 16 --nproc-per-node 8 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR")
if [ "${PREFLIGHT:-1}" = 1 ]; then # every node is measured, and a slow one named; PREFLIGHT=0 leaves it out
    python -m megatron_dapo.launch.torchrun "${rendezvous[@]}" --master-port "$((${MASTER_PORT:-29500} + 1))" \
        --module megatron_dapo.cli.main preflight "$recipe" "${settings[@]}" "$@"
fi
exec python -m megatron_dapo.launch.torchrun --max-restarts 3 "${rendezvous[@]}" --master-port "${MASTER_PORT:-29500}" \
    --module megatron_dapo.run.worker "$recipe" "${settings[@]}" "$@"
