#!/usr/bin/env bash
# The first thing to run on a new cluster: everything that a 64-GPU job rests on, on two nodes, each part by itself and under a time limit of its own.
# Leaves one file, first-hour-JOBID.txt, in the folder of sbatch: read its summary at the end, or send it with a question.
#
#   sbatch --account=A --partition=P [--ntasks-per-node=4 --gpus-per-node=4] slurm/first_hour.sh
#   sbatch --account=A --partition=P --gpus-per-node=0 slurm/first_hour.sh                     a cluster without GPUs
#
# The reason of each line is in areal_64gpu.sh.
#SBATCH --job-name=areal-first-hour
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

set -euo pipefail
RECIPE=${RECIPE:-smoke} NAME=areal-first-hour
# sbatch runs a copy of this file: Slurm knows where it was. Outside sbatch (bash first_hour.sh in a salloc) it is where it is.
command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p' | head -n 1)
here=${AREAL_HPC_ROOT:+$AREAL_HPC_ROOT/slurm}
if [[ -z $here ]]; then
    case $command in */first_hour.sh*) here=${command%%/first_hour.sh*} ;; *) here=$(dirname "$(realpath "$0")") ;; esac
fi
# shellcheck source=slurm/job.sh
source "$here/job.sh"

RUN=${RUN:-$SLURM_SUBMIT_DIR/runs/$NAME-$SLURM_JOB_ID}
prepare
report=$SLURM_SUBMIT_DIR/first-hour-$SLURM_JOB_ID.txt
summary=()

part() { # seconds $1, name $2, command $3...: run it, keep what it says, note how it ended
    local seconds=$1 name=$2 status=0 began=$SECONDS
    shift 2
    echo "=== $name"
    timeout --kill-after=10 "$seconds" "$@" || status=$?
    case $status in 0) status=ok ;; 124 | 137) status="NOT DONE in $seconds s" ;; *) status="FAILED, status $status" ;; esac
    summary+=("$(printf '%-34s %4d s  %s' "$name" $((SECONDS - began)) "$status")")
}

mpi=${MPI_TYPE:-$(cd / && "$VENV/bin/python" -m areal_hpc.cluster)}
launch=(srun --mpi="$mpi" --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
python=$VENV/bin/python
{
    echo "first hour of areal-hpc, job $SLURM_JOB_ID, $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), $(date)"
    cat "$logs/environment.txt"
    part 120 "this node, with a ring" "$python" -m areal_hpc doctor
    part 300 "all ranks" "${launch[@]}" "$python" -m mpi4py -m areal_hpc doctor
    part 300 "two ranks on one node" "${launch[@]}" --nodes=1 --ntasks=2 --ntasks-per-node=2 "$python" -m mpi4py -m areal_hpc doctor
    part 300 "two ranks on two nodes" "${launch[@]}" --nodes=2 --ntasks=2 --ntasks-per-node=1 "$python" -m mpi4py -m areal_hpc doctor
    mkdir -p "$logs/push"
    part 300 "weight push into empty engines" "${launch[@]}" --nodes=2 --ntasks=4 --ntasks-per-node=2 "$python" -m mpi4py "$root/tests/mpi/push_worker.py" ok 0.5 "$logs/push"
    part 900 "training, 3 steps" "${launch[@]}" "$python" -m mpi4py -m areal_hpc run smoke --run-dir "$RUN/smoke" --train.num-steps 3 --train.batch-size 64 "$@"
    echo "=== start-up checks of that training"
    cat "$RUN"/smoke/attempt-1/checks.json 2>/dev/null || echo "none"
    echo "=== summary"
    printf '%s\n' "${summary[@]}"
} 2>&1 | tee "$report"
echo "report: $report"
! grep -qE '^[^=].* s  (FAILED|NOT DONE)' "$report"
