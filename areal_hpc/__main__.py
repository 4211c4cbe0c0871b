"""`python -m areal_hpc` is `areal-hpc`."""

import sys

from areal_hpc.cli import main

sys.exit(main())
