"""How near the weight pushes of a finished run came to the limit of the network cards (docs/weights.md): limit / achieved time, 1 is the limit itself.

    python benchmarks/weights_limit.py RUN --card-gb-per-s 25

Every generator takes the whole model through one card, so no push can be faster than its bytes over the card's rate. Median and worst over the pushes behind the
first (which opens connections). Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from areal_hpc.observe.telemetry import read_table


def achieved(pushes: np.ndarray, card_bytes_per_s: float) -> dict[str, float]:
    """From rows of /pushes. Raises ValueError without a second push."""
    if len(pushes) < 2:
        raise ValueError(f"the run has {len(pushes)} pushes; the first one is not counted, so at least 2 are needed")
    later = pushes[1:]
    limit_s = later["bytes"] / card_bytes_per_s
    share = limit_s / later["transfer_s"]
    return {
        "pushes": len(later),
        "bytes": int(later["bytes"][0]),
        "limit_s": float(limit_s[0]),
        "transfer_median_s": float(np.median(later["transfer_s"])),
        "share_median": float(np.median(share)),
        "share_worst": float(share.min()),
        "pack_median_s": float(np.median(later["pack_s"])),
        "pause_worst_s": float(later["pause_max_s"].max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--attempt", type=int, default=1, help="attempt of the run")
    parser.add_argument("--card-gb-per-s", type=float, required=True, help="rate of the card of one generation rank, 10^9 bytes a second")
    args = parser.parse_args()
    pushes = read_table(args.run / f"attempt-{args.attempt}" / "log.h5", "pushes")
    try:
        found = achieved(pushes, args.card_gb_per_s * 1e9)
    except ValueError as error:
        parser.error(str(error))
    print(f"{found['pushes']} pushes of {found['bytes'] / 1e9:.3g} GB: limit {found['limit_s']:.3g} s, median {found['transfer_median_s']:.3g} s")
    print(json.dumps({"benchmark": "weights_limit", "card_gb_per_s": args.card_gb_per_s, **found}))


if __name__ == "__main__":
    main()
