"""Script: models of transformers saved by pyquant, loaded by transformers with enable(), saved and loaded again."""

import json

import torch
import transformers as T
from transformers_reads import CASES, first

import pyquant
from pyquant.integrations import transformers as ours


def count(model: torch.nn.Module) -> int:
    return sum(isinstance(m, (pyquant.QLinear, pyquant.QEmbedding)) for m in model.modules())


def main() -> None:
    """{case: [layers, bits equal to what was saved, saved again by transformers: by transformers, by pyquant]}"""
    found = {}
    for name, make in CASES.items():
        if name in ("W8A16", "untied", "shared embedding", "tied, body"):  # parts of other cases
            continue
        torch.manual_seed(0)
        model = make()
        pyquant.save_pretrained(model, name)
        ours.enable()
        cls = getattr(T, type(model).__name__)
        read, log = cls.from_pretrained(name, output_loading_info=True)
        assert not any(log.values()), (name, log)
        again = f"{name} again"
        read.save_pretrained(again)
        twice = cls.from_pretrained(again)
        third = pyquant.load_quantized_(cls(T.AutoConfig.from_pretrained(again)).eval().to(model.dtype), again)
        if name == "fused":  # files of transformers do not say so: its model computes the activation until it is asked
            twice, third = pyquant.fuse_(twice), pyquant.fuse_(third)
        want = first(model)
        found[name] = [count(read) - count(model), *(torch.equal(first(m), want) for m in (read, twice, third))]
        ours.disable()
        plain = cls.from_pretrained(again).eval()
        found[name].append(float((first(plain).float() - want.float()).norm() / want.float().norm()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
