# shellcheck shell=bash
# JUWELS Booster and JUPITER (JSC): nodes of 4 GPUs, InfiniBand HDR/NDR, ParaStationMPI (an MPICH) or Open MPI. From documentation, not run by us.
# sbatch --nodes=16 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=12, SITE=juwels. Compute nodes have no way out: see the wheelhouse in env/README.md.
export MPI_TYPE=${MPI_TYPE:-pspmi}                   # psslurm brings its own; with an MPI from PyPI: pmix (apps.fz-juelich.de)
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 # the host name resolves to Ethernet; names with an i at the end are on InfiniBand (JSC, torchrun_jsc)
export AREAL_HPC_IFACE=ib0
