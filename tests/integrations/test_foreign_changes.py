"""What torch's parametrisations and accelerate's hooks meet in quantised layers, and in those that will be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import architecture_table
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

import pyquant
from pyquant import ops
from pyquant.nn import foreign_changes

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
pytestmark = pytest.mark.filterwarnings("ignore::pyquant.QuantizationWarning", "ignore::FutureWarning")


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


TOOLS: dict[str, Callable[[Any], Any]] = {
    "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
    "of the bias": lambda layer: parametrize.register_parametrization(layer, "bias", Doubled()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": weight_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    "pruning of rows": lambda layer: prune.ln_structured(layer, "weight", amount=0.3, n=2, dim=0),
    "pruning of the bias": lambda layer: prune.l1_unstructured(layer, "bias", amount=0.3),
}


def net(scheme: str | None = "W8A8Dynamic", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 32)).eval()
    return model if scheme is None else pyquant.quantize_(model, scheme, check_speed=False)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_float_layer_with_a_computed_weight(tool: str) -> None:
    model = net(None)
    TOOLS[tool](model[0])
    y, float_layer = model[0](X), model[0]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    assert model[0] is float_layer  # left, and said
    assert isinstance(model[2], pyquant.QLinear)
    assert any("0 (" in str(one.message) for one in said)
    assert torch.equal(model[0](X), y)
    for convert in (pyquant.quantize_, pyquant.prepare_qat_):
        named = net(None)
        TOOLS[tool](named[0])
        with pytest.raises(pyquant.ArgumentError, match=r"layer '0' .*(computed weight|bias_orig)"):
            convert(named, {"0": "W8A8Dynamic"})
    made = pyquant.QLinear.from_float(float_layer, pyquant.W8A8Dynamic())  # of the weight that the layer multiplies by
    assert (made(X) - y).norm() < 0.02 * y.norm()


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A16(group_size=16)", "FP16"])
def test_a_quantised_layer_gets_no_computed_weight(tool: str, scheme: str) -> None:
    layer = net(scheme)[0]
    y, names = layer(X), [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
    with pytest.raises(pyquant.UnsupportedError, match=r"torch\.nn\.utils\.\w+ would compute .* before quantize_"):
        TOOLS[tool](layer)
    assert torch.equal(layer(X), y)
    assert [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())] == names
    assert not parametrize.is_parametrized(layer)
    assert not hasattr(layer, "parametrizations")


def test_convolutions_and_embeddings_as_well() -> None:
    conv = pyquant.QConv2d.from_float(nn.Conv2d(4, 8, 3), pyquant.W8A8Dynamic())
    for layer in (conv, pyquant.QEmbedding.from_float(nn.Embedding(8, 4))):
        for tool in ("parametrize", "weight_norm", "pruning"):
            with pytest.raises(pyquant.UnsupportedError, match="would compute"):
                TOOLS[tool](layer)


def test_a_float_layer_that_was_relieved_is_quantised() -> None:
    model = net(None)
    parametrizations.weight_norm(model[0])
    prune.l1_unstructured(model[2], "weight", amount=0.3)
    parametrize.remove_parametrizations(model[0], "weight")
    prune.remove(model[2], "weight")
    zeros = model[2].weight == 0
    pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    assert isinstance(model[0], pyquant.QLinear)
    assert bool(zeros.any())
    assert not model[2].codes[zeros].any()


# ---- accelerate


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A16(group_size=16)"])
def test_device_maps_of_accelerate(scheme: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    y = net(scheme)(X)
    split = {"0": "cpu", "1": "cpu", "2": "cpu"}
    assert torch.equal(accelerate.dispatch_model(net(scheme), {"": "cpu"})(X), y)
    assert torch.equal(accelerate.dispatch_model(net(scheme), split, main_device="cpu", force_hooks=True)(X), y)
    # float layers alone are offloaded
    mixed = accelerate.dispatch_model(net(scheme), split | {"1": "disk"}, "cpu", offload_dir=tmp_path / "c")
    assert mixed[1].weight.is_meta
    assert torch.equal(mixed(X), y)
    whole, hook = accelerate.cpu_offload_with_hook(net(scheme), torch.device("cpu"))
    assert torch.equal(whole(X), y)
    hook.offload()
    assert torch.equal(whole(X), y)
    prepared = accelerate.Accelerator(cpu=True).prepare(net(scheme))
    assert torch.equal(prepared(X), y)


def on_disk(model: nn.Module, folder: Path, *layers: str) -> Any:
    accelerate = pytest.importorskip("accelerate")
    places = dict.fromkeys(map(str, range(3)), "cpu") | dict.fromkeys(layers, "disk")
    return accelerate.dispatch_model(model, places, "cpu", offload_dir=folder)


OFFLOADS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "a layer on the disk": lambda _, model, folder: on_disk(model, folder, "2"),
    "all on the disk": lambda tool, model, folder: tool.disk_offload(
        model, folder, execution_device=torch.device("cpu")
    ),
    "memory": lambda tool, model, _: tool.cpu_offload(model, execution_device=torch.device("cpu")),
    "memory, buffers": lambda tool, model, _: tool.cpu_offload(
        model, execution_device=torch.device("cpu"), offload_buffers=True
    ),
}


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize(
    "scheme", ["W8A8Dynamic", "W4A16(group_size=16)", "W4A8TwoLevelDynamic(group_size=16)", "FP16"]
)
def test_codes_are_offloaded_as_a_whole(scheme: str, offload: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    y, state = net(scheme)(X), net(scheme).state_dict()
    model = OFFLOADS[offload](accelerate, net(scheme), tmp_path)
    for _ in range(2):
        assert torch.equal(model(X), y)
        assert model[2].storage.is_meta  # between calls it takes no memory
    assert all(tensor.is_meta for name, tensor in model.state_dict().items() if name.startswith("2."))
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    wanted = X.clone().requires_grad_()
    net(scheme)(wanted).sum().backward()
    assert torch.equal(x.grad, wanted.grad)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[2](model[1](model[0](X))), y)


def test_what_needs_the_codes_of_an_offloaded_layer_says_so(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = on_disk(net(), tmp_path / "a", "2")
    for change in (pyquant.dequantize_, lambda model: pyquant.save_pretrained(model, tmp_path / "b")):
        with pytest.raises(pyquant.UnsupportedError, match=r"layer '2' is offloaded .*remove_hook_from_submodules"):
            change(model)
    assert not (tmp_path / "b").exists() or not list((tmp_path / "b").iterdir())
    accelerate.hooks.remove_hook_from_submodules(model)
    pyquant.save_pretrained(model, tmp_path / "b")
    again = pyquant.load_pretrained(tmp_path / "b", lambda: net(None))
    assert torch.equal(again(X), net()(X))


@pytest.mark.parametrize("before", [None, "W8A8Dynamic", "W4A16(group_size=16)"])
def test_a_folder_with_other_numbers_is_not_taken_for_the_layers(before: str | None, tmp_path: Path) -> None:
    """accelerate writes nothing where an index is: the model would compute with what lies there."""
    on_disk(net(before, seed=1), tmp_path, "2")
    with pytest.raises(pyquant.UnsupportedError, match=r"'weight' .*other numbers are .*empty offload_dir"):
        on_disk(net(), tmp_path, "2")


def test_layers_that_share_their_codes_are_not_offloaded() -> None:
    accelerate = pytest.importorskip("accelerate")
    feed = nn.ModuleDict({"gate_proj": nn.Linear(32, 16), "up_proj": nn.Linear(32, 16)})
    model = pyquant.merge_(pyquant.quantize_(nn.Sequential(feed), "W8A8Dynamic", check_speed=False))
    with pytest.raises(pyquant.UnsupportedError, match="merge_ joined"):
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def test_a_mixture_is_offloaded(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    model, inputs = architecture_table.QUICK["Mixtral"]()
    pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    with torch.no_grad():
        y = model(**inputs).last_hidden_state
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        assert torch.equal(model(**inputs).last_hidden_state, y)
    layers = [one for one in model.modules() if isinstance(one, pyquant.QLinear)]
    assert len(layers) == 2 * (4 + 2 * 4)
    assert all(one.storage.is_meta for one in layers)


def test_a_checkpoint_of_floats_is_not_loaded_into_codes(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True).save_model(net(None), tmp_path)
    with pytest.raises(ValueError, match="does not have a parameter or a buffer"):
        accelerate.load_checkpoint_and_dispatch(net(), tmp_path, device_map={"": "cpu"})


def test_codes_that_were_moved_one_by_one_are_packed_anew() -> None:
    """On a device with another layout, of which this machine has none: a spec with another activation stands for it."""
    accelerate = pytest.importorskip("accelerate")
    if not ops.native_available():
        pytest.skip("one layout alone without the compiled library")
    layer, y = net()[0], net()[0](X)
    here = layer._spec
    there = replace(ops.LinearSpec.from_ints(here), activation="relu").to_ints()
    assert there != here
    layer.__dict__["_linear_spec"] = lambda device: here if device is foreign_changes._HOME else there
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.AlignDevicesHook("cpu"))
    assert layer._spec == there
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())
    del layer.__dict__["_linear_spec"]
    assert torch.equal(layer(X), y.relu())
    other = net()[0]
    other.__dict__["_linear_spec"] = lambda device: there
    with pytest.raises(pyquant.UnsupportedError, match=r"model\.to"):
        accelerate.hooks.add_hook_to_module(other, accelerate.hooks.AlignDevicesHook("cpu"))
