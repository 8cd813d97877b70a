"""Script: saves quantised transformers models with pyquant and reads them with transformers; prints what came back."""

import copy
import json

import torch
import transformers as T
from torch import nn

import pyquant
from pyquant import W4A16, W8A8, W8A16, W4A8Dynamic, W8A8Dynamic

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
IDS = torch.arange(4, 20)[None]


def bert(cls: type = T.BertModel, **words: object) -> nn.Module:
    return cls(T.BertConfig(**SMALL, num_attention_heads=2, id2label={0: "a", 1: "b", 2: "c"}, **words)).eval()


def llama(tie: bool) -> nn.Module:
    words = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tie, "pad_token_id": 0}
    return T.LlamaForCausalLM(T.LlamaConfig(**SMALL, **words)).eval()


def t5() -> nn.Module:
    return T.T5ForConditionalGeneration(
        T.T5Config(vocab_size=96, d_model=64, d_ff=128, d_kv=16, num_layers=1, num_heads=4, decoder_start_token_id=0)
    ).eval()


def first(model: nn.Module, body: str = "") -> torch.Tensor:
    model = model.get_submodule(body) if body else model
    words = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(IDS, **words)[0]


def static(model: nn.Module, scheme: pyquant.QScheme) -> nn.Module:
    scales = {name: 0.02 for name, m in model.named_modules() if isinstance(m, nn.Linear) and name.endswith("dense")}
    return pyquant.quantize_(model, {"re:.*dense": scheme, "_default": W8A8Dynamic()}, input_scales=scales)


def everywhere(model: nn.Module, scheme: object) -> nn.Module:
    """Every Linear, the head too, and every Embedding."""
    return pyquant.quantize_(model, {nn.Linear: scheme, nn.Embedding: scheme}, embeddings=True)


CASES = {
    "W8A8Dynamic": lambda: pyquant.quantize_(bert(), "W8A8Dynamic"),
    "W8A8": lambda: static(bert(), W8A8(symmetric_inputs=True)),
    "W4A16": lambda: pyquant.quantize_(bert(), W4A16(group_size=32)),
    "W8A16": lambda: pyquant.quantize_(bert(), W8A16()),
    "mixed": lambda: pyquant.quantize_(bert(), {"*.query": "W4A8Dynamic(group_size=64)", "*.dense": W8A8Dynamic}),
    "embeddings": lambda: everywhere(bert(), W8A8Dynamic()),
    "fused": lambda: pyquant.fuse_(pyquant.quantize_(bert(), "W8A8Dynamic")),
    "with a head": lambda: everywhere(bert(T.BertForMaskedLM), W8A8Dynamic()),
    "tied, body": lambda: pyquant.quantize_(llama(True), {"re:.*proj": W4A16(group_size=32)}),
    "tied, head": lambda: pyquant.quantize_(llama(True), {nn.Linear: W4A8Dynamic(group_size=32)}),
    "tied, all": lambda: everywhere(llama(True), W4A16(group_size=32)),
    "untied": lambda: everywhere(llama(False), W8A8Dynamic()),
    "bfloat16": lambda: pyquant.quantize_(bert().bfloat16(), W8A8Dynamic()),
    "shared embedding": lambda: pyquant.quantize_(t5(), {"re:.*[qkvo]|.*w[io]": W8A8Dynamic()}),
    "shared embedding, all": lambda: everywhere(t5(), W8A8Dynamic()),
}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    layers = (nn.Linear, nn.Embedding)
    modules = model.named_modules(remove_duplicate=False)
    return {name: m.weight.detach() for name, m in modules if isinstance(m, layers)}


def main() -> None:
    """{case: [differing weights, relative error to the model that was saved, lost keys of its configuration]}"""
    found = {}
    for name, make in CASES.items():
        torch.manual_seed(0)
        model = make()
        pyquant.save_pretrained(model, name, model_config=model.config.to_dict())
        read = getattr(T, type(model).__name__).from_pretrained(name).eval()
        want, got = first(model).float(), first(read).float()
        ours, theirs = weights(pyquant.dequantize_(copy.deepcopy(model))), weights(read)
        differing = sorted(key for key in ours if not torch.equal(ours[key], theirs[key]))
        kept = {"id2label", "vocab_size", "hidden_act", "d_ff", "rope_parameters"} & model.config.to_dict().keys()
        lost = [key for key in kept if getattr(read.config, key) != getattr(model.config, key)]
        found[name] = [differing + sorted(ours.keys() ^ theirs.keys()), float((got - want).norm() / want.norm()), lost]
        if name == "with a head":
            body = T.AutoModel.from_pretrained(name).eval()
            found["body of the same"] = [[], float((first(body) - first(model, "bert")).norm() / want.norm()), []]
        again = pyquant.load_pretrained(name, type(model)(model.config).eval())
        assert torch.equal(first(again), first(model)), name
    print(json.dumps(found))


if __name__ == "__main__":
    main()
