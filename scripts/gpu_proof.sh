#!/usr/bin/env bash
# Run every part of the GPU code once on a machine with one GPU, without a network, in at most nine
# minutes, and write gpu_proof.json. See benchmarks/gpu_proof.py for the parts.
#
#   scripts/gpu_proof.sh                            .venv, .venv-vllm or python3, the first with torch
#   PYTHON=python3.12 scripts/gpu_proof.sh
#   scripts/gpu_proof.sh --out h100.json --size 0.5b
#
# An environment without Quadriga is enough if it has its dependencies: src/ is on the path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
for python in ${PYTHON:-.venv/bin/python .venv-vllm/bin/python python3}; do
  if "$python" -c 'import torch' 2>/dev/null; then
    exec timeout --kill-after=10 540 "$python" benchmarks/gpu_proof.py "$@"
  fi
done
echo "scripts/gpu_proof.sh: no Python with torch was found; set PYTHON=…" >&2
exit 1
