"""The memory orders of the ring: as they are, they hold; with any of them weakened, a test notices (mutate.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MUTATE = Path(__file__).with_name("mutate.py")


def run_mutate(*arguments: str) -> None:
    result = subprocess.run([sys.executable, str(MUTATE), *arguments], capture_output=True, text=True)
    if result.returncode == 77:
        pytest.skip("sleep and wake race between two CPUs, and there is one")
    assert result.returncode == 0, result.stdout + result.stderr


def test_orders_hold() -> None:
    run_mutate("unchanged")


@pytest.mark.slow
def test_every_order_is_needed() -> None:
    run_mutate()
