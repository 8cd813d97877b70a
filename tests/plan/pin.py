"""Writes down what the plan chooses, so that a change of the table or of the model is seen in a diff.

    python tests/plan/pin.py > tests/plan/pinned.txt

No GPU, no CUDA and no compiled kernel is needed. plan_grid.lines tells what the lines are.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.append(str(Path(__file__).resolve().parents[2]))

import plan_grid

from pyquant import _native

for line in plan_grid.lines(_native):
    print(line)
