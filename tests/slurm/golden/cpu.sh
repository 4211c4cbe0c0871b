#!/bin/bash

# Parameters
#SBATCH --constraint=fast
#SBATCH --cpus-per-task=1
#SBATCH --exclusive
#SBATCH --job-name=areal-hpc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output='/shared/submitit logs/%j_0_log.out'
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --time=5
#SBATCH --wckey=submitit

# setup
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
ulimit -c 0

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output '/shared/submitit logs/%j_%t_log.out' --mpi=pmi2 --kill-on-bad-exit=1 --cpus-per-task=1 '/env with blank/bin/python' -u -m submitit.core._submit '/shared/submitit logs'
