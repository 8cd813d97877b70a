"""GPUs with int8 tensor cores: what their data sheets say, and what each gains by the plan's cost model.

    python -m bench.cards > docs/cards.md

Nothing is measured and no GPU is needed: cards that are not there are asked about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pyquant import _native, scheme_from_name
from pyquant.ops import layer_time, plan


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet.

    name         as the driver tells it.
    sm           compute capability times ten.
    sm_count     multiprocessors; clock_mhz their highest clock; shared_kib shared memory that a block may have.
    rated_mhz    the clock that int8 and bf16 are published for, where it is another (0: it is not).
    l2_mib       second-level cache.
    dram_gbps    peak of the memory bus, 1e9 bytes a second.
    int8, bf16   published dense peaks of the tensor cores, 1e12 operations a second; bf16 with float32 sums. None: what
                 is published is reached by instructions that no kernel here uses.
    """

    name: str
    sm: int
    sm_count: int
    clock_mhz: int
    shared_kib: int
    l2_mib: int
    dram_gbps: int
    int8: float | None
    bf16: float
    rated_mhz: int = 0

    @property
    def device(self) -> dict[str, Any]:
        """As pyquant._native takes it."""
        return {
            "sm": self.sm,
            "sm_count": self.sm_count,
            "clock_mhz": self.clock_mhz,
            "shared_bytes": self.shared_kib << 10,
            "l2_bytes": self.l2_mib << 20,
            "dram_gbps": self.dram_gbps,
            "name": self.name,
        }


# From NVIDIA's whitepapers on A100, GA102, Ada, H100, RTX Blackwell and RTX PRO Blackwell; of the others data sheets.
CARDS = (
    Card("NVIDIA A100-SXM4-80GB", 80, 108, 1410, 163, 40, 2039, 624, 312),
    Card("NVIDIA A10", 86, 72, 1695, 99, 6, 600, 250, 125),
    Card("NVIDIA GeForce RTX 3090", 86, 82, 1695, 99, 6, 936, 285, 71.2),
    Card("NVIDIA L4", 89, 58, 2040, 99, 48, 300, 242, 121),
    Card("NVIDIA L40S", 89, 142, 2520, 99, 96, 864, 733, 362),
    Card("NVIDIA GeForce RTX 4090", 89, 128, 2520, 99, 72, 1008, 660.6, 165.2),
    Card("NVIDIA H100 80GB HBM3", 90, 132, 1830, 227, 50, 3350, 1979, 989),
    Card("NVIDIA H200", 90, 132, 1980, 227, 60, 4800, 1979, 989, rated_mhz=1830),  # clock and cache: its driver
    Card("NVIDIA B200", 100, 148, 1850, 227, 126, 8000, None, 2250),
    Card("NVIDIA B300", 103, 148, 1850, 227, 126, 8000, None, 2250),
    Card("NVIDIA GeForce RTX 5090", 120, 170, 2407, 99, 96, 1792, 838, 209.5),
    Card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 188, 2617, 99, 128, 1792, 1008, 503.8),
)

ASKED = (
    ("W4A16(group_size=128)", 1),
    ("W4A16(group_size=128)", 48),
    ("W4A16(group_size=128)", 128),
    ("W8A8Dynamic", 1),
    ("W4A8Dynamic", 16),
    ("W8A8Dynamic", 16),
    ("W8A8Dynamic", 256),
    ("W4A8Dynamic", 2048),
    ("W8A8Dynamic", 2048),
    ("W8A8Dynamic", 8192),
)
SHAPES = ((4096, 4096), (14336, 4096))  # N, K

_PAGE = """# Which card gains what

**The cost model's figures, not measurements**: `python -m bench.cards` writes this page from data sheets, without a
GPU. Each is the time of torch's bf16 Linear over that of the pyquant layer, the quantiser's launch and bytes counted.
Below 1 the layer is slower than bf16, and `pyquant.auto_` ([auto.md](auto.md)) leaves it in floating point. How the
model reckons: [kernels.md](kernels.md); its rates and their sources: `csrc/plan/chip.cpp`. `pyquant tune` measures on
the card that is there.

* A GeForce adds 16-bit products into float32 at half of its tensor cores' rate, so that int8 is four times as fast as
  bf16 there, not twice.
* RTX 30 and 40, A10, L4 and L40S run the machine code of sm_80. RTX 50 and RTX PRO run that of sm_120
  (`PYQUANT_CUDA_ARCHS=120`), or what the driver makes of the PTX at the first call. A block has 99 KiB of shared memory
  on all of them; rows that need more are refused.
* B200 and B300 multiply floats by instructions that no kernel here uses, and integers by Ampere's: int8 gains where
  weights are read, for few rows, and loses beyond. A B300 has next to no int8 tensor cores left.
"""


def gain(card: Card, scheme: str, n: int, k: int, m: int) -> float:
    """bf16's time over the layer's, in the quicker layout of its weights, whatever this build has compiled."""
    entry, problem, int4_range = layer_time.product_of(
        scheme_from_name(scheme), n, k, m, torch.bfloat16, plan.Device(**card.device)
    )
    ours = min(
        _native.layer_time(entry, problem | {"w_layout": layout}, card.device, False, int4_range, False)[0]
        for layout in ("natural", "blocked128")[: 2 if problem["w"] == "s4" else 1]
    )
    return _native.framework_time(m, n, k, "bf16", card.device)[0] / ours


def page() -> str:
    """The page as Markdown."""
    text = _PAGE
    for n, k in SHAPES:
        text += f"\n## {k} inputs, {n} outputs\n\n| card | "
        text += " | ".join(
            f"{scheme.replace('(group_size=128)', ' g128')}, {m} row{'s'[: m - 1]}" for scheme, m in ASKED
        )
        text += " |\n|---|" + "---|" * len(ASKED) + "\n"
        for card in CARDS:
            gains = " | ".join(f"{gain(card, scheme, n, k, m):.2f}" for scheme, m in ASKED)
            text += f"| {card.name.removeprefix('NVIDIA ')} | {gains} |\n"
    return text


if __name__ == "__main__":
    print(page(), end="")
