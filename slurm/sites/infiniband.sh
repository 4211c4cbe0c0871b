# shellcheck shell=bash
# A cluster with InfiniBand and nothing special: Open MPI or MPICH of the site or from PyPI, NCCL's own verbs transport. From documentation, not run by us.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-ib0} # bootstrap over IPoIB: the host name often resolves to a slow management network
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$NCCL_SOCKET_IFNAME}
export OMPI_MCA_osc=^ucx                             # Open MPI 5 warns at every window otherwise; we use none
export PMIX_MCA_psec=native                          # where the container's PMIx and the host's do not share munge
