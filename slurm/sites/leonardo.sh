# shellcheck shell=bash
# Leonardo Booster (CINECA): nodes of 4 A100, dual-rail HDR100, Open MPI. From documentation, not run by us.
# sbatch --partition=boost_usr_prod --nodes=16 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8, SITE=leonardo. No way out of compute nodes.
export MPI_TYPE=${MPI_TYPE:-pmix}                    # Open MPI (CINECA HPC user guide)
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 AREAL_HPC_IFACE=ib0   # our guess: compare with ip -br addr on a compute node
