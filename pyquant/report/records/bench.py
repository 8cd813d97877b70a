"""Records of benchmarks: what was measured, on what, against whom. No torch, so any tool can read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from pyquant.report.records.environment import Environment
from pyquant.report.records.record import record

CALIBRATION_DATA: Final = ("gaussian", "laplace", "student_t3", "outliers", "relu_gaussian")


@dataclass(frozen=True)
class GemmRow:
    """One candidate at one shape. Times in microseconds a call; ratio > 1: faster than the baseline of the same run.

    floor_us    the larger of bytes / measured copy bandwidth and operations / measured peak; None where not measured.
    floor_kind  'bytes' or 'ops': what binds.
    exact       True: every output bit equals the reference's; False: it does not; None: outside the exact contract.
    sqnr_db     signal to noise against the float64 product; None where the candidate returns something else.
    ours        a pyquant candidate, not a peer.
    kernel      the kernel that ran, where the candidate reports it.
    moved_bytes that any kernel has to move for it; ops: operations, a multiply-add counting as two; peak: the ceiling
                that binds it. 0 and '' where the run did not say.
    energy_mj   millijoules a call, None where it was not measured: not requested, or the reason is in `unavailable`.
    """

    m: int
    k: int
    n: int
    candidate: str
    ours: bool
    median_us: float
    ratio: float
    spread: float
    rounds: int
    floor_us: float | None = None
    floor_kind: str = ""
    exact: bool | None = None
    sqnr_db: float | None = None
    kernel: str = ""
    moved_bytes: int = 0
    ops: float = 0.0
    peak: str = ""
    energy_mj: float | None = None
    DERIVED: ClassVar[tuple[str, ...]] = ("of_floor",)

    @property
    def of_floor(self) -> float | None:
        """Share of the physical limit reached (1 = the limit)."""
        return None if self.floor_us is None else self.floor_us / max(self.median_us, 1e-9)


@dataclass(frozen=True)
class Ceiling:
    """A measured limit of the machine: copy bandwidth in GB/s, peaks in Gop/s."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True)
class Unavailable:
    """A requested candidate that did not run, with the reason: nothing is omitted silently."""

    candidate: str
    reason: str
    where: str = ""


@dataclass(frozen=True)
class Bar:
    """A stated goal and what was measured. direction '>=' or '<='."""

    name: str
    goal: float
    measured: float
    direction: str = ">="
    unit: str = "x"
    DERIVED: ClassVar[tuple[str, ...]] = ("passed",)

    @property
    def passed(self) -> bool:
        return self.measured >= self.goal if self.direction == ">=" else self.measured <= self.goal


@dataclass(frozen=True)
class Verdict:
    """A goal of the GPU kernels and what the run says about it.

    measured  the ratio (peer's time / ours), or None where the rows that it needs were not measured.
    floor     what must be reached; stretch: what physics should allow.
    shapes    how many (M, K, N) went into it; note: over what, or why not measured.
    """

    goal: str
    name: str
    peer: str
    measured: float | None
    floor: float
    stretch: float
    shapes: int = 0
    note: str = ""
    DERIVED: ClassVar[tuple[str, ...]] = ("verdict",)

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "PASS" if self.measured >= self.floor else "MISS"


@record("gemm")
@dataclass(frozen=True)
class GemmReport:
    """Rows, ceilings, bars and verdicts of one run. baseline names the candidate that ratios divide by."""

    environment: Environment
    baseline: str
    rows: list[GemmRow]
    ceilings: list[Ceiling] = field(default_factory=list)
    unavailable: list[Unavailable] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass(frozen=True)
class QatRow:
    """One candidate at one size. time: ns an element (passes) or ms (steps), forward and backward together.
    to_floor: its time over the clone's (passes) or the plain fp32 step's (steps), median over the rounds."""

    case: str
    candidate: str
    ours: bool
    time: float
    unit: str
    to_floor: float
    speed_over_torch: float | None
    spread: float
    rounds: int


@record("qat")
@dataclass(frozen=True)
class QatReport:
    environment: Environment
    allocator: str
    rows: list[QatRow]
    unavailable: list[Unavailable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CollectRow:
    """One way to take in 65 536 numbers; ratio: time of torch.histc / its time in the same run."""

    candidate: str
    ours: bool
    median_ms: float
    ratio: float
    spread: float


@dataclass(frozen=True)
class SearchRow:
    """From statistics to a range: the median over rounds, on the data set where that is largest."""

    method: str
    bits: int
    slowest_ms: float
    slowest_on: str


@dataclass(frozen=True)
class AmaxRow:
    """amax and signal to noise ratio of a method on every data set, in the order of CALIBRATION_DATA."""

    bits: int
    method: str
    amax: list[float]
    sqnr_db: list[float]


@record("calibration-bench")
@dataclass(frozen=True)
class CalibReport:
    """Everything of one run."""

    environment: Environment
    collect: list[CollectRow]
    search: list[SearchRow]
    amax: list[AmaxRow]
    bars: list[Bar]
    unavailable: list[Unavailable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
