#!/usr/bin/env bash
# Asynchronous RL on 64 GPUs: 48 ranks generate, 16 train (the paper's 75/25).
#
#   MODEL=/path/to/hf-model DATA=/path/to/problems sbatch --account=A --partition=P --time=24:00:00 slurm/areal_64gpu.sh [--section.option value ...]
#
# What comes from the environment: slurm/job.sh. What to run first on a new cluster: slurm/first_hour.sh. Sites: docs/clusters.md.
#
# In squeue, and in the names of logs and runs.
#SBATCH --job-name=areal-64gpu
# 8 nodes of 8 GPUs. A cluster with 4 a node: sbatch --nodes=16 --ntasks-per-node=4 --gpus-per-node=4 ...
#SBATCH --nodes=8
# One rank per GPU. Always by node: -n 64 alone may fill the first nodes unevenly.
#SBATCH --ntasks-per-node=8
# All GPUs of a node are visible to all its ranks, which pick theirs by local rank. --gpus-per-task would hide the others' and turn peer-to-peer copies off.
#SBATCH --gpus-per-node=8
# For graders, and for the threads of NCCL, HDF5 and the watchdog. 8 x 8 of the node's cores; change it with the node.
#SBATCH --cpus-per-task=8
# All memory of the node: the lanes of the ring lie in /dev/shm, which counts.
#SBATCH --mem=0
# Nobody else's processes between ours: all ranks wait for the slowest.
#SBATCH --exclusive
#SBATCH --time=04:00:00
# Fifteen minutes before the end (a step takes minutes) every rank gets USR1 (no "B:", which would reach this shell alone): stop after this step, write a checkpoint, exit 75.
# A run with long steps stops earlier by itself (--walltime.stop-before-s).
#SBATCH --signal=USR1@900
# After preemption or the death of a node Slurm may start the job again; it goes on from its newest checkpoint.
#SBATCH --requeue
# One log over all lives of the job, instead of the last one's alone.
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

set -euo pipefail
RECIPE=${RECIPE:-areal-64gpu} NAME=areal-64gpu
# sbatch runs a copy of this file: Slurm knows where it was. Outside sbatch (bash areal_64gpu.sh in a salloc) it is where it is.
command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p' | head -n 1)
here=${AREAL_HPC_ROOT:+$AREAL_HPC_ROOT/slurm}
if [[ -z $here ]]; then
    case $command in */areal_64gpu.sh*) here=${command%%/areal_64gpu.sh*} ;; *) here=$(dirname "$(realpath "$0")") ;; esac
fi
# shellcheck source=slurm/job.sh
source "$here/job.sh"
main "$@"
