"""Millijoules of a call, from the GPU's own counter of the energy that the whole board has taken.

The counter (nvmlDeviceGetTotalEnergyConsumption, in mJ since the driver was loaded) moves in steps some tens of
milliseconds apart. A figure therefore begins at a step and ends at one, and calls follow each other without a pause for
at least a second between: then a step is a few per cent of it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

SECONDS: Final = 1.0  # of calls between the two steps
PATIENCE: Final = 3.0  # after which a counter that does not move is one that does not count
_EXTRA: Final = "pip install nvidia-ml-py"


class EnergyUnavailable(Exception):
    """Why there is no figure, in words for a report."""


@dataclass(frozen=True)
class EnergyMeter:
    """read() -> millijoules that the device has taken since some moment; now() -> seconds."""

    read: Callable[[], int]
    now: Callable[[], float] = time.monotonic

    def a_call(self, run: Callable[[], int], seconds: float = SECONDS, patience: float = PATIENCE) -> float:
        """Millijoules of one call, everything that the board took meanwhile included.

        run       makes some calls, waits until they are done, and returns how many they were; milliseconds each time.
        seconds   how long calls are made, at least.
        patience  seconds without a step of the counter after which it counts as dead.
        Raises EnergyUnavailable for a counter that does not advance or runs backwards.
        """
        first, began, _ = self._step(run, self.read(), patience)
        value, calls = first, 0
        while True:
            value, now, more = self._step(run, value, patience)
            calls += more
            if now - began >= seconds:
                return (value - first) / calls

    def _step(self, run: Callable[[], int], value: int, patience: float) -> tuple[int, float, int]:
        """Calls until the counter moves. -> its new value, the time, and how many calls there were."""
        began, calls = self.now(), 0
        while True:
            calls += run()
            reading, now = self.read(), self.now()
            if reading < value:
                raise EnergyUnavailable("the energy counter ran backwards: the driver was loaded anew meanwhile")
            if reading > value:
                return reading, now, calls
            if now - began > patience:
                raise EnergyUnavailable(f"the energy counter did not move for {patience:g} s")


def energy_meter(device: torch.device | str) -> EnergyMeter:
    """The counter of a CUDA device.

    Raises EnergyUnavailable, with the reason: another kind of device, no NVML, a GPU that does not count (before Volta,
    and some virtual ones).
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise EnergyUnavailable(f"NVML counts the energy of NVIDIA GPUs, not of {device.type!r}")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise EnergyUnavailable(f"NVML's Python module is not installed: {_EXTRA}") from None
    handle: Any = None

    def read() -> int:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except nvml.NVMLError as error:
            raise EnergyUnavailable(f"NVML: {error}") from None

    try:
        nvml.nvmlInit()  # by UUID, as its own numbering knows no CUDA_VISIBLE_DEVICES
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except nvml.NVMLError as error:
        raise EnergyUnavailable(f"NVML: {error}") from None
    read()
    return EnergyMeter(read)
