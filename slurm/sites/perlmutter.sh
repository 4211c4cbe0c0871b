# shellcheck shell=bash
# Perlmutter (NERSC): nodes of 4 A100, Slingshot, Cray MPICH. From documentation, not run by us.
# sbatch --constraint=gpu --nodes=16 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=32, SITE=perlmutter.
export MPI_TYPE=${MPI_TYPE:-cray_shasta}             # (docs.nersc.gov, running jobs)
export MPICH_GPU_SUPPORT_ENABLED=0                   # else GTL opens IPC handles of GPUs that Slurm may have hidden (E3SM#4834)
export HDF5_USE_FILE_LOCKING=FALSE                   # Lustre and DVS refuse locks (NERSC, sc24-dl-tutorial)
export FI_MR_CACHE_MONITOR=userfaultfd               # never memhooks beside NCCL: deadlock (OLCF, Frontier guide: the same network)
export NCCL_NET="AWS Libfabric"                      # module nccl brings the plugin; fails loudly without (docs.nersc.gov, machine learning)
