# shellcheck shell=bash
# Frontier (OLCF): nodes of 4 MI250X = 8 GCDs, Slingshot-11, Cray MPICH, RCCL. From documentation, not run by us; our GPU path is written for CUDA.
# sbatch --nodes=8 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=7 --network=disable_rdzv_get, SITE=frontier. Module rccl-net-plugin.
export MPI_TYPE=${MPI_TYPE:-cray_shasta}
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3        # bootstrap over the fast network; hsn0 alone where it hangs (docs.olcf.ornl.gov)
export FI_MR_CACHE_MONITOR=kdreg2                    # never memhooks: deadlock (docs.olcf.ornl.gov)
export FI_CXI_RDZV_PROTO=alt_read FI_CXI_RX_MATCH_MODE=hybrid   # alt_read belongs to --network=disable_rdzv_get
if [[ ${SLURM_JOB_NUM_NODES:-1} = 1 ]]; then
    export NCCL_NET=Socket                           # the plugin does not serve jobs of one node (docs.olcf.ornl.gov)
fi
