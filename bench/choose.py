"""How long a launch takes to find its kernel: nanoseconds of one remembered choice.

    python -m bench.choose

Runs without a GPU; the kernel table is asked for problems of an A100 and an H200.
"""

from __future__ import annotations

import statistics

from pyquant import _native

DEVICES = {
    "A100": {"sm": 80, "sm_count": 108, "dram_gbps": 2039, "name": "A100"},
    "H200": {"sm": 90, "sm_count": 132, "dram_gbps": 4800, "name": "H200"},
}


def main() -> None:
    """Prints a line a device: the median of nine runs of 200 000 calls."""
    for name, device in DEVICES.items():
        runs = [
            _native.time_choose({"m": m, "n": 4096, "k": 4096, "out": "f16"}, device, 200_000)
            for m in (1, 16, 17, 64, 100, 128, 512, 2048, 4096)
        ]
        print(f"{name}: {statistics.median(runs):.0f} ns a choice")


if __name__ == "__main__":
    main()
