"""The co-serving benchmark on a device.

    python -m tests.gpu.bench [--out DIR]

Not there yet: `tests/bench` stands a CPU core for the device, and its pins, loads and models are sized for that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.gpu.machine import why_not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.parse_args()
    print(f"bench: not run: {why_not() or 'not supported yet: tests/bench stands a CPU core for the device'}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
