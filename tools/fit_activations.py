"""Regenerate the polynomial coefficients of csrc/core/activation_math.h (docs/activations.md).

Needs numpy and mpmath, at development time only:

    python tools/fit_activations.py            # prints the constants as the header spells them
    python tools/fit_activations.py --check    # exit 1 unless the header and the Python module hold these constants
"""

import argparse
import re
import sys
from pathlib import Path

import mpmath
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "csrc" / "core" / "activation_math.h"
MODULE = ROOT / "pyquant" / "numerics" / "activation.py"

Array = NDArray[np.float64]

# exp(r) is needed for |r| <= ln2/2, plus the little that rounding the multiple of ln2 adds.
EXP_RANGE = 0.347
# x * Phi(x) rounds to -0 below -14.5.
ERF_RANGE = 14.5
# Phi(-a) = exp(-a^2/2) * G(t) / (a + 1.25) with t = (a - 4) / (a + 4). The factor a + 1.25 keeps G within 0.43 .. 0.63
# and its slope in a small, so that a rounding error of t hardly shows; 4 gives the shortest polynomial among the small
# integers.
ERF_POLE = 4
ERF_SHIFT = mpmath.mpf("1.25")


def minimax(t: Array, values: Array, weight: Array, lowest: int, degree: int, rounds: int = 400) -> Array:
    """Coefficients of t^lowest .. t^degree that minimise max |weight * (values - polynomial)| on the grid (Lawson)."""
    middle, half = (t[0] + t[-1]) / 2, (t[-1] - t[0]) / 2
    # A Chebyshev basis keeps the least-squares problem well conditioned; the monomials come out by exact expansion.
    basis = [
        np.polynomial.Chebyshev.basis(j, domain=[middle - half, middle + half]) for j in range(degree - lowest + 1)
    ]
    columns = np.stack([weight * t**lowest * b(t) for b in basis], axis=1)
    target = weight * values
    importance = np.full(t.shape, 1.0 / t.size)
    best_error, best = np.inf, np.zeros(degree - lowest + 1)
    for _ in range(rounds):
        root = np.sqrt(importance)
        solution = np.linalg.lstsq(columns * root[:, None], target * root, rcond=None)[0]
        error = np.abs(target - columns @ solution)
        if error.max() < best_error:
            best_error, best = error.max(), solution
        importance = importance * error
        importance /= importance.sum()
    series = np.polynomial.Polynomial([0.0])
    for coefficient, b in zip(best, basis, strict=True):
        series = series + coefficient * b.convert(kind=np.polynomial.Polynomial)
    return np.asarray(series.coef, dtype=np.float64)


def fit_fp32(t: Array, values: Array, weight: Array, degree: int, exact_head: int = 0) -> list[float]:
    """Coefficients t^0 .. t^degree in fp32: each is rounded in turn and the higher ones are fitted again.

    The first `exact_head` are returned as fitted (the caller stores them as a sum of two fp32).
    """
    fixed: list[float] = []
    rest = values.copy()
    for j in range(degree + 1):
        coefficient = float(minimax(t, rest, weight, j, degree)[0])
        fixed.append(coefficient if j < exact_head else float(np.float32(coefficient)))
        rest = rest - fixed[-1] * t**j
    return fixed


def worst(t: Array, values: Array, weight: Array, coefficients: list[float]) -> float:
    return float(np.max(np.abs(weight * (values - np.polynomial.polynomial.polyval(t, coefficients)))))


def chebyshev_grid(low: float, high: float, count: int = 1500) -> Array:
    return (low + high) / 2 - (high - low) / 2 * np.cos((np.arange(count) + 0.5) * np.pi / count)


def split(value: mpmath.mpf, bits: int = 24) -> tuple[float, float]:
    """High part with `bits` significant bits and the fp32 remainder."""
    _, exponent = mpmath.frexp(value)
    step = mpmath.ldexp(1, int(exponent) - bits)
    high = mpmath.nint(value / step) * step
    return float(high), float(np.float32(float(value - high)))


def exp_coefficients() -> tuple[list[float], float]:
    """exp(r) = 1 + r + r^2 q(r), q of degree 4; relative error of the exponential."""
    r = chebyshev_grid(-EXP_RANGE, EXP_RANGE, 1600)
    exact = [mpmath.mpf(float(v)) for v in r]
    values = np.array([float((mpmath.expm1(v) - v) / v**2) for v in exact])
    weight = np.array([float(v**2 / mpmath.exp(v)) for v in exact])
    q = fit_fp32(r, values, weight, 4)
    return q, worst(r, values, weight, q)


def erf_coefficients() -> tuple[list[float], float]:
    """G(t) of degree 10; relative error of Phi(-a)."""
    t = chebyshev_grid(-1.0, (ERF_RANGE - ERF_POLE) / (ERF_RANGE + ERF_POLE))
    a = [ERF_POLE * (1 + mpmath.mpf(float(v))) / (1 - mpmath.mpf(float(v))) for v in t]
    values = np.array([float(mpmath.erfc(v / mpmath.sqrt(2)) / 2 * mpmath.exp(v * v / 2) * (v + ERF_SHIFT)) for v in a])
    weight = 1 / values
    g = fit_fp32(t, values, weight, 10, exact_head=1)
    return g, worst(t, values, weight, g)


def constants() -> dict[str, float]:
    """Every fitted or split constant by its name in the header, each exactly an fp32 value."""
    mpmath.mp.dps = 40
    q, exp_error = exp_coefficients()
    g, erf_error = erf_coefficients()
    print(f"# exp: relative error 2^{np.log2(exp_error):.2f}; G: relative error 2^{np.log2(erf_error):.2f}")
    ln2_high, ln2_low = split(mpmath.log(2))
    slope = 2 * mpmath.sqrt(2 / mpmath.pi)
    # 21 bits: w = slope + cubic * x^2 stays below 16, so subtracting the high part of the slope from it is exact.
    slope_high, slope_low = split(slope, 21)
    cubic_high, cubic_low = split(slope * mpmath.mpf("0.044715"))
    g_high, g_low = split(mpmath.mpf(g[0]))
    table = {
        "kLog2E": float(np.float32(float(1 / mpmath.log(2)))),
        "kLn2High": ln2_high,
        "kLn2Low": ln2_low,
        "kTanhSlopeHigh": slope_high,
        "kTanhSlopeLow": slope_low,
        "kTanhCubicHigh": cubic_high,
        "kTanhCubicLow": cubic_low,
    }
    table |= {f"kExp{j + 2}": value for j, value in enumerate(q)}
    table |= {"kErf0High": g_high, "kErf0Low": g_low}
    table |= {f"kErf{j}": value for j, value in enumerate(g) if j > 0}
    return table


def check(table: dict[str, float]) -> list[str]:
    """Disagreements between the fitted constants and those the two sources hold."""
    python_names = {name: re.sub(r"(?<!^)(?=[A-Z])", "_", name[1:]).upper() for name in table}
    faults = []
    for path, pattern, names in (
        (HEADER, r"^constexpr float (k\w+) = (-?[0-9.e+-]+)f;", {name: name for name in table}),
        (MODULE, r"^(\w+): Final = (-?[0-9.e+-]+)$", python_names),
    ):
        held = {name: np.float32(text) for name, text in re.findall(pattern, path.read_text(), re.M)}
        for name, value in table.items():
            if held.get(names[name]) != value:
                faults.append(f"{path.name}: {names[name]} is {held.get(names[name])}, fitted {np.float32(value):.9g}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the sources instead of printing")
    arguments = parser.parse_args()
    table = constants()
    if arguments.check:
        faults = check(table)
        print("\n".join(faults) or f"{len(table)} constants agree with both sources")
        return 1 if faults else 0
    for name, value in table.items():
        print(f"constexpr float {name} = {np.float32(value):.9g}f;")
    return 0


if __name__ == "__main__":
    sys.exit(main())
