#!/usr/bin/env bash
# Without any GPU, in minutes: the recipe of `make demo` (a 1 M parameter model learns multi-step sums) on 4 ranks of one node. Does the cluster run us at all?
#
#   sbatch --account=A --partition=P slurm/areal_cpu.sh [--section.option value ...]
#   RECIPE=smoke sbatch --nodes=2 --ntasks-per-node=2 ... slurm/areal_cpu.sh      four training steps over two nodes
#
# The reason of each line is in areal_64gpu.sh.
#SBATCH --job-name=areal-cpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=00:30:00
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

set -euo pipefail
RECIPE=${RECIPE:-laptop} NAME=areal-cpu
# sbatch runs a copy of this file: Slurm knows where it was. Outside sbatch (bash areal_cpu.sh in a salloc) it is where it is.
command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p' | head -n 1)
here=${AREAL_HPC_ROOT:+$AREAL_HPC_ROOT/slurm}
if [[ -z $here ]]; then
    case $command in */areal_cpu.sh*) here=${command%%/areal_cpu.sh*} ;; *) here=$(dirname "$(realpath "$0")") ;; esac
fi
# shellcheck source=slurm/job.sh
source "$here/job.sh"
main --device cpu "$@"
