# shellcheck shell=bash
# The common part of the batch scripts beside it; they set RECIPE, NAME and `here`, then source it and call `main "$@"`.
#
# From the environment of sbatch (all optional; sbatch itself reads SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT, and any option on its command line):
#   RUN           folder of the run, on a file system that all nodes share        (default: runs/NAME-JOBID below the folder of sbatch)
#   MODEL, DATA   --model.path and --data.path
#   VENV          Python environment                                              (default: .venv of this checkout)
#   SITE          a preset of slurm/sites/, such as alps
#   MPI_TYPE      srun --mpi=...                                                  (default: what the MPI of VENV needs)
#   CPU_BIND      srun --cpu-bind=...                                             (default: the site's)
#   MAX_RESTARTS  lives of the job                                                (default: 100)
# shellcheck disable=SC2154  # here, NAME and RECIPE come from the script

root=$(cd "$here/.." && pwd)
restart=${SLURM_RESTART_COUNT:-0}
life=$SLURM_JOB_ID.$restart                    # requeue keeps the number of the job: files carry the number of its life too
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
RUN=${RUN:-$SLURM_SUBMIT_DIR/runs/$NAME-${job:-$SLURM_JOB_ID}}
VENV=${VENV:-$root/.venv}
NO_INPUT=2 LOG_INCOMPLETE=3 REQUEUE=75         # exit statuses of areal-hpc, see README

say() { echo "$(date +%T) $NAME $life: $*"; }
die() { say "$*" >&2; exit "$NO_INPUT"; }

newest_attempt() { # folder of the newest attempt, empty if there is none
    find "$RUN" -maxdepth 1 -name 'attempt-*' -type d 2>/dev/null | sort -V | tail -n 1
}

marker() { # the status that attempt $1 wrote down as its last act; empty if it did not come to that
    [[ -n $1 && -f $1/exit.json ]] && sed -n 's/^ *"status": *\([0-9]*\).*/\1/p' "$1/exit.json" | head -n 1
}

prepare() {
    [[ -x $VENV/bin/python ]] || die "VENV=$VENV has no bin/python; make it with env/bootstrap, or name another"
    if [[ -n ${SITE:-} ]]; then
        [[ -f $here/sites/$SITE.sh ]] || die "SITE=$SITE: there is no such preset; there are: $(cd "$here/sites" && echo *.sh | sed 's/\.sh//g')"
        # shellcheck source=/dev/null
        source "$here/sites/$SITE.sh"
    fi
    logs=$RUN/slurm/$life                      # one folder of logs for each life of the job
    mkdir -p "$logs"
    export PYTHONUNBUFFERED=1                  # what a rank said before it was killed is in the log
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1   # compute nodes often have no way out: fail at once instead of after minutes of retries
    export NCCL_DEBUG=${NCCL_DEBUG:-VERSION} NCCL_DEBUG_FILE=${NCCL_DEBUG_FILE:-$logs/nccl.%h.%p}
    export AREAL_HPC_PROGRESS=${AREAL_HPC_PROGRESS:-lines}
    ulimit -c 0                                # 64 core files of 80 GB help nobody
    ulimit -n "$(ulimit -Hn)" 2>/dev/null || true
    { env | grep -E '^(SLURM|SBATCH|NCCL|FI_|UCX|MPICH|OMPI|PMIX|CUDA|ROCR|OMP|AREAL)' | sort; command -v nvidia-smi >/dev/null && nvidia-smi topo -m; } >"$logs/environment.txt" || true
}

step() { # run one job step with $@ on all ranks; what it says goes to the job's log and to this life's
    local mpi=${MPI_TYPE:-$(cd / && "$VENV/bin/python" -m areal_hpc.cluster)}
    local srun=(srun --mpi="$mpi")
    srun+=(--kill-on-bad-exit=1)               # a rank that dies takes the others along; without it they wait for it until the time limit
    srun+=(--cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")   # since Slurm 22.05 srun no longer takes it over from sbatch
    [[ -z ${CPU_BIND:-} ]] || srun+=(--cpu-bind="$CPU_BIND")
    # A TERM for the whole job must reach the ranks and not this shell or tee: the ranks write a checkpoint, and then somebody has to requeue.
    trap : TERM
    set +e
    "${srun[@]}" "$@" 2>&1 | (trap '' TERM; exec tee -a "$logs/output.txt")
    local status=${PIPESTATUS[0]}
    set -e
    return "$status"
}

cancelled() { # by scancel: Slurm is ending the job, and gives no reason such as DUE TO TIME LIMIT. A requeue would bring back what somebody wanted gone.
    [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null) = COMPLETING ]] && ! grep -q 'CANCELLED AT .* DUE TO ' "$logs/output.txt"
}

await_verdict() { # after a failure. Our ranks notice the loss of a node before Slurm does: stay until Slurm ends this script and starts the job on other nodes.
    [[ ${SLURM_JOB_NUM_NODES:-1} -gt 1 ]] || return 0
    local nodes=$SLURM_JOB_NUM_NODES patience
    timeout 30 srun --mpi=none --overlap --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 true >/dev/null 2>&1 && return 0
    patience=$(scontrol show config | sed -n 's/^SlurmdTimeout *= *\([0-9]*\).*/\1/p')
    patience=$((${patience:-300} + 60))
    say "a node of the job does not answer: waiting up to $patience s for Slurm to say that it is lost, and to start the job again"
    sleep "$patience"
}

finish() { # $1: status of srun, $2: newest attempt before. The attempt's own marker decides: srun and mpirun can return 0 after a node has died.
    local status=$1 attempt mark=""
    attempt=$(newest_attempt)
    if [[ $attempt != "$2" || $status = 0 ]]; then mark=$(marker "$attempt" || true); fi
    if [[ $mark = 0 && $status = 0 ]]; then
        say "done: $RUN"
        exit 0                                 # so that --dependency=afterok works
    fi
    if [[ $mark = "$LOG_INCOMPLETE" ]]; then
        say "WARNING: a full disk kept rows out of $attempt/log.h5; $attempt/exit.json says where they are"
        say "done: $RUN"
        exit 0                                 # the model is complete, which is what the next job waits for
    fi
    if [[ $mark = "$REQUEUE" ]]; then
        if cancelled; then
            say "cancelled; stopped with a complete checkpoint: sbatch again with RUN=$RUN goes on from it"
            exit "$REQUEUE"
        fi
        [[ $restart -lt ${MAX_RESTARTS:-100} ]] || { say "stopped with a checkpoint, and restarted $restart times already: sbatch again with RUN=$RUN"; exit "$REQUEUE"; }
        say "stopped with a complete checkpoint; back into the queue"
        scontrol requeue "$SLURM_JOB_ID" || say "scontrol requeue was refused: sbatch again with RUN=$RUN"
        sleep 30                               # Slurm ends this script
        exit "$REQUEUE"
    fi
    if [[ $attempt = "$2" ]] && grep -q '^error: ' "$logs/output.txt"; then
        exit "$NO_INPUT"                       # a mistake that only ranks could find, such as a wrong --mpi; srun may report the kill of the slower ones
    fi
    [[ $status != 0 ]] || status=1             # nobody wrote that the run is done: it is not
    await_verdict
    say "failed with status $status; ${attempt:+$attempt/failure.json and }$logs/output.txt say why"
    exit "$status"
}

main() {
    local options=() before status=0
    prepare
    before=$(newest_attempt)
    [[ -z ${MODEL:-} ]] || options+=(--model.path "$MODEL")
    [[ -z ${DATA:-} ]] || options+=(--data.path "$DATA")
    say "$RECIPE on $SLURM_JOB_NUM_NODES nodes, ${SLURM_NTASKS:-?} ranks, life $restart of the job; run folder $RUN"
    # --resume: requeued, or one of a chain of jobs with the same RUN, it goes on from the newest complete checkpoint; where there is none the run begins.
    # A mistake of options or data is said here, in one line and within seconds, before 64 processes start. Outside a job step it is not taken for a rank.
    "$VENV/bin/python" -m areal_hpc run "$RECIPE" --check --run-dir "$RUN" --resume "${options[@]}" "$@" || exit
    # -m mpi4py: an exception before our own guard stands ends the job as well, instead of hanging the other ranks in MPI_Finalize.
    step "$VENV/bin/python" -m mpi4py -m areal_hpc run "$RECIPE" --run-dir "$RUN" --resume "${options[@]}" "$@" || status=$?
    finish "$status" "$before"
}
