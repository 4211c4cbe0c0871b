"""A node whose /dev/shm is small (containers: often 64 MiB): lanes that do not fit are an error with advice, never a SIGBUS in the middle of a record, and never a hang.

Programs run in a mount namespace of their own with a tmpfs of 8 MiB on /dev/shm.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from areal_hpc.config_io import save_yaml
from areal_hpc.launch.local import find_launcher

SIZE_BYTES = 8 << 20
MOUNT = f'mount -t tmpfs -o size={SIZE_BYTES} tmpfs /dev/shm && exec "$@"'


@pytest.fixture(scope="module")
def small_shm() -> list[str]:
    """Words in front of a command that give it a small /dev/shm."""
    if shutil.which("unshare") is None:
        pytest.skip("a /dev/shm of another size takes unshare(1)")
    for options in (["-m"], ["-rm"]):  # as root, or as root of a user namespace
        words = ["unshare", *options, "sh", "-c", MOUNT, "sh"]
        result = subprocess.run([*words, "df", "--output=size", "-B1", "/dev/shm"], capture_output=True, text=True)
        if result.returncode == 0:
            assert result.stdout.split()[-1] == str(SIZE_BYTES)
            return words
    pytest.skip(f"a /dev/shm of another size takes a mount namespace: {result.stderr.strip()}")


def run(words: list[str], *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*words, *command], capture_output=True, text=True, timeout=timeout_s, env=os.environ | {"OMP_NUM_THREADS": "1"})


TOO_LARGE = """
import errno, os
from areal_hpc.transport.ring import Ring
try:
    Ring("large", 16 << 20).consumer()
except OSError as error:
    assert error.errno == errno.ENOSPC, error
    print(error)
assert os.listdir("/dev/shm") == [], os.listdir("/dev/shm")
with Ring("small", 4 << 20).consumer():  # the failed attempt took no memory
    pass
"""


def test_a_lane_that_does_not_fit(small_shm: list[str]) -> None:
    result = run(small_shm, sys.executable, "-c", TOO_LARGE)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"lane 'large' needs {(16 << 20) + 4096} bytes of /dev/shm" in result.stdout


FULL_SPEED = """
import threading
import numpy as np
from areal_hpc.transport.ring import Ring
ring = Ring("tight", 4 << 20)
consumer = ring.consumer()
producer = ring.producer(timeout_s=0)
try:
    Ring("another", 4 << 20).consumer()
except OSError as error:
    print(error)
consumer.unlink()
sizes = [k * 104729 % (producer.max_record_bytes + 1) for k in range(400)]
def produce():
    for k, num_bytes in enumerate(sizes):
        with producer.reserve(num_bytes, timeout_s=60) as slot:
            slot.buffer[:] = k % 251
            slot.commit(ticket=k, version_min=0, version_max=0, num_tokens=0, num_samples=0)
thread = threading.Thread(target=produce)
thread.start()
for k, num_bytes in enumerate(sizes):
    with consumer.peek(timeout_s=60) as record:
        assert (record.ticket, record.num_bytes) == (k, num_bytes) and (record.buffer == k % 251).all()
thread.join()
print(consumer.counters()["records"], consumer.counters()["high_water_bytes"] > 3 << 20)
"""


def test_a_lane_that_fits_is_used_to_its_last_page(small_shm: list[str]) -> None:
    result = run(small_shm, sys.executable, "-c", FULL_SPEED)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"lane 'another' needs {(4 << 20) + 4096} bytes of /dev/shm" in result.stdout
    assert result.stdout.endswith("400 True\n")


@pytest.fixture(scope="module")
def jobs() -> ModuleType:
    """tests/mpi/jobs.py."""
    spec = importlib.util.spec_from_file_location("jobs_for_small_shm", Path(__file__).parents[1] / "mpi" / "jobs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("launched", "lane_bytes", "said"),
    [
        (True, 64 << 20, "enlarge /dev/shm"),  # seen before the ranks start
        (True, 7 << 20, "and MPI itself, need"),  # with what MPI will take
        (False, 7 << 20, "and MPI itself, need"),  # ranks that mpiexec or srun starts look for themselves
    ],
)
def test_a_job_whose_lanes_do_not_fit(small_shm: list[str], jobs: ModuleType, tmp_path: Path, launched: bool, lane_bytes: int, said: str) -> None:
    model = jobs.make_model(tmp_path / "model")
    config = replace(
        jobs.BASE,
        model=replace(jobs.BASE.model, path=str(model)),
        transport=replace(jobs.BASE.transport, lane_bytes=lane_bytes, start_deadline_s=60.0),
        run_dir=str(tmp_path / "run"),
    )
    save_yaml(config, tmp_path / "run.yaml")
    ranks = [] if launched else find_launcher().command(config.topology.num_ranks)
    result = run(small_shm, *ranks, sys.executable, "-m", "areal_hpc", "run", "smoke", "--config", str(tmp_path / "run.yaml"), timeout_s=120)
    words = result.stdout + result.stderr
    assert said in words, words
    assert "use smaller lanes" in words
    assert "Traceback" not in words
    assert result.returncode == 2, words


NO_ROOM = """
import os
from types import SimpleNamespace
from areal_hpc.config import ConfigError
from areal_hpc.transport.lanes import _make
from areal_hpc.transport.ring import Ring
try:
    _make(Ring("large", 16 << 20), SimpleNamespace(host="n7"))
except ConfigError as error:
    print(error)
assert os.listdir("/dev/shm") == [], os.listdir("/dev/shm")
"""


def test_a_rank_that_finds_no_room_says_where_and_what_to_do(small_shm: list[str]) -> None:
    """There was room when the launcher looked, and there is none when the rank makes its lane."""
    result = run(small_shm, sys.executable, "-c", NO_ROOM)
    assert (result.returncode, result.stderr) == (0, "")
    assert "host n7: no room in /dev/shm for one more lane of transport.lane_bytes=16777216" in result.stdout
    assert "use smaller lanes" in result.stdout
