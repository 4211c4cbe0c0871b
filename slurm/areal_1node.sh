#!/usr/bin/env bash
# One node of 8 GPUs: 6 ranks generate, 2 train. The same run as areal_64gpu.sh with smaller batches, for a first result.
#
#   MODEL=/path/to/hf-model DATA=/path/to/problems sbatch --account=A --partition=P slurm/areal_1node.sh [--section.option value ...]
#
# The reason of each line is in areal_64gpu.sh.
#SBATCH --job-name=areal-1node
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

set -euo pipefail
RECIPE=${RECIPE:-areal-64gpu} NAME=areal-1node
# sbatch runs a copy of this file: Slurm knows where it was. Outside sbatch (bash areal_1node.sh in a salloc) it is where it is.
command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p' | head -n 1)
here=${AREAL_HPC_ROOT:+$AREAL_HPC_ROOT/slurm}
if [[ -z $here ]]; then
    case $command in */areal_1node.sh*) here=${command%%/areal_1node.sh*} ;; *) here=$(dirname "$(realpath "$0")") ;; esac
fi
# shellcheck source=slurm/job.sh
source "$here/job.sh"
main --train.batch-size 1024 "$@"   # an eighth of the batch for an eighth of the ranks; a later option wins
