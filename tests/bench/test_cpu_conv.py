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


def test_layers_of_given_schemes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convs = (cpu_conv.Conv(32, 4, 1, 1, 3), cpu_conv.depthwise(6, 3, 1, 5))
    monkeypatch.setitem(cpu_conv.MODELS, "MobileNetV3", convs)
    schemes = ["W8A8Dynamic", "W4A8Dynamic(group_size=32)"]  # the 9 weights of a depthwise layer are no group of 32
    words = ["--model", "MobileNetV3", "--rounds", "1", "--budget", "0", "--threads", "1", "--out", str(tmp_path)]
    assert cpu_conv.main([*words, "--schemes", *schemes]) == 0
    text = (tmp_path / "cpu_conv_schemes_one_thread.md").read_text()
    assert text.count("| yes |") == 4
    assert "| fp32 us | W8A8Dynamic | W4A8Dynamic(group_size=32) | exact |" in text
    assert "chain" not in text
    assert "- MobileNetV3, depthwise, channels_last: W8A8Dynamic " in text
    for wrong in ("W8A8", "W9A9"):
        with pytest.raises(SystemExit):
            cpu_conv.main([*words, "--schemes", wrong])


def test_means_are_of_one_kind_of_layer() -> None:
    rows = [row("ResNet-18", 2.0), row("ResNet-18", 8.0)]
    assert cpu_conv.means(rows) == ["- ResNet-18, channels_last: dynamic 4.00x, static 4.00x, codes 4.00x"]
