"""The machine, versions and command that a figure belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FAKED: Final = "faked"  # the clock of a dry run, which measures nothing: load_record refuses its files


@dataclass(frozen=True)
class Environment:
    """The machine, versions and command that a figure belongs to."""

    device: str
    cpu: str
    cpu_isa: list[str]
    cores: int
    threads: int
    torch: str
    python: str
    system: str
    pyquant: str
    gpu: str = ""
    driver: str = ""
    cuda: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    clock: str = ""
    command: str = ""

    def line(self) -> str:
        """One line for people."""
        isa = ", ".join(self.cpu_isa) or "no known vector extensions"
        parts = [self.gpu or f"{self.cpu} ({isa})", f"{self.threads} of {self.cores} cores used"]
        if self.gpu:
            parts.append(f"driver {self.driver or 'unknown'}, CUDA {self.cuda}")
        parts += [f"torch {self.torch}", f"Python {self.python}", f"pyquant {self.pyquant or 'unknown'}"]
        if self.clock:
            parts.append(f"clock: {self.clock}")
        return "; ".join(parts)

    def plain(self) -> dict[str, str]:
        """Name and text of each part of the line, as trade-offs and other plain records keep it."""
        parts = {"": self.gpu or f"{self.cpu} ({', '.join(self.cpu_isa) or 'no known vector extensions'})"}
        parts["cores used"] = f"{self.threads} of {self.cores}"
        if self.gpu:
            parts |= {"driver": self.driver or "unknown", "CUDA": self.cuda}
        parts |= {"torch": self.torch, "Python": self.python, "pyquant": self.pyquant or "unknown"}
        return parts | ({"clock": self.clock} if self.clock else {})
