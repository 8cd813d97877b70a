"""pyquant in real layers of vLLM, loaded by vLLM: equal to the bit to the QLinears that the file was made of."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path

import accept
import foreign
import pytest
import torch
from qlayers import calibration

import pyquant
from pyquant import W4A8, W4A16, W8A8, W8A16, W4A4Dynamic, W4A8Dynamic, W4A8TwoLevelDynamic, W8A8Dynamic
from pyquant.integrations import vllm as plugin
from pyquant.io.compressed_tensors import quantization_config

pytestmark = pytest.mark.nightly
pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make nightly-vllm")

vllm_layers = importlib.import_module("vllm_layers")
report = importlib.import_module("pyquant.integrations.vllm.report")
ReplicatedLinear, UnquantizedLinearMethod = vllm_layers.ReplicatedLinear, vllm_layers.UnquantizedLinearMethod
MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul")
KINDS, Saved, layer_of = vllm_layers.KINDS, vllm_layers.Saved, vllm_layers.layer_of

PER_TENSOR = dataclasses.replace(W8A8(), weights=pyquant.TensorScheme())
SCHEMES = [
    W8A8Dynamic(),
    W8A8Dynamic(symmetric_inputs=False),
    W8A8(),
    W8A8(symmetric_inputs=False),
    PER_TENSOR,
    W4A8Dynamic(32),
    W4A8Dynamic(None, symmetric_inputs=False),
    W4A8(16),
    W4A8TwoLevelDynamic(16),
    W4A4Dynamic(16),
    W8A16(),
    W8A16(32, symmetric=False),
    W4A16(32),
    W4A16(16, symmetric=False),
    W4A16(None, symmetric=False),
]


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(plugin.VARIABLE, "prefer")
        plugin.register()
    with vllm_layers.world():
        yield


def inputs(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(6, vllm_layers.K, generator=torch.Generator().manual_seed(3)) * 3
    x[2] *= 100  # beyond every static range, so that the lowest code is met
    return x.to(dtype)


def profile() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def runs_by_pyquant(layer: torch.nn.Module, scheme: pyquant.QScheme, ran: torch.profiler.profile) -> None:
    """The ops that ran are pyquant's products, as many as the report says, and none of anybody else's."""
    record = report.record_of("layer", layer)
    assert (record.runs, record.reason) == ("integers" if scheme.is_integer else "weight-only", "")
    counts = {event.key: event.count for event in ran.key_averages()}
    ops = ("pyquant::qlinear", "pyquant::_weight_only")
    assert counts.pop(ops[not scheme.is_integer]) == record.products == len(layer.pyquant.parts)
    others = [name for name in counts if name.startswith(("_C::", "vllm::", "pyquant::")) or name in MATRIX_PRODUCTS]
    # a layer of an earlier test may be collected meanwhile, and gives its memory back
    assert [name for name in others if not name.startswith("_C::release_")] == []


@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W4A16(32)], ids=str)
def test_the_report_and_the_count_see_a_layer_in_floating_point(scheme: pyquant.QScheme, tmp_path: Path) -> None:
    layer = layer_of(Saved("merged", scheme, tmp_path), "pyquant")
    layer.weight = torch.nn.Parameter(torch.cat([part.dequantised_weight() for part in layer.pyquant.parts]))
    layer.quant_method = UnquantizedLinearMethod()
    layer.quant_method.process_weights_after_loading(layer)
    with profile() as ran:
        layer(inputs(torch.float32))
    record = report.record_of("layer", layer)
    assert (record.runs, record.products) == ("floating point", 0)
    assert record.reason.startswith("it is quantised in the checkpoint, and another method")
    with pytest.raises(AssertionError):
        runs_by_pyquant(layer, scheme, ran)


def test_the_report_names_who_runs_a_layer_and_why_not_pyquant(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.ours = layer_of(Saved("merged", W8A8Dynamic(), tmp_path / "a"), "pyquant")
    model.off = ReplicatedLinear(8, 4, bias=False, prefix="off")
    model.positions = torch.nn.Embedding(4, 8)
    config = Saved("column", W8A8Dynamic(), tmp_path / "b").quantization("pyquant")
    model.ignored = ReplicatedLinear(8, 4, bias=False, prefix="ignored", quant_config=config)
    found = {layer.name: layer for layer in plugin.serving_report(model)}
    assert list(found) == ["ours", "off", "positions", "ignored"]
    assert (found["ours"].runs, found["ours"].products, found["ours"].reason) == ("integers", 1, "")
    assert {found[name].runs for name in ("off", "positions", "ignored")} == {"floating point"}
    assert found["off"].reason == "vLLM's model builds it without a quantisation"
    assert found["positions"].reason == "vLLM has no quantised form of it"
    assert found["ignored"].reason == "the checkpoint leaves it so"
    text = report.summary(found.values())
    assert text.startswith("4 layers, of which run 1 in integers, 3 in floating point; not by pyquant: 'off' (")

    class Worker(plugin.WorkerExtension):
        def get_model(self) -> torch.nn.Module:
            return model

    assert Worker().pyquant_report() == [dataclasses.asdict(layer) for layer in found.values()]


def test_a_checkpoint_without_quantised_layers_is_refused_in_words() -> None:
    with pytest.raises(
        pyquant.CheckpointError, match=r"without quantization_config.*without quantization= vLLM serves"
    ):
        plugin.PyquantConfig()  # what vLLM calls for a model in floating point


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_method_pyquant_gives_the_bits_of_the_saved_layers(
    scheme: pyquant.QScheme, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    saved = Saved(kind, scheme, tmp_path, dtype=dtype, spread=True)
    layer = layer_of(saved, "pyquant", dtype)
    x = inputs(dtype)
    with profile() as ran:
        y, bias = layer(x)
    assert bias is None
    runs_by_pyquant(layer, scheme, ran)
    accept.t1(y, saved.side_by_side(x))
    assert all(p is None or n == "bias" for n, p in layer._parameters.items()), "parameters beside the packed weights"


# What vLLM's own reader takes, with the ranges that it takes them for.
WIDE = dataclasses.replace(W8A8(), inputs=dataclasses.replace(W8A8().inputs, narrow_range=False))
INT8 = [W8A8Dynamic(), W8A8Dynamic(symmetric_inputs=False), WIDE, W8A8(symmetric_inputs=False), PER_TENSOR]
MIXED = [
    W4A8Dynamic(32),
    W4A8Dynamic(None),
    W4A16(32),
    W4A16(16, symmetric=False),
    W4A16(None),
    W8A16(32),
    W4A4Dynamic(16),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", INT8 + MIXED, ids=str)
def test_kernels_in_first_place_give_those_bits_to_vllms_own_reader(
    scheme: pyquant.QScheme, kind: str, tmp_path: Path
) -> None:
    scheme = scheme if scheme is not PER_TENSOR else dataclasses.replace(WIDE, weights=PER_TENSOR.weights)
    saved = Saved(kind, scheme, tmp_path)
    layer = layer_of(saved, "compressed-tensors")
    assert type(layer.scheme.kernel).__name__.startswith("Pyquant")
    x = inputs(torch.float32)
    with profile() as ran:
        y = layer(x)[0]
    accept.t1(y, saved.side_by_side(x))
    runs_by_pyquant(layer, scheme, ran)


@pytest.mark.parametrize("scheme", [W4A8Dynamic(32), W4A16(32)], ids=str)
def test_vllms_own_reader_rounds_group_scales_and_the_method_pyquant_does_not(
    scheme: pyquant.QScheme, tmp_path: Path
) -> None:
    saved = Saved("merged", scheme, tmp_path, dtype=torch.bfloat16)
    x = inputs(torch.bfloat16)
    y = layer_of(saved, "compressed-tensors", torch.bfloat16)(x)[0]
    rounded = torch.cat([with_scale_of(torch.bfloat16, layer)(x) for layer in saved.layers.values()], -1)
    accept.t1(y, rounded)
    assert not torch.equal(y, saved.side_by_side(x))
    accept.t1(layer_of(saved, "pyquant", torch.bfloat16)(x)[0], saved.side_by_side(x))


def test_vllms_own_reader_keeps_one_input_scale_for_joined_matrices_the_last_it_loaded(tmp_path: Path) -> None:
    saved = Saved("qkv", WIDE, tmp_path, spread=True)
    x, layers = inputs(torch.float32), list(saved.layers.values())
    for layer in layers:
        layer.input_scale = layers[-1].input_scale
    accept.t1(layer_of(saved, "compressed-tensors")(x)[0], saved.side_by_side(x))


def with_scale_of(dtype: torch.dtype, layer: pyquant.QLinear) -> pyquant.QLinear:
    return pyquant.QLinear.from_codes(
        layer.codes, layer.weight_scale.to(dtype).float(), scheme=layer.scheme, bias=layer.bias_, dtype=layer.dtype
    )


def test_a_bias_that_vllm_hands_out_is_not_added(tmp_path: Path) -> None:
    saved = Saved("column", W8A8Dynamic(), tmp_path)
    x, layer = inputs(torch.float32), layer_of(saved, "pyquant", skip_bias_add=True)
    y, bias = layer(x)
    own = saved.layers["fc1"]
    accept.t1(bias, own.bias)
    alone = vllm_layers.part(own, slice(None), slice(None), bias=False)
    accept.t1(y, alone(x))
    accept.t1(layer.quant_method.apply(layer, x, bias), alone(x) + bias)


def test_a_packed_bias_cannot_be_left_out_in_silence(tmp_path: Path) -> None:
    layer = layer_of(Saved("column", W8A8Dynamic(), tmp_path), "pyquant")
    with pytest.raises(pyquant.ArgumentError, match="'bias': got None"):
        layer.quant_method.apply(layer, inputs(torch.float32), None)


@pytest.mark.parametrize("method", ["pyquant", "compressed-tensors"])
@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W4A16(32)], ids=str)
def test_weights_are_loaded_once(scheme: pyquant.QScheme, method: str, tmp_path: Path) -> None:
    layer = layer_of(Saved("row", scheme, tmp_path), method)
    with pytest.raises(pyquant.CheckpointError, match=r"down_proj.*were packed.*start a new engine"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("missing", ["k_proj.weight_scale", "k_proj.input_scale", "v_proj.input_zero_point"])
def test_a_tensor_that_no_file_had_is_an_error(missing: str, tmp_path: Path) -> None:
    saved = Saved("qkv", W8A8(symmetric_inputs=False), tmp_path)
    del saved.tensors[missing]
    with pytest.raises(pyquant.CheckpointError, match=rf"qkv_proj.*{missing.partition('.')[2]}"):
        layer_of(saved, "pyquant")


def test_numbers_of_matrices_that_a_file_joins_itself_hold_for_all_of_them(tmp_path: Path) -> None:
    """A file may have one gate_up_proj: vLLM gives its single numbers to the first matrix, and rows to all."""
    scheme = dataclasses.replace(W8A8(symmetric_inputs=False), weights=pyquant.TensorScheme())
    torch.manual_seed(1)
    joined = pyquant.QLinear.from_float(torch.nn.Linear(vllm_layers.K, 192), scheme, **calibration(scheme))
    model = torch.nn.Module()
    model.add_module("gate_up_proj", joined)
    pyquant.save_pretrained(model, tmp_path / "joined")
    saved = Saved("merged", scheme, tmp_path / "apart")
    saved.folder = tmp_path / "joined"
    saved.config["config_groups"]["group_0"]["targets"] = ["gate_up_proj"]
    saved.tensors = {f"gate_up_proj.{name}": t for name, t in file_tensors(saved.folder, "gate_up_proj").items()}
    saved.shards = {"gate_up_proj": (None, 192)}
    layer = layer_of_joined(saved)
    x = inputs(torch.float32)
    accept.t1(layer(x)[0], joined(x))


def file_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors = {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}
    return {k.removeprefix(f"{name}."): t for k, t in tensors.items()}


def layer_of_joined(saved: Saved) -> torch.nn.Module:
    rows = {"gate_up_proj": (None, 96), "twice": (None, 96)}  # two matrices of 96 rows in vLLM, one in the file
    whole, saved.shards = saved.shards, rows
    try:
        return layer_of(saved, "pyquant")
    finally:
        saved.shards = whole


INT8_BY = {"num_bits": 8, "type": "int"}
REFUSED = {
    "outputs": ({"output_activations": INT8_BY | {"strategy": "tensor", "dynamic": False}}, "outputs"),
    "inputs by group": (
        {"input_activations": INT8_BY | {"strategy": "group", "group_size": 32, "dynamic": True}},
        "strategy group",
    ),
    "3 bits": ({"weights": {"num_bits": 3, "type": "int", "strategy": "channel"}}, "3 bits; allowed: 4"),
    "affine weights": ({"weights": INT8_BY | {"strategy": "channel", "symmetric": False}}, "zero points"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_pyquant_has_no_product_for_is_refused_by_the_name_of_the_layer(words: str, tmp_path: Path) -> None:
    saved = Saved("merged", W8A8Dynamic(), tmp_path)
    change, told = REFUSED[words]
    saved.config["config_groups"]["group_0"] |= change
    with pytest.raises(pyquant.CheckpointError, match=rf"gate_up_proj'.*{told}"):
        layer_of(saved, "pyquant")


def test_joined_matrices_of_two_schemes_are_refused(tmp_path: Path) -> None:
    saved = Saved("merged", W8A8Dynamic(), tmp_path)
    groups = saved.config["config_groups"]
    groups["group_1"] = {**groups["group_0"], "targets": ["up_proj"]}
    groups["group_1"]["input_activations"] = {**groups["group_0"]["input_activations"], "symmetric": False}
    groups["group_0"]["targets"] = ["gate_proj"]
    with pytest.raises(pyquant.CheckpointError, match=r"gate_up_proj.*up_proj.*one scheme"):
        layer_of(saved, "pyquant")


def test_rotated_inputs_are_refused(tmp_path: Path) -> None:
    saved = Saved("merged", W8A8Dynamic(), tmp_path)
    saved.config["transform_config"] = {"config_groups": {"r": {"type": "hadamard", "apply": []}}}
    with pytest.raises(pyquant.CheckpointError, match="transform_config"):
        layer_of(saved, "pyquant")


@pytest.mark.parametrize("kind", ["merged", "row"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptq_and_awq_layers_by_vllms_own_readers(method: str, kind: str) -> None:
    """Words along the inputs, and along the outputs in an order of their own, which vLLM puts right before kernels."""
    name, shards = KINDS[kind]
    generator = torch.Generator().manual_seed(2)
    tensors, layers = {}, []
    for one, (_, rows) in shards.items():
        q, z, scales = foreign.unsigned(4, vllm_layers.K, rows, 2, generator)
        z = z if method == "awq" else torch.full_like(z, 8)
        scales = scales.to(torch.float16)
        made = foreign.awq_layer(q, z, scales) if method == "awq" else foreign.gptq_layer(q, z, scales, 4, 1)
        tensors |= {f"{one}.{key}": tensor for key, tensor in made.items() if key != "g_idx"}
        scheme = W4A16(32, symmetric=method == "gptq")
        wide = dataclasses.replace(scheme, weights=dataclasses.replace(scheme.weights, narrow_range=False))
        layers.append(
            pyquant.QLinear.from_codes(
                (q - 8).T.to(torch.int8).contiguous(),
                scales.T.float().contiguous(),
                scheme=wide,
                weight_zero_point=(z - 8).T.to(torch.int32).contiguous() if method == "awq" else None,
            )
        )
    words = {"quant_method": method, "bits": 4, "group_size": 32, "zero_point": True, "desc_act": False, "sym": True}
    config = vllm_layers.get_quantization_config(method).from_config(words | {"version": "gemm", "lm_head": False})
    made = {"bias": False, "quant_config": config, "prefix": name, "params_dtype": torch.float16}
    rows = [rows for _, rows in shards.values()]
    if kind == "merged":
        layer = vllm_layers.MergedColumnParallelLinear(vllm_layers.K, rows, **made)
    else:
        layer = vllm_layers.RowParallelLinear(vllm_layers.K, rows[0], **made)
    vllm_layers.fill(layer, tensors, {one: shard for one, (shard, _) in shards.items()})
    layer.quant_method.process_weights_after_loading(layer)
    x = inputs(torch.float16)
    accept.t1(layer(x)[0], torch.cat([one(x) for one in layers], -1))
    assert type(layer.quant_method.kernel).__name__ == "PyquantMixedLinearKernel"


def test_vllms_own_reader_refuses_what_is_for_pyquant_alone() -> None:
    config = quantization_config([], [], None, refusal="it sorts its inputs")
    with pytest.raises(ValueError, match="it sorts its inputs"):
        vllm_layers.get_quantization_config("compressed-tensors").from_config(config)
    with pytest.raises(pyquant.CheckpointError, match="it sorts its inputs"):
        vllm_layers.get_quantization_config("pyquant").from_config(config)
