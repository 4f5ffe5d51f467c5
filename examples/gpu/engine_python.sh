#!/usr/bin/env bash
# The interpreter of an SGLang that was unpacked into a directory instead of installed: give this file as sglang.python.
#   MEGATRON_DAPO_SGLANG_DIR   that directory
#   MEGATRON_DAPO_SGLANG_PYTHON   the interpreter it was built for, with torch (default python3)
# Engines do not inherit PYTHONPATH or SGLang's variables from the trainer, so they are set here.
set -euo pipefail

: "${MEGATRON_DAPO_SGLANG_DIR:?set it to the directory SGLang was unpacked into}"
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$MEGATRON_DAPO_SGLANG_DIR"

backends=()
if [[ " $* " == *" megatron_dapo.engines.sglang.serve "* ]]; then
  # Neither FlashInfer nor FlashAttention 3 need be in it: Triton's attention and torch's sampling always are, and run if the
  # recipe names no other.
  export SGLANG_IS_FLASHINFER_AVAILABLE=false
  [[ " $* " == *" --attention-backend "* ]] || backends+=(--attention-backend triton)
  [[ " $* " == *" --sampling-backend "* ]] || backends+=(--sampling-backend pytorch)
fi
exec "${MEGATRON_DAPO_SGLANG_PYTHON:-python3}" "$@" ${backends[@]+"${backends[@]}"}
