"""The refitted model: exact where it must be, better than the tables where groups interact, and honest about doubt."""

from __future__ import annotations

import numpy as np
import pytest
from search_problems import decreasing, every_config

from pyquant.mixed_precision.solve import Config, SearchProblem
from pyquant.mixed_precision.solve.predict import Model, Shares


def _truth(problem: SearchProblem, seed: int) -> SearchProblem:
    """The same problem as it really is: terms off by 20 %, neighbours that add up to half of what both lose."""
    rng = np.random.default_rng(seed)
    loss = problem.loss * np.exp(0.2 * rng.standard_normal(problem.loss.shape))
    both = np.sqrt(problem.loss[:-1, :, None] * problem.loss[1:, None, :])
    return problem.with_(loss=loss, loss_pairs=0.5 * both * rng.uniform(-1, 1, both.shape))


def _measured(truth: SearchProblem, count: int, seed: int) -> list[tuple[Config, float]]:
    rng = np.random.default_rng(seed)
    configs = {tuple(c) for c in rng.integers(0, 3, (count, len(truth.groups))).tolist()}
    return [(c, truth.loss_of(c)) for c in sorted(configs)]


def test_before_data_it_is_the_tables() -> None:
    problem = decreasing(5).with_(loss_base=0.3)
    model = Model(problem, [])
    configs = every_config(problem)[::7]
    np.testing.assert_allclose(model.predict(configs).mean, [problem.loss_of(c) for c in configs], rtol=1e-12)
    np.testing.assert_allclose(model.refitted().loss, problem.loss)


@pytest.mark.parametrize("seed", range(4))
def test_mean_and_deviation_are_those_of_normal_distributions(seed: int) -> None:
    """Against the textbook's joint normal distribution, written out with every term."""
    problem = decreasing(3, seed)
    measured = _measured(_truth(problem, seed), 6, seed)
    shares = Shares(0.2, 0.3, 0.1, 0.05)
    model = Model(problem, measured, shares)
    asked = [(0, 1, 2), (2, 2, 2), (1, 0, 1)]

    largest = max(float(problem.loss.max()), max(y for _, y in measured) / 3)

    def size(g: int, f: int) -> float:
        return 0.0 if f == 0 else max(float(problem.loss[g, f]), 1e-4 * largest)

    def kernel(a: Config, b: Config) -> float:
        total = shares.scale**2 * problem.loss_of(a) * problem.loss_of(b)
        total += sum((shares.term * size(g, f)) ** 2 for g, f in enumerate(a) if b[g] == f)
        for g in range(2):
            if a[g : g + 2] == b[g : g + 2]:
                total += shares.pair**2 * size(g, a[g]) * size(g + 1, a[g + 1])
        return float(total)

    def level(c: Config) -> float:
        return max(problem.loss_of(c), 1e-4 * largest)

    known = [c for c, _ in measured]
    covariance = np.array([[kernel(a, b) for b in known] for a in known])
    covariance += np.diag([(shares.noise * level(c)) ** 2 for c in known])
    rest = np.array([y - problem.loss_of(c) for c, y in measured])
    for config, mean, deviation in zip(asked, *model.predict(asked), strict=True):
        across = np.array([kernel(config, c) for c in known])
        expected = problem.loss_of(config) + across @ np.linalg.solve(covariance, rest)
        variance = kernel(config, config) - across @ np.linalg.solve(covariance, across)
        np.testing.assert_allclose(mean, expected, rtol=1e-9)
        np.testing.assert_allclose(deviation, np.sqrt(variance + (shares.noise * level(config)) ** 2), rtol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_refitted_problem_predicts_the_mean(seed: int) -> None:
    problem = decreasing(6, seed).with_(loss_base=0.1)
    model = Model(problem, _measured(_truth(problem, seed), 20, seed))
    refitted = model.refitted()
    configs = every_config(problem)[::31]
    np.testing.assert_allclose(model.predict(configs).mean, [refitted.loss_of(c) for c in configs], rtol=1e-9)


def test_a_refit_beats_the_tables_and_pairs_beat_none() -> None:
    errors: dict[str, list[float]] = {"tables": [], "no pairs": [], "refit": []}
    for seed in range(6):
        problem = decreasing(6, seed)
        truth = _truth(problem, seed)
        measured = _measured(truth, 40, seed)
        asked = [c for c in every_config(problem)[::5] if c not in dict(measured)]
        real = np.array([truth.loss_of(c) for c in asked])
        for name, model in (
            ("tables", Model(problem, [])),
            ("no pairs", Model(problem, measured, Shares(0.3, 0.0, 0.5, 0.03))),
            ("refit", Model(problem, measured)),
        ):
            errors[name].append(float(np.abs(model.predict(asked).mean - real).mean() / real.mean()))
    means = {name: np.mean(values) for name, values in errors.items()}
    assert means["refit"] < 0.7 * means["no pairs"] < 0.7 * means["tables"], means


def test_the_likeliest_shares_follow_the_data() -> None:
    problem = decreasing(6)
    exact = Model(problem, [(c, problem.loss_of(c)) for c, _ in _measured(problem, 30, 0)])
    assert exact.shares.term == min(exact.shares.term, 0.03)
    assert exact.shares.noise == 0.01
    far = Model(problem, _measured(_truth(problem, 1), 40, 1))
    assert far.shares.term + far.shares.pair > exact.shares.term + exact.shares.pair


def test_samples_scatter_as_the_deviation_says() -> None:
    problem = decreasing(4)
    model = Model(problem, _measured(_truth(problem, 0), 8, 0), Shares(0.3, 0.3, 0.2, 1e-6))
    rng = np.random.default_rng(0)
    asked = [(2, 2, 2, 2), (1, 2, 0, 2), (0, 0, 2, 2)]
    drawn = np.array([[p.loss_of(c) for c in asked] for p in (model.sampled(rng) for _ in range(1500))])
    mean, deviation = model.predict(asked)
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=4 * deviation.max() / np.sqrt(1500))
    np.testing.assert_allclose(drawn.std(axis=0), deviation, rtol=0.1, atol=1e-6)


def test_tables_of_zeros_and_negative_losses_do_no_harm() -> None:
    problem = decreasing(3)
    zero = Model(problem.with_(loss=np.zeros((3, 3))), [((1, 1, 1), 0.5), ((2, 2, 2), 0.7), ((0, 1, 2), 0.1)])
    assert np.isfinite(zero.predict([(1, 2, 1)]).mean).all()
    lucky = Model(problem.with_(loss=-problem.loss), [((1, 1, 1), -0.5), ((2, 2, 2), 0.7), ((0, 1, 2), 0.1)])
    assert np.isfinite(lucky.predict([(1, 2, 1)]).deviation).all()
