# shellcheck shell=bash
# LUMI-G (CSC): nodes of 4 MI250X = 8 GCDs, Slingshot-11, Cray MPICH, RCCL. From documentation, not run by us; our GPU path is written for CUDA.
# sbatch --partition=standard-g --nodes=8 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=7, SITE=lumi. Put the environment into a squashfs file: env/README.md.
export MPI_TYPE=${MPI_TYPE:-cray_shasta}
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 NCCL_NET_GDR_LEVEL=PHB   # (docs.lumi-supercomputer.eu, PyTorch)
export FI_MR_CACHE_MONITOR=userfaultfd
# 7 of the 8 cores of each part of the CPU, GCD by GCD in the order in which they hang on it (docs.lumi-supercomputer.eu, LUMI-G binding)
export CPU_BIND=${CPU_BIND:-mask_cpu:fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000}
