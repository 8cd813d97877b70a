"""The convolution benchmark without a clock: its layers are exact, its bars are the worst layer's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import cpu_conv


def row(model: str, ratio: float) -> cpu_conv.ConvRow:
    us = {cpu_conv.FP32: 100.0, **dict.fromkeys((cpu_conv.DYNAMIC, cpu_conv.STATIC, cpu_conv.CODES), 100.0 / ratio)}
    return cpu_conv.ConvRow(model, "layer", "channels_last", us, {k: ratio for k in us if k != cpu_conv.FP32}, True)


def test_the_slowest_layer_decides() -> None:
    bars = cpu_conv.bars_of([row("ResNet-18", 4.0), row("MobileNetV3", 0.9), row("chain", 2.0)])
    assert [round(bar.measured, 6) for bar in bars] == [0.9, 0.9, 0.9, 1.0]
    assert [bar.passed for bar in bars] == [False, False, False, True]
    assert cpu_conv.bars_of([]) == []


@pytest.mark.parametrize("memory", cpu_conv.FORMATS)
def test_a_layer_and_a_chain_are_exact(memory: str) -> None:
    layer = cpu_conv.row("ResNet-18", cpu_conv.Conv(4, 8, 3, 2, 9), memory, 1, 0.0)
    chain = cpu_conv.chain(4, 5, memory, 1, 0.0)
    assert layer.exact
    assert cpu_conv.row("MobileNetV3", cpu_conv.depthwise(6, 3, 1, 9), memory, 1, 0.0).exact
    assert chain.exact
    assert set(layer.ratio) == {cpu_conv.DYNAMIC, cpu_conv.STATIC, cpu_conv.CODES}
    assert set(chain.ratio) == {cpu_conv.DYNAMIC, cpu_conv.CODES}
