#!/usr/bin/env bash
# A stage for every GPU of several nodes: sbatch examples/slurm.sh RECIPE [OPTIONS]
#SBATCH --job-name=nwise
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output=nwise-%j.log
set -uo pipefail

# All nodes have to reach this folder: configuration, records and checkpoints are in it.
export RUNS="${RUNS:-$PWD/runs/job-$SLURM_JOB_ID}"
export GPUS="${SLURM_GPUS_ON_NODE:-2}"
FIRST_NODE="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export ENDPOINT="$FIRST_NODE:29400"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# What a start before this one has left is gone on from.
LAST="$(ls -dt "$RUNS"/*/ 2>/dev/null | head -n 1)"
if [ -n "$LAST" ]; then set -- --resume "${LAST%/}"; fi

srun bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$GPUS" --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d --rdzv-endpoint "$ENDPOINT" -m nwise train "$@" --runs "$RUNS"' nwise "$@" &
wait "$!"
CODE=$?
# Stopped in time, with a checkpoint: torchrun's own exit code does not tell, the run's folder does.
if grep -qs '"status": "stopped"' "$RUNS"/*/run.json; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$CODE"
