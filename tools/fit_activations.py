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

# gelu is x beyond these magnitudes, or -0: what is left out there is below 5e-15 and 1e-10.
GELU_LIMIT = {"Erf": 8, "Tanh": 6}
# Degree of the exponent's polynomial, and the tail below which its relative error counts instead of its absolute one.
GELU_FIT = {"Erf": (11, 2.0**-14), "Tanh": (13, 2.0**-14)}


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


def fit_fp32(t: Array, values: Array, weight: Array, degree: int) -> list[float]:
    """Coefficients t^0 .. t^degree in fp32: each is rounded in turn and the higher ones are fitted again."""
    fixed: list[float] = []
    rest = values.copy()
    for j in range(degree + 1):
        coefficient = float(minimax(t, rest, weight, j, degree)[0])
        fixed.append(float(np.float32(coefficient)))
        rest = rest - fixed[-1] * t**j
    return fixed


def worst(t: Array, values: Array, weight: Array, coefficients: list[float]) -> float:
    return float(np.max(np.abs(weight * (values - np.polynomial.polynomial.polyval(t, coefficients)))))


def chebyshev_grid(low: float, high: float, count: int = 1500) -> Array:
    return (low + high) / 2 - (high - low) / 2 * np.cos((np.arange(count) + 0.5) * np.pi / count)


def split(value: mpmath.mpf) -> tuple[float, float]:
    """The fp32 nearest to the value, and the fp32 nearest to what is left."""
    high = float(np.float32(float(value)))
    return high, float(np.float32(float(value - high)))


def power_coefficients() -> tuple[list[float], float]:
    """2^f / 2 = 1/2 + f q(f) for |f| <= 1/2, q of degree 5; relative error of the power."""
    f = chebyshev_grid(-0.5, 0.5, 1600)
    exact = [mpmath.mpf(float(v)) for v in f]
    values = np.array([float((mpmath.mpf(2) ** v - 1) / (2 * v)) for v in exact])
    weight = np.array([float(2 * v / mpmath.mpf(2) ** v) for v in exact])
    q = fit_fp32(f, values, weight, 5)
    return q, worst(f, values, weight, q)


def tail(form: str, a: mpmath.mpf) -> mpmath.mpf:
    """S(-a) of x S(x): what gelu multiplies a negative number of this magnitude by."""
    if form == "Erf":
        return mpmath.erfc(a / mpmath.sqrt(2)) / 2
    return 1 / (1 + mpmath.exp(2 * mpmath.sqrt(2 / mpmath.pi) * (a + mpmath.mpf("0.044715") * a**3)))


def exponent_coefficients(form: str) -> tuple[list[float], float]:
    """log2(2 S(-a)) = a q(a); relative error of a S(a), and of S(-a), times `small`, where that is smaller."""
    degree, small = GELU_FIT[form]
    a = chebyshev_grid(0, GELU_LIMIT[form])
    tails = [tail(form, mpmath.mpf(float(v))) for v in a]
    values = np.array([float(mpmath.log(2 * t, 2) / mpmath.mpf(float(v))) for t, v in zip(tails, a, strict=True)])
    weight = np.array([float(mpmath.log(2) * v * max(t, small) / (1 - t)) for t, v in zip(tails, a, strict=True)])
    q = fit_fp32(a, values, weight, degree - 1)
    return q, worst(a, values, weight, q)


def constants() -> dict[str, float]:
    """Every fitted or split constant by its name in the header, each exactly an fp32 value."""
    mpmath.mp.dps = 40
    power, power_error = power_coefficients()
    print(f"# 2^f: relative error 2^{np.log2(power_error):.2f}")
    log2e_high, log2e_low = split(1 / mpmath.log(2))
    table = {"kLog2EHigh": log2e_high, "kLog2ELow": log2e_low}
    table |= {f"kPower{j + 1}": value for j, value in enumerate(power)}
    for form in GELU_FIT:
        exponent, error = exponent_coefficients(form)
        print(f"# gelu, {form} form: error 2^{np.log2(error):.2f}")
        table |= {f"k{form}{j + 1}": value for j, value in enumerate(exponent)}
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
