# shellcheck shell=bash
# Alps (CSCS): GH200 nodes of 4 GPUs, Slingshot-11, Cray MPICH. From documentation, not run by us.
# sbatch --nodes=16 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=72, SITE=alps. Constraint thp_never is advised for latency (docs.cscs.ch, GH200).
export MPI_TYPE=${MPI_TYPE:-cray_shasta}             # the site's default for Cray MPICH (docs.cscs.ch, Slurm)
export MPICH_GPU_SUPPORT_ENABLED=0                   # asked of every PyTorch user: MPI moves host bytes, NCCL the GPUs' (docs.cscs.ch, PyTorch)
export NCCL_NET="AWS Libfabric"                      # fails loudly where the plugin is missing, instead of 5 GB/s over sockets (docs.cscs.ch, NCCL)
export NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1       # (docs.cscs.ch, NCCL)
export NCCL_PROTO=^LL128                             # slower on Slingshot since NCCL 2.27 (docs.cscs.ch, NCCL)
export FI_CXI_DEFAULT_CQ_SIZE=131072 FI_CXI_DEFAULT_TX_SIZE=16384
export FI_CXI_DISABLE_HOST_REGISTER=1 FI_CXI_RX_MATCH_MODE=software FI_MR_CACHE_MONITOR=userfaultfd   # (docs.cscs.ch, NCCL)
