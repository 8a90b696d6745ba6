#!/usr/bin/env bash
# One run over all nodes of a SLURM job:
#   sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh train --config my.yaml trainer.resume_mode=auto
# The arguments are those of `quadriga`. The nodes need Quadriga in the same environment and a folder
# that all of them see; submit from that folder.
#SBATCH --job-name=quadriga
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
port=${RAY_PORT:-6379}
gpus=${SLURM_GPUS_ON_NODE:-0}
cpus=${SLURM_CPUS_ON_NODE:-$(nproc)}
export RAY_ADDRESS="$head:$port"
export RAY_worker_niceness=0 # ranks get as much of a CPU as reward processes
# Ray takes calls only from those who know this token.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}

start() { # start NODE ARGUMENTS…: keep Ray running on a node until the job ends
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" \
    ray start --block --disable-usage-stats --num-gpus="$gpus" --num-cpus="$cpus" "${@:2}" &
}
start "$head" --head --node-ip-address="$head" --port="$port"
until srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" ray health-check --address "$RAY_ADDRESS"; do
  sleep 2
done
for node in "${nodes[@]:1}"; do start "$node" --address="$RAY_ADDRESS"; done

# SLURM sends USR1 to this script five minutes before the end; Quadriga saves and stops at it.
run="" early=""
trap 'if [[ $run ]]; then kill -USR1 "$run"; else early=1; fi' USR1
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  quadriga "$@" trainer.nnodes="${#nodes[@]}" trainer.n_gpus_per_node="${SLURM_GPUS_ON_NODE:-1}" &
run=$!
if [[ $early ]]; then kill -USR1 "$run"; fi
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
code=0
wait "$run" || code=$?
if kill -0 "$run" 2>/dev/null; then code=0; wait "$run" || code=$?; fi # the first wait ended at USR1
exit "$code"
