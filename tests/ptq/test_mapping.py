"""Whole blocks: mappings by name and class, every action, wrappers, descriptors, and what must be refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from blocks import Block, Net, QuantBlock, batches, is_unchanged, kinds, snapshot

import pyquant
from pyquant import (
    QuantizationCalibrator,
    QuantizedMapping,
    QuantizedMetadata,
    ReplacementAction,
    SelectiveQuantizer,
    SkipQuantization,
    TensorScheme,
    register_quantized_module,
)
from pyquant.errors import ArgumentError
from pyquant.integrations.pytorch_quantization import QuantDescriptor
from pyquant.ptq.mapping import REGISTERED
from pyquant.simulate.linear import FakeQuantLinear


def blocks(model: nn.Module) -> dict[str, str]:
    return {name: kind for name, kind in kinds(model).items() if kind.endswith("Block")}


def test_blocks_inside_named_stages_are_replaced() -> None:
    model = Net()
    weights = model.stage1[0].fc1.weight
    quantizer = SelectiveQuantizer()
    quantizer.register_quantization_mapping(
        layer_names={"stage1"}, quantized_target_class=QuantBlock, float_source=Block
    )
    quantizer.quantize_module(model)
    assert blocks(model) == {"stage1.0": "QuantBlock", "stage1.1": "QuantBlock", "stage2.0": "Block"}
    assert type(model.stage1[0].fc1) is FakeQuantLinear  # REPLACE_AND_RECURE: the layers inside too
    assert model.stage1[0].fc1.weight is weights
    assert not model.stage1[0].residual.input_fake_quant.is_calibrated
    QuantizationCalibrator().calibrate_model(model, batches(), "max", 4)
    assert model.stage1[0].residual.input_fake_quant.is_calibrated
    assert model(batches()[0]).isfinite().all()


def test_the_float_source_is_that_of_the_decorator_or_the_class() -> None:
    class NamedBlock(QuantBlock):
        float_source = Block

    for mapped in (False, True):
        if mapped:
            register_quantized_module(float_source=Block)(QuantBlock)
        try:
            model, quantizer = Net(), SelectiveQuantizer()
            if not mapped:
                quantizer.register_quantization_mapping({"stage1", "stage2"}, NamedBlock)
            quantizer.quantize_module(model)
            assert set(blocks(model).values()) == {"QuantBlock" if mapped else "NamedBlock"}
        finally:
            REGISTERED.pop(Block, None)


def test_without_a_float_source_the_names_are_the_blocks_themselves() -> None:
    model, quantizer = Net(), SelectiveQuantizer()
    quantizer.register_quantization_mapping({"stage1.1"}, QuantBlock)
    quantizer.quantize_module(model)
    assert blocks(model) == {"stage1.0": "Block", "stage1.1": "QuantBlock", "stage2.0": "Block"}
    before = snapshot(model := Net())
    quantizer = SelectiveQuantizer()
    quantizer.register_quantization_mapping({"stage1"}, QuantBlock)  # a Sequential has no fc1
    with pytest.raises(ArgumentError, match="stage1: quantized_target_class"):
        quantizer.quantize_module(model)
    assert is_unchanged(model, before)


@pytest.mark.parametrize("action", list(ReplacementAction))
def test_actions(action: ReplacementAction) -> None:
    model = Net()
    quantizer = SelectiveQuantizer(
        scheme=pyquant.W8A8Dynamic(), custom_mappings={Block: QuantizedMetadata(Block, QuantBlock, action)}
    )
    if action is ReplacementAction.UNWRAP:
        before = snapshot(model)
        with pytest.raises(ArgumentError, match="float_module"):
            quantizer.quantize_module(model)
        assert is_unchanged(model, before)
        return
    quantizer.quantize_module(model)
    block = model.stage1[0]
    assert type(block) is (Block if action is ReplacementAction.SKIP else QuantBlock)
    quantised = action in (ReplacementAction.REPLACE_AND_RECURE, ReplacementAction.RECURE_AND_REPLACE)
    assert type(block.fc1) is (FakeQuantLinear if quantised else nn.Linear)
    assert type(model.stem) is FakeQuantLinear


def test_recure_and_replace_hands_quantised_layers_to_the_target() -> None:
    seen: list[str] = []

    class Watching(nn.Module):
        def __init__(self, block: Block) -> None:  # no from_float: the constructor takes the block
            super().__init__()
            seen.append(type(block.fc1).__name__)
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)

    for action in (ReplacementAction.REPLACE_AND_RECURE, ReplacementAction.RECURE_AND_REPLACE):
        model, quantizer = Net(), SelectiveQuantizer(scheme=pyquant.W8A8Dynamic())
        quantizer.register_quantization_mapping({Block}, Watching, action=action)
        quantizer.quantize_module(model)
        assert type(model.stage1[0].block.fc1) is FakeQuantLinear
    assert seen == ["Linear"] * 3 + ["FakeQuantLinear"] * 3


def test_a_target_that_fails_late_leaves_everything_as_it_was() -> None:
    made: list[int] = []

    class Failing(QuantBlock):
        @classmethod
        def from_float(cls, block: Block) -> Failing:
            made.append(1)
            if len(made) == 3:
                raise TypeError("no")
            return super().from_float(block)  # type: ignore[return-value]

    for action in (ReplacementAction.REPLACE_AND_RECURE, ReplacementAction.RECURE_AND_REPLACE):
        made.clear()
        model, quantizer = Net(), SelectiveQuantizer()
        quantizer.register_quantization_mapping({Block}, Failing, action=action)
        before = snapshot(model)
        with pytest.raises(ArgumentError, match=r"stage2.0.*Failing cannot be made of a Block: no"):
            quantizer.quantize_module(model)
        assert is_unchanged(model, before)
        assert len(made) == 3


def test_names_win_over_classes_and_skips_hold_inside_blocks() -> None:
    model = Net()
    quantizer = SelectiveQuantizer(scheme=pyquant.W8A8Dynamic(), custom_mappings={Block: QuantBlock})
    quantizer.register_skip_quantization({"stage1.0", "stage2.0.fc2"})
    quantizer.quantize_module(model)
    assert blocks(model) == {"stage1.0": "Block", "stage1.1": "QuantBlock", "stage2.0": "QuantBlock"}
    assert type(model.stage1[0].fc1) is nn.Linear
    assert type(model.stage2[0].fc1) is FakeQuantLinear
    assert type(model.stage2[0].fc2) is nn.Linear


@pytest.mark.parametrize("given", [TensorScheme(bits=4, calibrator="mse"), QuantDescriptor(num_bits=4)])
def test_descriptors_are_those_of_the_layers_inside(given: object) -> None:
    model, quantizer = Net(), SelectiveQuantizer()
    quantizer.register_quantization_mapping(
        {"stage1.0"},
        QuantBlock,
        input_quant_descriptor=given,
        weights_quant_descriptor=QuantDescriptor(num_bits=4, axis=0, calib_method="histogram"),
    )
    quantizer.quantize_module(model)
    layer = model.stage1[0].fc1
    assert (layer.scheme.inputs.bits, layer.scheme.weights.bits) == (4, 4)
    assert layer.scheme.inputs.calibrator == ("mse" if isinstance(given, TensorScheme) else "max")
    assert not layer.input_fake_quant.method_is_open
    assert layer.weight_fake_quant.method_is_open
    assert model.stage2[0].fc1.scheme.weights.bits == 8
    bad = SelectiveQuantizer()
    bad.register_quantization_mapping({"stage1.0"}, QuantBlock, input_quant_descriptor=8)
    with pytest.raises(ArgumentError, match="input_quant_descriptor"):
        bad.quantize_module(Net())


def test_a_scheme_keyword_of_from_float_is_filled() -> None:
    seen: list[object] = []

    class Schemed(QuantBlock):
        @classmethod
        def from_float(cls, block: Block, scheme: object = None) -> Schemed:
            seen.append(scheme)
            return super().from_float(block)  # type: ignore[return-value]

    quantizer = SelectiveQuantizer(scheme=pyquant.W8A8Dynamic(), custom_mappings={Block: Schemed})
    quantizer.register_layer_scheme({"stage2.0"}, pyquant.W4A8Dynamic(None))
    quantizer.quantize_module(Net())
    assert [str(s) for s in seen] == ["W8A8Dynamic", "W8A8Dynamic", "W4A8Dynamic(group_size=None)"]


def test_wrappers_pass_through_and_are_taken_off() -> None:
    model = Net()
    x = batches()[0]
    expected = model(x)
    model.head = SkipQuantization(model.head)
    model.stage1[0] = QuantizedMapping(
        float_module=model.stage1[0], quantized_target_class=QuantBlock, action=ReplacementAction.REPLACE
    )
    model.stage1[1].fc2 = SkipQuantization(model.stage1[1].fc2)
    model.stage2[0] = QuantizedMapping(float_module=model.stage2[0], quantized_target_class=QuantBlock)
    assert torch.equal(model(x), expected)
    quantizer = SelectiveQuantizer(scheme=pyquant.W8A8Dynamic())
    quantizer.register_skip_quantization({"stage2.0"})  # a name wins over the wrapper
    quantizer.quantize_module(model)
    assert type(model.head) is nn.Linear
    assert type(model.stage1[1].fc2) is nn.Linear
    assert type(model.stage1[1].fc1) is FakeQuantLinear
    assert type(model.stage1[0]) is QuantBlock
    assert type(model.stage1[0].fc1) is nn.Linear  # REPLACE: nothing inside is looked at
    assert type(model.stage2[0]) is Block
    assert type(model.stage2[0].fc1) is nn.Linear


def test_a_layer_class_can_have_a_counterpart_of_its_own() -> None:
    class MyLinear(nn.Linear):
        @classmethod
        def from_float(cls, linear: nn.Linear) -> MyLinear:
            new = cls(linear.in_features, linear.out_features)
            new.weight, new.bias = linear.weight, linear.bias
            return new

    model = Net()
    quantizer = SelectiveQuantizer(
        scheme=pyquant.W8A8Dynamic(),
        custom_mappings={nn.Linear: QuantizedMetadata(nn.Linear, MyLinear, ReplacementAction.REPLACE)},
    )
    quantizer.register_layer_scheme({"head"}, pyquant.W8A8Dynamic())
    quantizer.quantize_module(model)
    assert type(model.stem) is MyLinear
    assert type(model.head) is FakeQuantLinear


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: SkipQuantization(3), "module"),
        (lambda: QuantizedMapping(float_module=3, quantized_target_class=Block), "float_module"),
        (lambda: QuantizedMapping(float_module=Block(), quantized_target_class=Block()), "quantized_target_class"),
        (lambda: QuantizedMetadata(Block, Block, "replace"), "ReplacementAction.REPLACE"),
        (lambda: register_quantized_module(float_source=3)(Block), "float_source"),
        (lambda: SelectiveQuantizer().register_quantization_mapping({"a"}, "Block"), "quantized_target_class"),
    ],
)
def test_bad_arguments_are_named(call: object, told: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert told in str(error.value)


def test_a_class_has_one_registered_counterpart() -> None:
    class Source(nn.Module): ...

    register_quantized_module(float_source=[Source])(QuantBlock)
    try:
        with pytest.raises(ArgumentError, match="which has QuantBlock"):
            register_quantized_module(float_source=Source)(Block)
    finally:
        REGISTERED.pop(Source)


def test_mappings_that_match_nothing_are_errors() -> None:
    for keys in ({"stage7"}, {"head"}, {"stem", "stage1"}):
        model, quantizer = Net(), SelectiveQuantizer()
        quantizer.register_quantization_mapping(keys, QuantBlock, float_source=Block)
        before = snapshot(model)
        with pytest.raises(ArgumentError, match=r"stage7|head.*no Block|stem.*no Block"):
            quantizer.quantize_module(model)
        assert is_unchanged(model, before)


def test_a_second_run_finds_the_targets_where_the_blocks_were() -> None:
    model, quantizer = Net(), SelectiveQuantizer()
    quantizer.register_quantization_mapping({"stage1"}, QuantBlock, float_source=Block)
    quantizer.quantize_module(model)
    quantizer.register_skip_quantization({"head"})
    quantizer.quantize_module(model)
    assert blocks(model)["stage1.0"] == "QuantBlock"
    assert type(model.head) is nn.Linear
    assert type(model.stage1[0].fc1) is FakeQuantLinear
