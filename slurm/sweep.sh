#!/usr/bin/env bash
# A sweep: one array task per line of options, each a run of its own in runs/NAME-ARRAYJOB_TASK, requeued by itself.
#
#   sbatch --account=A --array=0-2%3 slurm/sweep.sh                               seeds 0, 1, 2
#   OPTIONS=options.txt sbatch --account=A --array=0-5%2 slurm/sweep.sh           line K of options.txt for task K (words are split at blanks, no quotes)
#   RECIPE=areal-64gpu sbatch --nodes=8 --ntasks-per-node=8 --gpus-per-node=8 ... slurm/sweep.sh
#
# The reason of each other line is in areal_64gpu.sh. At most 3 tasks at a time (%3): a sweep need not take the whole partition.
#SBATCH --job-name=areal-sweep
#SBATCH --array=0-2%3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=00:30:00
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%A_%a.out

set -euo pipefail
RECIPE=${RECIPE:-laptop} NAME=areal-sweep
# sbatch runs a copy of this file: Slurm knows where it was. Outside sbatch (bash sweep.sh in a salloc) it is where it is.
command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p' | head -n 1)
here=${AREAL_HPC_ROOT:+$AREAL_HPC_ROOT/slurm}
if [[ -z $here ]]; then
    case $command in */sweep.sh*) here=${command%%/sweep.sh*} ;; *) here=$(dirname "$(realpath "$0")") ;; esac
fi
# shellcheck source=slurm/job.sh
source "$here/job.sh"
if [[ -n ${OPTIONS:-} ]]; then
    line=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$OPTIONS")
    [[ -n $line ]] || die "OPTIONS=$OPTIONS has no line $((SLURM_ARRAY_TASK_ID + 1)) for array task $SLURM_ARRAY_TASK_ID"
    read -ra words <<<"$line"
else
    words=(--seed "$SLURM_ARRAY_TASK_ID")
fi
main "${words[@]}" "$@"
