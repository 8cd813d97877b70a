"""Other libraries' savers refuse a quantised model, by name; everything that is not such a saver goes on working."""

from __future__ import annotations

import copy
import importlib.util
import io
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import python, with_transformers
from torch import nn

import pyquant

REFUSED = (
    ("transformers.modeling_utils", "save_pretrained"),
    ("transformers.trainer", "_save"),
    ("diffusers.models.modeling_utils", "save_pretrained"),
    ("sentence_transformers.base.modules.module", "save_torch_weights"),
    ("huggingface_hub.hub_mixin", "_save_pretrained"),
    ("huggingface_hub.serialization._torch", "save_torch_model"),
    ("accelerate.accelerator", "save_model"),
    ("accelerate.accelerator", "get_state_dict"),
)
ALLOWED = (
    ("transformers.modeling_utils", "from_pretrained"),
    ("accelerate.accelerator", "save_state"),
    ("peft.peft_model", "save_pretrained"),
    ("mine.models", "save_pretrained"),
    ("transformers_of_mine", "save_pretrained"),
    ("safetensors.torch", "save_model"),
)


def quantised() -> nn.Module:
    torch.manual_seed(0)
    return pyquant.quantize_(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), "W8A8Dynamic")


def caller(module: str, function: str) -> Callable[..., Any]:
    """A function of that name in a module of that name, which asks its argument for its state."""
    made = types.ModuleType(module)
    code = "def helper(m): return m.state_dict()\n"
    code += f"def {function}(m, get=helper): return get(m)\n"
    exec(code, made.__dict__)
    return made.__dict__[function]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("module", "function"), REFUSED)
def test_savers_are_refused(module: str, function: str) -> None:
    save, library = caller(module, function), module.partition(".")[0]
    for model in (quantised(), nn.Module(), nn.Sequential(nn.Embedding(4, 8))):
        if not list(model.children()):
            model.inner = nn.ModuleList([quantised()])
        elif isinstance(model[0], nn.Embedding):  # type: ignore[index]
            pyquant.quantize_(model, pyquant.W8A8Dynamic, embeddings=True)
        with pytest.raises(pyquant.UnsupportedError, match=rf"{function} of {library} .*pyquant\.save_pretrained"):
            save(model)
        with pytest.raises(pyquant.UnsupportedError):
            save(copy.deepcopy(model))


@pytest.mark.parametrize(("module", "function"), ALLOWED)
def test_others_get_the_state(module: str, function: str) -> None:
    assert "0.weight_scale" in caller(module, function)(quantised())


def test_what_resumes_a_run_and_what_pyquant_writes_is_allowed_inside_of_a_saver(tmp_path: Path) -> None:
    model = quantised()
    resume, get = caller("accelerate.accelerator", "save_state"), caller("accelerate.accelerator", "get_state_dict")
    assert "0.weight" in resume(model, get)
    save = caller("transformers.modeling_utils", "save_pretrained")
    save(model, lambda m: pyquant.save_pretrained(m, tmp_path / "a"))  # a callback of the user's that calls ours
    peft = caller("peft.utils.save_and_load", "get_peft_model_state_dict")
    assert "0.weight" in save(model, peft)  # adapters alone are written


def test_float_models_and_sixteen_bit_layers_are_none_of_our_business() -> None:
    save = caller("transformers.modeling_utils", "save_pretrained")
    assert "0.weight" in save(nn.Sequential(nn.Linear(8, 8)))
    model = pyquant.quantize_(nn.Sequential(nn.Linear(8, 8)), pyquant.FP16("bfloat16"))
    assert save(model)["0.weight"].dtype == torch.bfloat16
    assert "0.weight" in save(pyquant.dequantize_(quantised()))


def test_the_guard_imports_none_of_them_and_leaves_nothing_in_the_model(tmp_path: Path) -> None:
    found = python(
        "import sys, json, torch, pyquant\n"
        "m = pyquant.quantize_(torch.nn.Sequential(torch.nn.Linear(8, 8)), 'W8A8Dynamic')\n"
        "pyquant.save_pretrained(m, 'd'); m.state_dict()\n"
        "names = {n.partition('.')[0] for n in sys.modules}\n"
        "print(json.dumps([sorted(names & {'transformers', 'diffusers', 'accelerate', 'sentence_transformers',"
        " 'huggingface_hub', 'peft'}), 'pyquant.integrations' in sys.modules, sorted(m.__dict__)]))",
        tmp_path,
    )
    assert found[0] == []
    assert found[2] == sorted(nn.Sequential(nn.Linear(8, 8)).__dict__)
    buffer = io.BytesIO()
    torch.save(quantised(), buffer)
    buffer.seek(0)
    x = torch.ones(2, 8)
    again = torch.load(buffer, weights_only=False)
    assert torch.equal(again(x), quantised()(x))


REAL = """
import copy, json, torch, pyquant
from torch import nn
told = {}
def refused(name, save):
    try:
        save()
    except pyquant.UnsupportedError as error:
        told[name] = "pyquant.save_pretrained(model, directory)" in str(error)
    else:
        told[name] = False
"""


def bert() -> str:
    return (
        "import transformers as T\n"
        "def bert(cls=T.BertModel):\n"
        "    return cls(T.BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1,"
        " num_attention_heads=2, vocab_size=40)).eval()\n"
    )


def have(*names: str) -> Any:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@have("transformers")
def test_transformers_itself(tmp_path: Path) -> None:
    code = (
        REAL + bert() + "m = pyquant.quantize_(bert(), 'W8A8Dynamic')\n"
        "refused('model', lambda: m.save_pretrained('a'))\n"
        "refused('copy', lambda: copy.deepcopy(m).save_pretrained('b'))\n"
        "refused('embeddings', lambda: pyquant.quantize_(bert(), {nn.Embedding: 'W8A8Dynamic'}, embeddings=True)"
        ".save_pretrained('c'))\n"
        "outer = bert(T.BertForMaskedLM); outer.bert = m\n"
        "refused('inner', lambda: outer.save_pretrained('d'))\n"
        "pyquant.save_pretrained(m, 'e'); n = pyquant.load_pretrained('e', bert)\n"
        "refused('loaded', lambda: n.save_pretrained('f'))\n"
        "pyquant.dequantize_(m).save_pretrained('g'); back = T.AutoModel.from_pretrained('g')\n"
        "i = torch.arange(4, 20)[None]\n"
        "told['dequantised'] = torch.equal(m(i)[0], back(i)[0])\n"
        "print(json.dumps(told))"
    )
    told = with_transformers(code, tmp_path)
    assert told == dict.fromkeys(("model", "copy", "embeddings", "inner", "loaded", "dequantised"), True)
    assert not list(tmp_path.glob("[a-d,f]/*.safetensors"))


@have("transformers", "accelerate", "huggingface_hub")
def test_accelerate_and_the_hub_mixin(tmp_path: Path) -> None:
    code = (
        REAL + "from accelerate import Accelerator\nfrom huggingface_hub import PyTorchModelHubMixin\n"
        "class Mine(nn.Module, PyTorchModelHubMixin):\n"
        "    def __init__(self): super().__init__(); self.fc = nn.Linear(8, 8)\n"
        "    def forward(self, x): return self.fc(x)\n"
        "a, m = Accelerator(cpu=True), pyquant.quantize_(Mine(), 'W8A8Dynamic')\n"
        "refused('hub', lambda: m.save_pretrained('a'))\n"
        "refused('model', lambda: a.save_model(m, 'b'))\n"
        "refused('idiom', lambda: a.get_state_dict(m))\n"
        "a.prepare(m); a.save_state('c'); before = m.fc(torch.ones(1, 8))\n"
        "a.load_state('c'); told['resume'] = torch.equal(before, m.fc(torch.ones(1, 8)))\n"
        "print(json.dumps(told))"
    )
    assert with_transformers(code, tmp_path) == dict.fromkeys(("hub", "model", "idiom", "resume"), True)


@pytest.mark.nightly
@have("transformers", "sentence_transformers", "diffusers", "peft")
def test_sentence_transformers_diffusers_and_peft(tmp_path: Path) -> None:
    code = (
        REAL + bert() + "import sentence_transformers as S, diffusers as D, peft\n"
        "from sentence_transformers.sentence_transformer.modules import Dense\n"
        "v = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]'] + [chr(97 + i) for i in range(26)]\n"
        "import os; os.makedirs('t'); open('t/vocab.txt', 'w').write('\\n'.join(v))\n"
        "T.BertTokenizer('t/vocab.txt').save_pretrained('t'); bert().save_pretrained('t')\n"
        "s = S.SentenceTransformer('t', device='cpu'); x = ['a b', 'c']\n"
        "pyquant.quantize_(s, 'W8A8Dynamic'); s.encode(x)\n"
        "refused('sentences', lambda: s.save_pretrained('a'))\n"
        "refused('old name', lambda: s.save('b'))\n"
        "d = S.SentenceTransformer(modules=[*S.SentenceTransformer('t', device='cpu'), Dense(32, 8)], device='cpu')\n"
        "pyquant.quantize_(d, {'2.linear': 'W8A8Dynamic'})\n"
        "refused('dense', lambda: d.save_pretrained('c'))\n"
        "unet = D.UNet2DModel(sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,"
        " down_block_types=('DownBlock2D', 'AttnDownBlock2D'), up_block_types=('AttnUpBlock2D', 'UpBlock2D'))\n"
        "pyquant.quantize_(unet, 'W8A8Dynamic')\n"
        "refused('unet', lambda: unet.save_pretrained('d'))\n"
        "refused('pipeline', lambda: D.DDPMPipeline(unet, D.DDPMScheduler()).save_pretrained('e'))\n"
        "m = bert(); p = peft.get_peft_model(m, peft.LoraConfig(target_modules=['query']))\n"
        "pyquant.quantize_(p, {'re:.*dense': 'W8A8Dynamic'})\n"
        "p.save_pretrained('f'); told['adapter'] = os.path.getsize('f/adapter_model.safetensors') > 0\n"
        "print(json.dumps(told))"
    )
    names = ("sentences", "old name", "dense", "unet", "pipeline", "adapter")
    assert with_transformers(code, tmp_path) == dict.fromkeys(names, True)
