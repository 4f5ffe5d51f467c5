#!/usr/bin/env bash
# Trains on the node this runs on, one process an accelerator that trains; SGLang servers are started by the run itself. What runs where is
# decided by the layout file; colocated and disaggregated differ in nothing else.
#
#   examples/launch/node.sh examples/layouts/colocated_1node.toml MODEL TRAIN EVAL [--set a.b=value]...
#   examples/launch/node.sh examples/layouts/disaggregated_1node.toml MODEL TRAIN EVAL [--set a.b=value]...
#
# MODEL: Hugging Face directory. TRAIN, EVAL: parquet or JSONL files. Ctrl-C or SIGTERM ends the run with a checkpoint and exit code 75; the
# same command continues it. After a failure that may pass it starts again by itself, RESTARTS times (3).
# COMMAND=pretrain-value before it pretrains the critic of a layout of VAPO or T-PPO.
set -euo pipefail

if [ $# -lt 4 ]; then
    sed -n '2,10p' "$0"
    exit 2
fi
settings=(--set "model.path=$(realpath "$2")" --set "data.train_paths=['$(realpath "$3")']" --set "data.eval_paths=['$(realpath "$4")']")
layout=$(realpath "$1")
cd "$(dirname "$0")/../.."
shift 4
export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" # NVLS takes 2 GB of a GPU for each process group
exec megatron-dapo "${COMMAND:-train}" "$layout" --restarts "${RESTARTS:-3}" "${settings[@]}" "$@"
