"""rotate_: the float function stays, outliers are spread, what a spec gets wrong is found out and undone."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from float_models import randomise, tiny
from torch import Tensor, nn

import pyquant
from pyquant import ArgumentError, RotatedHeads, RotationSpec, W8A8Dynamic, rotate_

has_transformers = importlib.util.find_spec("transformers") is not None


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = norm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.fc1 = norm(width), nn.Linear(width, 2 * width, bias=False)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    """A stream that embeddings, a convolution and a parameter write."""

    def __init__(self, width: int = 24, norm: type[nn.Module] = nn.LayerNorm, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.patch = nn.Embedding(20, width), nn.Conv2d(3, width, 2, 2)
        self.place = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.Sequential(Block(width, norm), Block(width, norm))
        self.norm, self.head = norm(width), nn.Linear(width, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, image: Tensor) -> Tensor:
        x = torch.cat([self.embed(ids), self.patch(image).flatten(2).mT], 1) + self.place
        return self.head(self.norm(self.blocks(x)))


def spec(width: int = 24, **changes: object) -> RotationSpec:
    first = {"blocks.*.norm1": ["blocks.*.qkv"], "blocks.*.norm2": ["blocks.*.fc1"], "norm": ["head"]}
    writers = ["embed", "patch", "place", "blocks.*.out", "blocks.*.fc2"]
    heads = [RotatedHeads("blocks.*.qkv", "blocks.*.out", width // 2, (2 * width, 3 * width))]
    return RotationSpec(**{"writers": writers, "readers": first, "heads": heads} | changes)  # type: ignore[arg-type]


INPUTS = torch.arange(10).reshape(2, 5), torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def moved(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm() / want.norm()).detach())


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("width", [16, 24, 28, 36])
@pytest.mark.parametrize("tied", [False, True])
def test_the_float64_function_stays(norm, width, tied) -> None:
    model = randomise(Transformer(width, norm, tied)).double()
    inputs = INPUTS[0], INPUTS[1].double()
    want, before = model(*inputs), copy.deepcopy(model)
    found = rotate_(model, inputs, spec(width))
    turned = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("qkv", "fc1")]
    heads = [f"blocks.{i}.out" for i in (0, 1)]
    assert found == {**dict.fromkeys([*turned, "head"], width), **dict.fromkeys(heads, width // 2)}
    assert moved(model(*inputs), want) < 1e-12
    for name in ("embed.weight", "place", "patch.bias", "blocks.0.out.weight", "blocks.1.qkv.weight"):
        assert moved(model.get_parameter(name), before.get_parameter(name)) > 0.1, name
    assert torch.equal(model.norm.weight, torch.ones(width).double())
    assert (model.head.weight is model.embed.weight) is False


def test_an_outlier_is_spread() -> None:
    model = Transformer(64, nn.RMSNorm).eval()
    with torch.no_grad():
        model.blocks[0].norm1.weight[7] = 100
        model.place[..., 3] = 100
    seen: list[Tensor] = []
    model.blocks[0].norm2.register_forward_hook(lambda _, x, y: seen.append(y.detach()))
    model(*INPUTS)
    rotate_(model, INPUTS, spec(64))
    crest = [float(y.abs().amax() / y.square().mean().sqrt()) for y in (seen[0], seen[-1])]
    assert crest[0] > 7
    assert crest[1] < 4


def test_seeds_are_other_rotations_and_the_same_seed_the_same_bits() -> None:
    models = [Transformer().eval() for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        rotate_(model, INPUTS, spec(), seed=seed)
    weights = [model.blocks[1].fc1.weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert moved(weights[2], weights[0]) > 0.1


def test_modes_and_state_keys_stay_so_that_files_load() -> None:
    model = Transformer()
    model.blocks[0].eval()
    keys = set(model.state_dict())
    rotate_(model, INPUTS, spec())
    assert [model.training, model.blocks[0].training, model.blocks[1].training] == [True, False, True]
    assert set(model.state_dict()) == keys  # norms had no bias here: no Linear got one
    pyquant.quantize_(rotate_again := copy.deepcopy(model).eval(), W8A8Dynamic(), check_speed=False)
    assert moved(rotate_again(*INPUTS), model.eval()(*INPUTS)) < 0.05


@pytest.mark.parametrize("forgotten", ["embed", "place", "blocks.*.fc2"])
def test_a_forgotten_writer_is_found_out_and_undone(forgotten) -> None:
    model = randomise(Transformer(tied=True))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    writers = [name for name in spec().writers if name != forgotten]
    with pytest.raises(ArgumentError, match=r"moved by .* undone"):
        rotate_(model, INPUTS, spec(writers=writers))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert model.state_dict().keys() == before.keys()
    assert model.head.weight is model.embed.weight


def test_a_rotation_after_smoothing_and_before_it_keeps_the_function() -> None:
    model = randomise(Transformer(norm=nn.RMSNorm))
    want = model(*INPUTS)
    pairs = [(f"blocks.{i}.norm{j}", [f"blocks.{i}.{name}"]) for i in (0, 1) for j, name in ((1, "qkv"), (2, "fc1"))]
    batches = [{"ids": INPUTS[0], "image": INPUTS[1]}]
    for step in (0, 1):
        pyquant.smooth_(model, batches, 1, pairs=pairs)
        rotate_(model, INPUTS, spec(), seed=step)
    assert moved(model(*INPUTS), want) < 1e-4


def test_online_names_are_turned_at_run_time() -> None:
    model = randomise(Transformer(24))
    shared = model.blocks[1].fc2 = model.blocks[0].fc2  # one module in two places
    want = model(*INPUTS)
    found = rotate_(model, INPUTS, spec(online=["blocks.*.fc2", "blocks.*.out"]))
    assert {name: found.get(name) for name in ("blocks.0.fc2", "blocks.1.fc2", "blocks.1.out")} == {
        "blocks.0.fc2": 48,
        "blocks.1.fc2": None,
        "blocks.1.out": 24,
    }
    assert model.blocks[0].fc2 is model.blocks[1].fc2
    assert model.blocks[0].fc2.linear is shared
    assert moved(model(*INPUTS), want) < 1e-5
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ArgumentError, match=r"moved by .* undone"):
        rotate_(model, INPUTS, RotationSpec(["embed"], {"norm": ["head"]}, online=["blocks.*.qkv"]))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert type(model.blocks[0].qkv) is nn.Linear


def classifier(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as t

    config = tiny(family).config
    config.tie_word_embeddings = family == "qwen2"
    config.pad_token_id = 0
    torch.manual_seed(0)
    kind = "SequenceClassification" if family == "mistral" else "CausalLM"
    model = getattr(t, f"{type(tiny(family)).__name__.removesuffix('Model')}For{kind}")(config)
    return randomise(model.double()), {"input_ids": torch.randint(1, 50, (2, 9))}


@pytest.mark.skipif(not has_transformers, reason="transformers is a demo extra and not installed")
@pytest.mark.parametrize("family", ["llama", "llama_gqa", "mistral", "qwen2", "qwen3"])
def test_models_of_transformers(family, tmp_path) -> None:
    model, inputs = classifier(family)
    want = model(**inputs).logits
    found = rotate_(model, inputs)
    assert (len(found), set(found.values())) == (2 * 6 + 1, {32, 8})
    assert 0 < moved(model(**inputs).logits, want) < 1e-6
    names = [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    again = rotate_(copy.deepcopy(model), inputs, online=True)
    assert again == found | dict.fromkeys(names, 48)
    assert model.config.tie_word_embeddings is False
    model.save_pretrained(tmp_path)  # theirs: tied weights would be written once
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert moved(again(**inputs).logits, model(**inputs).logits) < 1e-6


@pytest.mark.skipif(not has_transformers, reason="transformers is a demo extra and not installed")
def test_smoothed_quantised_saved_and_loaded_after_it(tmp_path) -> None:
    model, inputs = classifier("qwen2")
    model = model.float()
    want = model(**inputs).logits
    rotate_(model, inputs, online=True)
    smoothed = pyquant.smooth_(model, [inputs], 1)
    assert all(name.endswith(("norm", "v_proj")) for name in smoothed)  # no factor passes the transform in down_proj
    assert moved(model(**inputs).logits, want) < 1e-4
    improve = ("gptq", "bias_correction")
    pyquant.quantize_(model, pyquant.W8A8(), data=[inputs] * 2, improve=improve, check_speed=False)
    got = model(**inputs).logits
    assert moved(got, want) < 0.1
    with pytest.warns(pyquant.QuantizationWarning, match="transforms its inputs"):
        pyquant.save_pretrained(model, tmp_path)
    again = pyquant.load_pretrained(tmp_path, lambda: type(model)(copy.deepcopy(model.config)))
    assert torch.equal(again.eval()(**inputs).logits, got)
    assert moved(pyquant.dequantize_(model)(**inputs).logits, want) < 0.1


class Registered(Transformer):
    """Of its own, as a registration lasts."""


def test_a_registered_class_needs_no_spec() -> None:
    known = spec(online=["blocks.*.fc2"])
    assert pyquant.register_rotation(Registered, known) is Registered
    pyquant.register_rotation(Registered, spec(online=["blocks.*.fc2"]))  # the same again
    by_spec, by_class = Registered(norm=nn.RMSNorm), nn.ModuleDict({"inside": Registered(norm=nn.RMSNorm)})
    want = rotate_(by_spec, INPUTS, known)
    by_class.forward = lambda *inputs: by_class["inside"](*inputs)  # type: ignore[method-assign]
    assert rotate_(by_class, INPUTS, online=True) == {f"inside.{name}": size for name, size in want.items()}
    assert all(torch.equal(a, b) for a, b in zip(by_class.state_dict().values(), by_spec.state_dict().values()))
    folded = Registered()
    assert "blocks.0.fc2" not in rotate_(folded, INPUTS)
    assert type(folded.blocks[0].fc2) is nn.Linear
    with pytest.raises(ArgumentError, match=r"'model_class'.*another spec"):
        pyquant.register_rotation(Registered, spec())
    with pytest.raises(ArgumentError, match=r"'model_class'.*subclass"):
        pyquant.register_rotation(3, known)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"'spec'.*RotationSpec"):
        pyquant.register_rotation(Registered, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spec(writers=["embed"], readers={}), "both or neither"),
        (lambda: spec(writers=["nothing"]), "'nothing'.*names of modules"),
        (lambda: spec(writers=["norm"]), "'norm', a LayerNorm.*writers"),
        (lambda: spec(writers="embed"), "writers"),
        (lambda: spec(readers={"norm": ["blocks.*.fc1"]}), r"at most 0 '\*'"),
        (lambda: spec(readers={"norm": ["blocks"]}), "'blocks', a Sequential.*expose_linears_"),
        (lambda: spec(readers={"norm": ["head"], "blocks.0.norm1": ["head"]}), "one norm"),
        (lambda: spec(readers={"norm": ["blocks.0.fc2"]}), "48 channels|24 channels"),
        (lambda: spec(heads=[RotatedHeads("blocks.*.qkv", "blocks.*.out", 5)]), "heads of 5"),
        (lambda: spec(heads=[RotatedHeads("blocks.*.qkv", "blocks.*.out", 9)]), "multiple of 9"),
        (lambda: spec(heads=["v"]), "RotatedHeads"),
        (lambda: RotatedHeads("blocks.*.qkv", "blocks.*.out", 12, (48, 48)), "rows"),
        (lambda: RotatedHeads("blocks.*.qkv", "blocks.*.out", 12, 48), r"rows.*\(first, end\)"),
        (lambda: RotatedHeads("blocks.*.qkv", "", 12), "output"),
        (lambda: spec(heads=[RotatedHeads("blocks.*.qkv", "blocks.*.out", 12, (48, 96))]), "rows 48 to 96"),
        (lambda: spec(readers={"norm": []}), "no Linear behind 'norm'"),
        (lambda: spec(online=["norm"]), "'norm', a LayerNorm"),
        (lambda: spec(online="norm"), "online"),
        (lambda: "embed", "a RotationSpec"),
        (lambda: None, "no rule knows"),
    ],
)
def test_wrong_specs_are_named(make, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        rotate_(Transformer(), INPUTS, make())


def test_what_is_refused_beside_specs() -> None:
    with pytest.raises(ArgumentError, match=r"'online'.*RotationSpec\(online="):
        rotate_(Transformer(), INPUTS, spec(), online=True)
    with pytest.raises(ArgumentError, match="rotate before quantising"):
        rotate_(pyquant.quantize_(Transformer(), W8A8Dynamic(), check_speed=False), INPUTS, spec())
