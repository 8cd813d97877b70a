"""compressed-tensors files of others: the weights that the owner's library gives, to the bit, or a refusal."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import accept
import foreign
import pytest
import torch
from torch import nn

import pyquant
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.compressed_tensors import pack_to_int32
from pyquant.nn.qlinear import QLinear
from pyquant.nn.reordered import Reordered

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed (pip install compressed-tensors==0.20.0)",
)
DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


def weights(bits: int, strategy: str, symmetric: bool = True, group_size: int | None = None) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": False,
    }


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "W8A8 static": ("int-quantized", weights(8, "channel"), STATIC),
    "W8A8 static affine": ("int-quantized", weights(8, "channel"), {**STATIC, "symmetric": False}),
    "W8A8 dynamic": ("int-quantized", weights(8, "channel"), DYNAMIC),
    "W8A8 dynamic affine": ("int-quantized", weights(8, "channel"), {**DYNAMIC, "symmetric": False}),
    "W8A8 naive, tensor": ("naive-quantized", weights(8, "tensor"), DYNAMIC),
    "W4A8 in bytes": ("int-quantized", weights(4, "group", group_size=16), DYNAMIC),
    "W4A8": ("pack-quantized", weights(4, "channel"), DYNAMIC),
    "W4A16": ("pack-quantized", weights(4, "group", group_size=16), None),
    "W4A16 affine": ("pack-quantized", weights(4, "group", False, 16), None),
    "W4A16 channel affine": ("pack-quantized", weights(4, "channel", False), None),
    "W8A16": ("pack-quantized", weights(8, "group", group_size=8), None),
    "W8A16 affine": ("pack-quantized", weights(8, "group", False, 8), None),
    "W8A16 affine in bytes": ("int-quantized", weights(8, "channel", False), None),
}


def numbers(words: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Codes, scale and zero point of a layer, as the strategy says."""
    g = torch.Generator().manual_seed(seed)
    n, k = shape
    columns = {"tensor": 0, "channel": 1}.get(words["strategy"], k // (words["group_size"] or 1))
    scale = (torch.rand((n, columns) if columns else (1,), generator=g) / 50 + 2.0**-10).to(dtype)
    found = {"codes": foreign.codes(words["num_bits"], shape, g), "scale": scale}
    if not words["symmetric"]:
        found["zero_point"] = foreign.codes(words["num_bits"], tuple(scale.shape), g)
    return found


def stored(words: dict[str, Any], inputs: dict[str, Any] | None, form: str, given: dict[str, torch.Tensor]) -> Any:
    """The tensors of a layer, without the library."""
    bits, found = words["num_bits"], {"weight_scale": given["scale"]}
    if form == "pack-quantized":
        found["weight_packed"] = pack_to_int32(given["codes"], bits)
        found["weight_shape"] = torch.tensor(given["codes"].shape)
    else:
        found["weight"] = given["codes"]
    if "zero_point" in given:
        packs = form == "pack-quantized" and words["strategy"] != "tensor"
        zero = given["zero_point"]
        found["weight_zero_point"] = pack_to_int32(zero.T.contiguous(), bits).T if packs else zero
    if inputs is not None and not inputs["dynamic"]:
        found["input_scale"] = torch.tensor([0.03]).to(given["scale"].dtype)
        found["input_zero_point"] = torch.tensor([0 if inputs["symmetric"] else -7], dtype=torch.int8)
    return found


def folder_of(case: str, tmp_path: Path, dtype: torch.dtype = torch.bfloat16, **others: Any) -> tuple[Path, Any, Any]:
    form, words, inputs = CASES[case]
    given = {name: numbers(words, shape, dtype, i) for i, (name, shape) in enumerate(foreign.LAYERS.items())}
    tensors = foreign.floats(dtype)
    local = {name: stored(words, inputs, form, one) for name, one in given.items()}
    for name, one in local.items():
        tensors |= foreign.of_layer(name, one)
    return foreign.write(tmp_path / "m", foreign.group_config(form, words, inputs, **others), tensors), given, local


def by_formula(given: dict[str, torch.Tensor]) -> torch.Tensor:
    codes, scale = given["codes"].double(), given["scale"].double()
    zero = given.get("zero_point")
    if scale.dim() == 1:
        return ((codes - (0 if zero is None else zero.double())) * scale).float()
    k = codes.shape[1]
    return ((codes - (0 if zero is None else foreign.spread(zero.double(), k))) * foreign.spread(scale, k)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_formula(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder, given, _ = folder_of(case, tmp_path, dtype)
    model = pyquant.load_quantized_(foreign.Net(), folder)
    for name, one in given.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, QLinear)
        accept.t1(layer.to_float(torch.float32).weight.detach(), by_formula(one))
    accept.t1(model.norm.weight.detach(), foreign.floats(dtype)["norm.weight"].float(), waiver="a new norm is constant")
    accept.t1(model.head.weight.detach(), foreign.floats(dtype)["head.weight"].float())
    accept.t1(model.body["fc1"].bias.detach(), foreign.floats(dtype)["body.fc1.bias"].float())
    assert model(torch.randn(3, 64)).isfinite().all()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_the_owners_library_decompresses(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder, _, local = folder_of(case, tmp_path, dtype)
    form, words, inputs = CASES[case]
    (scheme,) = QuantizationConfig.model_validate(foreign.group_config(form, words, inputs)).config_groups.values()
    model = pyquant.load_quantized_(foreign.Net().to(dtype), folder)
    for name, one in local.items():
        theirs = BaseCompressor.get_value_from_registry(form).decompress(one, scheme)["weight"]
        ours = model.get_submodule(name).to_float()
        assert ours.weight.dtype == theirs.dtype == dtype
        accept.t1(ours.weight.detach(), theirs)


@needs_library
@pytest.mark.parametrize("case", ["W8A8 dynamic", "W4A16", "W4A16 affine", "W8A8 naive, tensor"])
def test_files_whose_codes_the_owners_library_found(case: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    form, words, inputs = CASES[case]
    (scheme,) = QuantizationConfig.model_validate(foreign.group_config(form, words, inputs)).config_groups.values()
    compressor, tensors, net = BaseCompressor.get_value_from_registry(form), foreign.floats(), foreign.Net()
    want = {}
    for i, (name, shape) in enumerate(foreign.LAYERS.items()):
        given = numbers(words, shape, torch.float32, i)
        local = {"weight": net.get_submodule(name).weight.detach(), "weight_scale": given["scale"]}
        if "zero_point" in given:
            local["weight_zero_point"] = given["zero_point"]
        local = compressor.compress(local, scheme)
        want[name] = compressor.decompress(local, scheme)["weight"]
        tensors |= foreign.of_layer(name, local)
    folder = foreign.write(tmp_path / "m", foreign.group_config(form, words, inputs), tensors, shards=3)
    model = pyquant.load_quantized_(foreign.Net(), folder)
    for name, theirs in want.items():
        accept.t1(model.get_submodule(name).to_float().weight.detach(), theirs)


def test_schemes_are_what_the_config_says(tmp_path: Path) -> None:
    told = {}
    for case in CASES:
        folder, _, _ = folder_of(case, tmp_path)
        told[case] = str(pyquant.load_quantized_(foreign.Net(), folder).body["fc1"].scheme)
    accept.t0(told["W8A8 static affine"], "W8A8(symmetric_inputs=False), weights full range fixed, inputs fixed")
    accept.t0(told["W8A8 static"], "W8A8, weights full range fixed, inputs full range fixed")
    accept.t0(told["W4A8"], "W4A8Dynamic(group_size=None), weights full range fixed")
    accept.t0(told["W4A16"], "W4A16(group_size=16), weights full range fixed")
    accept.t0(told["W4A16 affine"], "W4A16(group_size=16, symmetric=False), weights fixed")
    accept.t0(told["W8A8 naive, tensor"], "W8A8Dynamic, weights per_tensor full range fixed")


def test_a_static_range_comes_from_the_file(tmp_path: Path) -> None:
    folder, _, local = folder_of("W8A8 static affine", tmp_path)
    layer = pyquant.load_quantized_(foreign.Net(), folder).body["fc1"]
    accept.t1(layer.input_scale, local["body.fc1"]["input_scale"].float())
    accept.t0(layer.input_zero_point.tolist(), [-7])


def test_activations_are_the_callers_choice(tmp_path: Path) -> None:
    folder, given, _ = folder_of("W4A16", tmp_path)
    codes = pyquant.load_quantized_(foreign.Net(), folder, activations="int8").body["fc1"]
    accept.t0(str(codes.scheme.inputs), "int8 per_token dynamic")
    accept.t1(codes.to_float().weight.detach(), by_formula(given["body.fc1"]))
    folder, given, _ = folder_of("W8A8 static", tmp_path)
    real = pyquant.load_quantized_(foreign.Net(), folder, activations="float").body["fc1"]
    assert real.scheme.is_weight_only
    accept.t1(real.to_float().weight.detach(), by_formula(given["body.fc1"]))
    with pytest.raises(ArgumentError, match="activations"):
        pyquant.load_quantized_(foreign.Net(), folder, activations="int4")


def test_affine_weights_are_not_multiplied_with_codes(tmp_path: Path) -> None:
    folder, _, _ = folder_of("W4A16 affine", tmp_path)
    with pytest.raises(CheckpointError, match=r"layer 'body.fc1'.*zero points.*activations='float'"):
        pyquant.load_quantized_(foreign.Net(), folder, activations="int8")


@pytest.mark.parametrize("case", ["W4A16", "W4A16 affine", "W4A8 in bytes"])
def test_actorder(case: str, tmp_path: Path) -> None:
    """Groups that are no neighbours: the layer takes its inputs in the order of the groups."""
    form, words, inputs = CASES[case]
    g = torch.Generator().manual_seed(8)
    tensors, want = foreign.floats(), {}
    for i, (name, (n, k)) in enumerate(foreign.LAYERS.items()):
        given = numbers(words, (n, k), torch.float32, i)
        local = stored(words, inputs, form, given)
        group_of = (torch.randperm(k, generator=g) // 16).to(torch.int32)
        local["weight_g_idx"] = group_of
        zero = given.get("zero_point", torch.zeros(n, k // 16)).double()[:, group_of.long()]
        want[name] = ((given["codes"].double() - zero) * given["scale"].double()[:, group_of.long()]).float()
        tensors |= foreign.of_layer(name, local)
    folder = foreign.write(tmp_path / "m", foreign.group_config(form, {**words, "actorder": "group"}, inputs), tensors)
    model = pyquant.load_quantized_(foreign.Net(), folder, activations="float")
    x = torch.randn(5, 64, generator=g)
    for name, real in want.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, Reordered)
        accept.t1(layer.weight, real)
    float_twin = foreign.Net()
    float_twin.load_state_dict(tensors_of(float_twin, tensors, want))
    torch.testing.assert_close(model(x), float_twin(x), rtol=1e-4, atol=1e-4)


def tensors_of(net: nn.Module, tensors: Any, want: Any) -> dict[str, torch.Tensor]:
    return {key: want.get(key.removesuffix(".weight"), tensors.get(key)) for key in net.state_dict()}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rotations": ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config.*rotations"),
    "a quantised cache": ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme.*drop_kv_cache_scheme=True"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "fake-quantised": ({"quantization_status": "frozen"}, "quantization_status.*'frozen'"),
    "another format": ({"format": "float-quantized"}, "format.*'float-quantized'"),
    "no groups": ({"config_groups": {}}, "config_groups"),
    "a preset": ({"config_groups": {"W4A16": ["Linear"]}}, "an object, not the name of a preset"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    changes, told = REFUSED[name]
    folder, _, _ = folder_of("W4A16", tmp_path, **changes)
    net = foreign.Net()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(CheckpointError, match=told):
        pyquant.load_quantized_(net, folder)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_a_quantised_cache_may_be_dropped(tmp_path: Path) -> None:
    form, words, inputs = CASES["W4A16"]
    folder, given, local = folder_of("W4A16", tmp_path)
    tensors = foreign.floats() | {"body.k_scale": torch.ones(1), "body.v_scale": torch.ones(1)}
    for name, one in local.items():
        tensors |= foreign.of_layer(name, one)
    foreign.write(folder, foreign.group_config(form, words, inputs, kv_cache_scheme={"num_bits": 8}), tensors)
    model = pyquant.load_quantized_(foreign.Net(), folder, drop_kv_cache_scheme=True)
    accept.t1(model.body["fc1"].to_float().weight.detach(), by_formula(given["body.fc1"]))


GROUPS: dict[str, tuple[str, dict[str, Any], str]] = {
    "block scales": ("weights", {"strategy": "block"}, "strategy.*'block'"),
    "float codes": ("weights", {"type": "float"}, "codes of type 'int'"),
    "three bits": ("weights", {"num_bits": 3}, "packed codes of 3 bits; allowed: 4 or 8"),
    "another group size": ("weights", {"group_size": 32}, "4 scales a row; allowed: 2"),
    "hidden zero points": ("input_activations", {**STATIC, "strategy": "token"}, "activations='float'"),
    "groups of activations": ("input_activations", {**DYNAMIC, "strategy": "group"}, "activations='float'"),
    "five bits": ("input_activations", {**DYNAMIC, "num_bits": 5}, "inputs.bits"),
    "fused outputs": ("output_activations", dict(STATIC), "output_activations"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_without_a_counterpart(name: str, tmp_path: Path) -> None:
    key, changes, told = GROUPS[name]
    folder, _, local = folder_of("W4A16", tmp_path)
    config = foreign.group_config(*CASES["W4A16"])
    group = config["config_groups"]["group_0"]
    group[key] = {**(group[key] or {}), **changes}
    tensors = foreign.floats()
    for layer, one in local.items():
        tensors |= foreign.of_layer(layer, one)
    foreign.write(folder, config, tensors)
    with pytest.raises(CheckpointError, match=told):
        pyquant.load_quantized_(foreign.Net(), folder)


def test_a_layer_finds_its_group_by_name_then_pattern_then_class(tmp_path: Path) -> None:
    folder, _, local = folder_of("W4A16", tmp_path)
    config = foreign.group_config(*CASES["W4A16"])
    group = config["config_groups"]["group_0"]
    wrong = {**group, "weights": weights(8, "channel")}
    tensors = foreign.floats()
    for layer, one in local.items():
        tensors |= foreign.of_layer(layer, one)
    for groups in (
        {"a": wrong, "b": {**group, "targets": ["re:body.*fc1", "body.fc2"]}},
        {"a": {**wrong, "targets": ["re:bod"]}, "b": {**group, "targets": ["body.fc1", "body.fc2"]}},
    ):
        foreign.write(folder, {**config, "config_groups": groups}, tensors)
        accept.t0(pyquant.load_quantized_(foreign.Net(), folder).body["fc2"].scheme.weights.bits, 4)
    foreign.write(folder, {**config, "config_groups": {"a": group, "b": group}}, tensors)
    with pytest.raises(CheckpointError, match="2 groups that name classes alone"):
        pyquant.load_quantized_(foreign.Net(), folder)


def test_the_model_must_fit(tmp_path: Path) -> None:
    folder, _, _ = folder_of("W4A16", tmp_path)
    net = foreign.Net()
    net.body["fc1"] = nn.Linear(32, 48)
    with pytest.raises(CheckpointError, match=r"layer 'body.fc1': saved \[48, 64\], the model has \[48, 32\]"):
        pyquant.load_quantized_(net, folder)
    assert isinstance(net.body["fc2"], nn.Linear)
    with pytest.raises(CheckpointError, match=r"layer 'body.fc1' is in the file; the model has no module"):
        pyquant.load_quantized_(nn.Sequential(), folder)
    with pytest.raises(ArgumentError, match="model"):
        pyquant.load_quantized_(None, folder)  # type: ignore[arg-type]


def test_names_of_the_file_may_be_others(tmp_path: Path) -> None:
    folder, given, _ = folder_of("W4A16", tmp_path)
    model = nn.ModuleDict({"inner": foreign.Net()})
    pyquant.load_quantized_(model, folder, rename=lambda name: f"inner.{name}")
    accept.t1(model["inner"].body["fc1"].to_float().weight.detach(), by_formula(given["body.fc1"]))


def test_a_model_on_the_meta_device_is_filled(tmp_path: Path) -> None:
    folder, given, _ = folder_of("W4A16", tmp_path)
    with torch.device("meta"):
        net = foreign.Net()
    pyquant.load_quantized_(net, folder)
    accept.t1(net.body["fc2"].to_float().weight.detach(), by_formula(given["body.fc2"]))
    assert not any(t.is_meta for t in net.parameters())
