"""Trade-offs with known answers: the seed's net with the seed's ratios, and records that are hard to draw."""

from __future__ import annotations

import itertools
from dataclasses import replace

from pyquant.report.records.trade_off import TradeOff, TradeOffAxis, TradeOffPoint, trade_off

SIZES = (32768, 16384, 8192, 4096, 2048, 1024, 32768)
BITS = {"fp32": 16, "int8": 8, "int4": 4}
SEED_RATIOS = {"fp32": 1.0, "int8": 0.69, "int4": 0.53}  # -31 % and -47 %
LATENCY, CAPACITY = TradeOffAxis("latency", "us", "invented"), TradeOffAxis("capacity", "bits", "sum of outputs x bits")
NASTY = 'a "net" <&> </script><script>document.title = "broken"</script> @@DATA@@ \u2028'


def seed_points(ratios: dict[str, float] = SEED_RATIOS) -> list[TradeOffPoint]:
    """All 729 configurations; the time of a layer is its share of the work times the ratio of its format."""
    work = [k * n for k, n in itertools.pairwise(SIZES)]
    return [
        TradeOffPoint(
            {f"layer {i + 1}": name for i, name in enumerate(config)},
            2e4 * sum(w / sum(work) * ratios[name] for w, name in zip(work, config)),
            float(sum(n * BITS[name] for n, name in zip(SIZES[1:], config))),
        )
        for config in itertools.product(ratios, repeat=6)
    ]


def seed_trade_off() -> TradeOff:
    return trade_off(
        seed_points(), "the seed's ratios", LATENCY, CAPACITY, higher_is_better=True, formats=tuple(SEED_RATIOS)
    )


def small_trade_off() -> TradeOff:
    """Four points of two groups: a loss, an interval, a prediction, a choice, further figures, texts that bite."""
    points = [
        TradeOffPoint({"a|b": "fp32", "c": "fp32"}, 100.0, 0.5, 95.0, 110.0, figures={"mean_us": 101.5}),
        TradeOffPoint({"a|b": "fp32", "c": "<i>"}, 70.0, 0.625, 69.0, 75.0),
        TradeOffPoint({"a|b": "<i>", "c": "fp32"}, 80.0, 0.75, chosen=True),
        TradeOffPoint({"a|b": "<i>", "c": "<i>"}, 50.0, 0.875, measured=False),
    ]
    made = trade_off(
        points,
        NASTY,
        TradeOffAxis("latency", "us"),
        TradeOffAxis("loss"),
        higher_is_better=False,
        formats=("fp32", "<i>"),
    )
    return replace(made, environment={"cpu": "no such", "torch": NASTY}, notes=(NASTY,), command="pyquant <made up>")
