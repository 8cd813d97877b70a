"""What a problem's tables predict, refitted to the configurations that were measured.

The model stays a sum of terms of one group and of two neighbours, so that its front is still found exactly. It is a
ridge regression round the additive tables, written as Bayes' rule: every term may differ from its table by a share of
itself, neighbours may add or save a share of what both lose, the whole may be off by a factor, and a rest stays noise.
The shares are those under which the measured losses are likeliest (marginal likelihood, the smooth sister of
leave-one-out).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from pyquant.mixed_precision.solve.problem import Config, SearchProblem, Table


class Shares(NamedTuple):
    """Standard deviations of the prior, relative to what the tables predict."""

    term: float  # of the loss of one group and format
    pair: float  # of what neighbours add, relative to the geometric mean of both losses
    scale: float  # of one factor for the whole
    noise: float  # of what the model cannot say


TERMS: Final = (0.03, 0.1, 0.3, 0.6)
PAIRS: Final = (0.03, 0.1, 0.3, 0.6, 1.2)
SCALES: Final = (0.05, 0.5)
NOISES: Final = (0.01, 0.03, 0.1)
GRID: Final = tuple(Shares(*s) for s in itertools.product(TERMS, PAIRS, SCALES, NOISES))
BEFORE_DATA: Final = Shares(0.1, 0.1, 0.3, 0.03)
MIN_POINTS: Final = 3  # fewer say nothing about four shares
FLOOR: Final = 1e-4  # of the largest single loss: what a term is thought to be at least
SAME_SCALE: Final = 4.0  # tables off by more than this factor are taken for another unit


class Prediction(NamedTuple):
    """Mean and standard deviation of the loss, float64 [configurations]."""

    mean: Table
    deviation: Table


class Model:
    """The problem's terms as one vector: [groups x formats] singles, then [groups - 1 x formats x formats] pairs.

    problem   its tables are the prior.
    measured  (configuration, loss) pairs, finite losses.
    shares    None: the likeliest ones.
    """

    def __init__(
        self, problem: SearchProblem, measured: Sequence[tuple[Config, float]], shares: Shares | None = None
    ) -> None:
        self.problem = problem
        size, formats = problem.loss.size, len(problem.formats)
        pairs = problem.loss_pairs
        if pairs is None:
            pairs = np.zeros((len(problem.groups) - 1, formats, formats))
        self._terms = np.concatenate([problem.loss.ravel(), pairs.ravel()])
        self._rows = self._features([config for config, _ in measured])
        risen = np.array([loss for _, loss in measured]) - problem.loss_base
        factor = _unit(self._rows @ self._terms, risen)
        self._terms = factor * self._terms
        self._floor = FLOOR * max(
            factor * float(np.abs(problem.loss).max()),
            float(np.abs(risen).max(initial=0.0)) / len(problem.groups),
            1e-100,
        )
        magnitude = _magnitude(problem, factor, self._floor)
        both = np.sqrt(magnitude[:-1, :, None] * magnitude[1:, None, :])
        self._single = np.concatenate([magnitude.ravel(), np.zeros(both.size)])
        self._pair = np.concatenate([np.zeros(size), both.ravel()])
        self._before = self._rows @ self._terms
        self._rest = risen - self._before
        self._level = np.maximum(np.abs(self._before), self._floor)
        # everything about measured points is kept in units of what was predicted: numbers near 1 whatever the losses
        scaled = self._rows / self._level[:, None]
        shape = self._before / self._level
        parts = [(scaled * d**2) @ scaled.T for d in (self._single, self._pair)] + [np.outer(shape, shape)]
        if shares is None:
            likely = len(measured) >= MIN_POINTS
            shares = GRID[int(np.argmax(_likelihoods(parts, self._rest / self._level)))] if likely else BEFORE_DATA
        self.shares = shares
        self._variance = (shares.term * self._single) ** 2 + (shares.pair * self._pair) ** 2
        covariance = sum(share**2 * part for share, part in zip(shares, parts, strict=False))
        self._inverse = np.linalg.inv(covariance + shares.noise**2 * np.eye(len(self._rest)))
        self.fitted = self._terms + self._correction(self._rest)

    def predict(self, configs: Sequence[Config]) -> Prediction:
        """What is known of the losses of these configurations, each checked already."""
        rows = self._features(configs)
        before = rows @ self._terms
        scale = self.shares.scale**2
        across = ((rows * self._variance) @ self._rows.T + scale * np.outer(before, self._before)) / self._level
        alone = (rows**2) @ self._variance + scale * before**2
        level = np.maximum(np.abs(before), self._floor)
        variance = alone - np.einsum("ij,jk,ik->i", across, self._inverse, across)
        variance = np.maximum(variance, 0.0) + (self.shares.noise * level) ** 2
        return Prediction(self.problem.loss_base + rows @ self.fitted, np.sqrt(variance))

    def refitted(self) -> SearchProblem:
        """The problem with the likeliest terms."""
        return self._with(self.fitted)

    def sampled(self, rng: np.random.Generator) -> SearchProblem:
        """The problem with terms drawn from what is possible after the measurements (Matheron's rule)."""
        drawn = rng.standard_normal(len(self._terms)) * np.sqrt(self._variance)
        drawn = drawn + self.shares.scale * rng.standard_normal() * self._terms
        noise = self.shares.noise * self._level * rng.standard_normal(len(self._level))
        return self._with(self._terms + drawn + self._correction(self._rest - self._rows @ drawn - noise))

    def _correction(self, rest: Table) -> Table:
        weights = (self._inverse @ (rest / self._level)) / self._level
        move = self._variance * (self._rows.T @ weights)
        return move + self.shares.scale**2 * float(self._before @ weights) * self._terms

    def _with(self, terms: Table) -> SearchProblem:
        size, formats = self.problem.loss.size, len(self.problem.formats)
        pairs = terms[size:].reshape(-1, formats, formats)
        return self.problem.with_(loss=terms[:size].reshape(self.problem.loss.shape), loss_pairs=pairs)

    def _features(self, configs: Sequence[Config]) -> Table:
        groups, formats = self.problem.loss.shape
        rows = np.zeros((len(configs), len(self._terms)))
        index = np.array(configs, dtype=np.int64).reshape(-1, groups)
        row = np.arange(len(configs))[:, None]
        rows[row, np.arange(groups) * formats + index] = 1.0
        pairs = (np.arange(groups - 1) * formats + index[:, :-1]) * formats + index[:, 1:]
        rows[row, groups * formats + pairs] = 1.0
        return rows


def _likelihoods(parts: Sequence[Table], rest: Table) -> Table:
    """The logarithm of the likelihood of the rests under each of the shares in GRID, up to a constant."""
    squares, alone = np.array(GRID) ** 2, np.eye(len(rest))
    covariance = np.einsum("sp,pij->sij", squares[:, :3], np.array(parts)) + squares[:, 3, None, None] * alone
    weights = np.linalg.solve(covariance, np.broadcast_to(rest[:, None], (len(GRID), len(rest), 1)))[..., 0]
    likelihood: Table = -0.5 * (weights @ rest + np.linalg.slogdet(covariance)[1])
    return likelihood


def _unit(before: Table, risen: Table) -> float:
    """The unit of the tables: 1, unless they are on another scale altogether than what was measured (other metrics)."""
    both = (before > 0) & (risen > 0)
    if not both.any():
        return 1.0
    factor = float(np.median(risen[both] / before[both]))
    return 1.0 if 1.0 / SAME_SCALE <= factor <= SAME_SCALE else factor


def _magnitude(problem: SearchProblem, factor: float, floor: float) -> Table:
    """How large the loss of each choice may be thought: its table, with a floor; 0 where the first format's says 0."""
    magnitude = factor * np.abs(problem.loss)
    floors = np.where((np.arange(len(problem.formats)) == 0) & (magnitude == 0), 0.0, floor)
    return np.where(problem.mask, np.maximum(magnitude, floors), 0.0)
