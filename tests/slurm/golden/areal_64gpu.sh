#!/bin/bash

# Parameters
#SBATCH --account=proj42
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
#SBATCH --job-name=areal-64gpu
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output='/shared/submitit logs/%j_0_log.out'
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@300
#SBATCH --time=1440
#SBATCH --wckey=submitit

# setup
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
ulimit -c 0
source slurm/sites/alps.sh

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output '/shared/submitit logs/%j_%t_log.out' --mpi=cray_shasta --kill-on-bad-exit=1 --cpus-per-task=8 '/env with blank/bin/python' -u -m submitit.core._submit '/shared/submitit logs'
