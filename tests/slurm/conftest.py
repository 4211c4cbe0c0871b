"""One real Slurm of 8 virtual nodes for all tests of batch scripts and submitit; started when the first one asks for it, gone after the last."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.batch import Slurm, free_network


@pytest.fixture
def slurm(cluster_of_tests: Slurm) -> Iterator[Slurm]:
    """The cluster; what a test leaves in its queue is cancelled."""
    yield cluster_of_tests
    for job_id in cluster_of_tests.jobs:
        cluster_of_tests.run(["scancel", "--quiet", str(job_id)])
    cluster_of_tests.jobs.clear()


@pytest.fixture(scope="session")
def cluster_of_tests() -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("needs root: virtual nodes are network namespaces")
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("no Slurm: tests/slurm/slurm-cluster install --no-acct")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munged wants a folder that everybody may enter, which pytest's are not
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "PMI", "OMPI"))}
    made = Slurm(
        folder,
        kept
        | {
            "SLURM_CLUSTER_HOME": str(folder / "lab"),
            "SLURM_CLUSTER_ID": f"s{os.getpid() % 100_000}",
            "SLURM_CLUSTER_NET": free_network(),
            "SLURM_CONF": str(folder / "lab" / "etc" / "slurm.conf"),
            "AREAL_HPC_CACHE": str(folder / "cache"),
            "UCX_TLS": "tcp,self",  # of a virtual network UCX reads a bandwidth of 0 and may refuse it; and short addresses: Slurm 22.05 can lose its place
            "UCX_NET_DEVICES": "eth0,lo",  # in long PMI-2 messages of MPICH when the machine is overloaded, and then MPI_Init hangs
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_osc": "^ucx",
        },
    )
    try:
        made.call("start", "--nodes", "8", "--cpus", "64", "--gpus", "8", "--no-acct")
        yield made
    finally:
        made.call("stop", "--wipe")
        shutil.rmtree(folder)
