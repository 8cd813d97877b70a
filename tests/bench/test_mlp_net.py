"""The network of the founding experiment, and each defect of the original script as a test that it is not here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyquant.bench.mlp_check import check_net
from pyquant.bench.mlp_net import (
    BITS,
    SIZES,
    Config,
    Joint,
    MlpNet,
    all_configs,
    all_joints,
    capacity,
    exponents,
    joints,
    parse_config,
    parse_sizes,
    scaled,
)
from pyquant.core.qtensor import QTensor
from pyquant.errors import ArgumentError, PyquantError

TINY = (64, 40, 24, 48)  # three layers of odd shapes: 27 configurations


@pytest.fixture(scope="module")
def net() -> MlpNet:
    return MlpNet(TINY, 5, "cpu", torch.bfloat16, 3)


def values(net: MlpNet, config: Config) -> list[Any]:
    """What each layer of a configuration is given, and the result."""
    found: list[Any] = [net.x]
    with torch.inference_mode():
        for joint in joints(config):
            found.append(net.layer(joint)(found[-1]))
    return found


def integer_chain(net: MlpNet, config: Config) -> torch.Tensor:
    """A configuration without float layers in plain whole numbers, written down a second time."""
    scales = [1.0] + [{"int8": 0.25, "int4": 2.0}[name] for name in config[1:]]
    limits = [{"int8": 127, "int4": 7}[name] for name in config]
    codes = net.x.double()
    for i, weights in enumerate(net.weights):
        real = (codes @ weights.double().T) * scales[i] * 2.0 ** -net.exponents[i]
        if i + 1 == len(config):
            return real.to(net.float_type)
        codes = (real / scales[i + 1]).round().clamp(-limits[i + 1], limits[i + 1])
    raise AssertionError


def test_every_configuration_passes_its_check(net: MlpNet) -> None:
    done: list[Config] = []
    checked = check_net(net, all_configs(3), done.append)
    assert sorted(done) == sorted(all_configs(3))
    assert checked == 9 + 27 + 27 + 21  # nodes of the tree, and the products on ready inputs
    for dtype in (torch.float16, torch.bfloat16):
        check_net(MlpNet(scaled(SIZES, 256), 3, "cpu", dtype, 1), random.Random(0).sample(all_configs(), 40))


def test_integer_configurations_equal_a_chain_of_whole_numbers(net: MlpNet) -> None:
    for config in all_configs(3):
        if "float" not in config:
            assert torch.equal(values(net, config)[-1], integer_chain(net, config)), config


def test_all_formats_agree_on_inputs_that_all_of_them_hold(net: MlpNet) -> None:
    first = [net.layer(Joint(0, name, "float", True))(net.x) for name in BITS]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])
    for whole in (net.x, *net.weights):  # the original drew 8 too, which is no int4 code
        assert (int(whole.min()), int(whole.max())) == (-7, 7)


def test_every_layer_runs_its_own_format_not_the_first_ones(net: MlpNet) -> None:
    for config in all_configs(3):
        for joint, name in zip(joints(config), config, strict=True):
            scheme = net.layer(joint).scheme
            assert (scheme.is_float, scheme.weights.bits) == (name == "float", BITS[name])


def test_results_are_not_zero(net: MlpNet) -> None:
    for config in all_configs(3):
        last = values(net, config)[-1]
        assert bool((last != 0).any(dim=1).all()), config


def test_what_passes_between_layers_is_codes_of_the_next_format_or_floats(net: MlpNet) -> None:
    for config in all_configs(3):
        for before, value, name in zip(config, values(net, config)[1:-1], config[1:]):
            if "float" in (before, name):
                assert value.dtype == net.float_type
                continue
            assert isinstance(value, QTensor)
            assert value.data.dtype == torch.int8  # not the int32 of the accumulator
            assert int(value.data.abs().max()) <= {"int8": 127, "int4": 7}[name]


def test_int4_weights_are_packed() -> None:
    net = MlpNet((512, 256, 256), 2, "cpu", torch.bfloat16, 0)
    held = {name: net.layer(Joint(0, name, "float", True)).state_dict() for name in ("int8", "int4")}
    assert held["int8"]["weight"].nbytes == 512 * 256
    assert held["int4"]["weight_packed"].nbytes == 512 * 256 // 2


def test_conversions_are_part_of_the_whole_and_not_of_the_products(
    net: MlpNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ("int8", "float", "int4")
    products = [net.product(joint) for joint in joints(config)]
    given = [product.args[0].dtype for product in products]  # type: ignore[attr-defined]
    assert given == [torch.int8, torch.bfloat16, torch.int8]
    seen: list[str] = []

    def spy(joint: Joint) -> Callable[[Any], Any]:
        real = MlpNet.layer(net, joint)

        def call(x: Any) -> Any:
            seen.append("codes" if isinstance(x, QTensor) else "floats")
            return real(x)

        return call

    monkeypatch.setattr(net, "layer", spy)
    net.forward(config)()
    assert seen == ["floats", "floats", "floats"]
    seen.clear()
    net.forward(("int8", "int4", "int8"))()
    assert seen == ["floats", "codes", "codes"]


def test_linked_layers_share_the_memory_of_their_scales(net: MlpNet) -> None:
    for config in all_configs(3):
        for value, joint in zip(values(net, config)[1:-1], joints(config)[1:]):
            if isinstance(value, QTensor):  # else every call would read numbers, on a GPU by waiting for it
                assert value.scale.data_ptr() == net.layer(joint).input_scale.data_ptr()


@pytest.mark.parametrize("wrong", ["first format", "zeros", "int32", "one code", "swapped layers", "ready", "unlinked"])
def test_planted_defects_are_caught(net: MlpNet, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = net.layer

    def layer(joint: Joint) -> Any:
        real = right(joint)

        def call(x: Any) -> Any:
            y = real(x)
            codes = isinstance(y, QTensor)
            if wrong == "zeros":
                return QTensor(torch.zeros_like(y.data), y.scale) if codes else torch.zeros_like(y)
            if wrong == "int32" and codes:
                return y.data.to(torch.int32)
            if wrong == "one code" and codes and joint == Joint(1, "int4", "int8", False):
                data = y.data.clone()
                data[0, -1] += 1
                return QTensor(data, y.scale)
            return y

        for name in ("input_scale", "output_scale", "storage", "scheme", "activation", "clamp", "_spec"):
            setattr(call, name, getattr(real, name))
        return call

    monkeypatch.setattr(net, "layer", layer)
    if wrong == "ready":
        product = net.product
        last = Joint(2, "int8", "float", False)
        monkeypatch.setattr(net, "product", lambda j: (lambda: product(j)() * 2) if j == last else product(j))
    if wrong == "first format":
        monkeypatch.setattr(net, "forward", lambda config: MlpNet.forward(net, (config[0],) * 3))
    if wrong == "swapped layers":
        monkeypatch.setattr(net, "forward", lambda config: MlpNet.forward(net, (config[0], config[2], config[1])))
    if wrong == "unlinked":
        monkeypatch.setattr(net, "forward", lambda config: lambda: MlpNet.forward(net, config)().roll(1))
    with pytest.raises(PyquantError):
        check_net(net, all_configs(3))


def test_activations_keep_their_size() -> None:
    net = MlpNet(scaled(SIZES, 64), 16, "cpu", torch.bfloat16, 0)
    for i in range(6):
        spread = float(net.ready[i, "float"].float().std())
        assert 1.5 < spread < 5.5, i
    assert len(exponents(SIZES)) == 6


def test_single_layers_cover_every_configuration() -> None:
    ready, whole = all_joints(3, from_float=False), all_joints(3, from_float=True)
    assert len(ready) == len(set(ready)) == 9 + 9 + 3
    assert len(whole) == len(set(whole))
    assert {joint for config in all_configs(3) for joint in joints(config)} == set(whole)


@pytest.mark.parametrize("of", ["output", "input"])
def test_capacities_of_the_original_sizes(of: str) -> None:
    configs = all_configs()
    found = [capacity(SIZES, config, of) for config in configs]
    assert (len(found), len(set(configs)), len(set(found)), min(found), max(found)) == (729, 729, 184, 258048, 1032192)


def test_input_and_output_capacities_are_the_same_numbers_in_another_order() -> None:
    outputs, inputs = ([capacity(SIZES, c, of) for c in all_configs()] for of in ("output", "input"))
    assert sorted(outputs) == sorted(inputs)
    assert outputs != inputs
    with pytest.raises(ArgumentError, match=r"both.*output, input"):
        capacity(SIZES, all_configs()[0], "both")


def test_scaling_keeps_the_number_of_distinct_capacities() -> None:
    sizes = scaled(SIZES, 32)
    assert len({capacity(sizes, c) for c in all_configs()}) == 184
    assert {32 * capacity(sizes, c) for c in all_configs()} == {capacity(SIZES, c) for c in all_configs()}


def test_both_spellings_of_formats() -> None:
    assert parse_config("float, s8,s4,int8,int4,f16", 6) == ("float", "int8", "int4", "int8", "int4", "float")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (",".join(["float"] * 7), "7 formats.*each of the 6"),  # the original's default listed one too many
        ("float", "1 formats"),
        ("float,float,float,float,float,fp8", "fp8"),
        ("", "''"),
    ],
)
def test_wrong_configurations_are_named(text: str, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        parse_config(text, 6)


@pytest.mark.parametrize("text", ["", "5", "4,x", "4,0", "4,-1", "4,2.5"])
def test_wrong_sizes_are_named(text: str) -> None:
    with pytest.raises(ArgumentError, match="nn-size"):
        parse_sizes(text)


def test_a_divisor_must_divide() -> None:
    for divisor in (0, -1, 3, 2048):
        with pytest.raises(ArgumentError, match="scale"):
            scaled(SIZES, divisor)
