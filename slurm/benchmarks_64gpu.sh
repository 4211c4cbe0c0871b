#!/usr/bin/env bash
# The speed-up and scaling tables on a cluster: eta sweep and both synchronous baselines, one after the other on the same GPUs, the same work for all (imposed lengths
# with the paper's mean and tail). Not yet run on any cluster.
#
#   MODEL=/path/to/1.5B DATA=/path/to/problems sbatch --account=A --partition=P slurm/benchmarks_64gpu.sh [--section.option value ...]
#   for nodes in 4 8 16 32 64; do MODEL=... DATA=... sbatch --nodes=$nodes ... slurm/benchmarks_64gpu.sh; done          strong scaling, 32 to 512 GPUs
#   .venv/bin/python benchmarks/scaling.py --runs runs/areal-benchmarks-*                                               the tables
#
# Synchronous variants are SYNC_STEPS steps long (default 4), the others STEPS (default 24), since theirs fill up slots at first; what is left out then: benchmarks/measured.py.
# One that is interrupted runs again from its beginning in the next life of the job. The reason of each line is in areal_64gpu.sh.
#SBATCH --job-name=areal-benchmarks
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

set -euo pipefail
RECIPE=${RECIPE:-areal-64gpu} NAME=areal-benchmarks
# sbatch runs a copy of this file: Slurm knows where it was. Outside sbatch (bash benchmarks_64gpu.sh in a salloc) it is where it is.
command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p' | head -n 1)
here=${AREAL_HPC_ROOT:+$AREAL_HPC_ROOT/slurm}
if [[ -z $here ]]; then
    case $command in */benchmarks_64gpu.sh*) here=${command%%/benchmarks_64gpu.sh*} ;; *) here=$(dirname "$(realpath "$0")") ;; esac
fi
# shellcheck source=slurm/job.sh
source "$here/job.sh"

all=${RUN:-$SLURM_SUBMIT_DIR/runs/$NAME-$SLURM_NTASKS-$SLURM_JOB_ID}
RUN=$all/life-$restart
prepare
common=(--checkpoint.every 0 --log.record none --train.flat-alarm 0 --evaluation.num-problems "$SLURM_NTASKS" --evaluation.every 0)
common+=(--generation.imposed-mean 9402 --generation.imposed-sigma 0.85 --generation.max-new-tokens 27648)   # cut: 8,776, with prompts of about 500 the paper's 9,276
[[ -z ${MODEL:-} ]] || common+=(--model.path "$MODEL")
[[ -z ${DATA:-} ]] || common+=(--data.path "$DATA")

variant() { # name $1, options $2...: measure it, unless an earlier life has
    local name=$1 status=0 file
    shift
    for file in "$all"/life-*/"$name"/attempt-1/exit.json; do
        if [[ $(marker "$(dirname "$file")" || true) = 0 ]]; then say "$name: measured already"; return 0; fi
    done
    RUN=$all/life-$restart/$name
    say "$name, $SLURM_NTASKS ranks"
    step "$VENV/bin/python" -m mpi4py -m areal_hpc run "$RECIPE" --run-dir "$RUN" "${common[@]}" "$@" || status=$?
    if [[ $(marker "$RUN/attempt-1" || true) != 0 ]]; then finish "$status" ""; fi   # requeued, or failed: ends this script
}

synchronous=(--staleness.max-staleness 0 --train.num-steps "${SYNC_STEPS:-4}")
asynchronous=(--train.num-steps "${STEPS:-24}" --staleness.max-staleness)
variant colocated-sharded "${synchronous[@]}" --topology.mode colocated "$@"
variant split-eta-0 "${synchronous[@]}" "$@"
for eta in 1 2 4 8 16 inf; do
    variant "eta-$eta" "${asynchronous[@]}" "$eta" "$@"
done
variant eta-8-keep "${asynchronous[@]}" 8 --generation.kv-on-update keep "$@"
variant eta-8-drain "${asynchronous[@]}" 8 --generation.on-update drain --transport.push-deadline-s 1800 "$@"   # the longest answer takes minutes
"$VENV/bin/python" "$root/benchmarks/scaling.py" --runs "$all"
