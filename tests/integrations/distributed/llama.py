"""A small Llama of transformers, cut by hand and by its own plan: loaded, quantised, run, and put together again."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accept
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

import pyquant
from pyquant.errors import UnsupportedError
from pyquant.integrations.distributed import PyquantColwise, PyquantRowwise, gather_quantized_

IDS = torch.arange(4, 36).view(2, 16)
TAKEN = ("W8A8Dynamic", "W4A8Dynamic(group_size=16)", "W4A16(group_size=16)", "W8A8")
EXACT = ("W8A8Dynamic", "W8A8")


def config(**words: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    return LlamaConfig(**{**sizes, "num_key_value_heads": 4, "vocab_size": 96, "tie_word_embeddings": False, **words})


def model_of(**words: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(config(**words)).eval()


_MADE: dict[str, Any] = {}


def quantised(scheme: Any, **words: Any) -> Any:
    """One model for each set of words, which nobody changes."""
    key = repr((scheme, words))
    if key not in _MADE:
        data = [{"input_ids": IDS}] if scheme == "W8A8" else None
        _MADE[key] = pyquant.quantize_(model_of(), scheme, data=data, check_speed=False, **words)
    return _MADE[key]


PLAN: dict[str, Callable[[], Any]] = {
    **{f"model.layers.*.self_attn.{name}_proj": PyquantColwise for name in "qkv"},
    "model.layers.*.self_attn.o_proj": PyquantRowwise,
    "model.layers.*.mlp.gate_proj": PyquantColwise,
    "model.layers.*.mlp.up_proj": PyquantColwise,
    "model.layers.*.mlp.down_proj": PyquantRowwise,
    "model.embed_tokens": PyquantRowwise,
    "lm_head": lambda: PyquantColwise(output_layouts=Replicate()),
}


def agree(got: Tensor, want: Tensor, exact: bool) -> None:
    if exact:
        accept.t1(got, want)
    else:
        assert (got - want).abs().max() <= 2e-2 * want.abs().max()  # codes of other ranges after sums in another order


def near(got: Tensor, want: Tensor, exact: bool) -> None:
    """Where the head is in floating point, and cut."""
    if exact:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    else:
        agree(got, want, False)


@torch.no_grad()
def by_hand(rank: int, world: int, folder: Path) -> None:
    """parallelize_module on the layers of a quantised Llama: equal bits, with head and table in int8 too."""
    mesh = init_device_mesh("cpu", (world,))
    for scheme in TAKEN:
        whole = quantised(scheme, embeddings=True, heads=True)
        model = copy.deepcopy(whole)
        parallelize_module(model, mesh, {name: make() for name, make in PLAN.items()})
        agree(model(IDS).logits, whole(IDS).logits, scheme in EXACT)
        if scheme in EXACT:
            tokens = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(model.generate(IDS, **tokens), whole.generate(IDS, **tokens))
        pyquant.merge_(model)  # as it would be after transformers has loaded it in parts
        assert sum(type(m).__name__ == "ColwiseMergedLinear" for m in model.modules()) == 10
        agree(model(IDS).logits, whole(IDS).logits, scheme in EXACT)
        gather_quantized_(model)
        assert "over" not in repr(model)


def loaded(path: Path, world: int, **words: Any) -> Any:
    """from_pretrained of every rank, by the model's own plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(
            path, distributed_config=DistributedConfig(tp_size=world), dtype=torch.float32, **words
        ).eval()


def shares(model: Any) -> dict[str, str]:
    return {name: module.share for name, module in model.named_modules() if getattr(module, "share", "")}


@torch.no_grad()
def plan_of_codes(rank: int, world: int, folder: Path) -> None:
    """A compressed-tensors directory, taken over in parts."""
    from pyquant.integrations import transformers as ours

    ours.enable()
    try:
        for scheme in TAKEN:
            whole, path = quantised(scheme), folder / f"codes {scheme}"
            if rank == 0:
                pyquant.save_pretrained(whole, path)
            dist.barrier()
            model = loaded(path, world)
            assert len(shares(model)) == 14, shares(model)
            near(model(IDS).logits, whole(IDS).logits, scheme in EXACT)
            with pytest.raises(UnsupportedError, match="gather_quantized_"):
                model.save_pretrained(folder / "no")
    finally:
        ours.disable()


@torch.no_grad()
def plan_of_experts(rank: int, world: int, folder: Path) -> None:
    """Another tool's mixture: its plan cuts experts inside, and ranks hold whole ones, with the same results."""
    from pyquant.integrations import transformers as ours
    from tests.integrations.test_foreign_experts import written

    ours.enable()
    try:
        for form in ("W8A8Dynamic", "W4A16"):
            path = folder / f"experts {form}"
            if rank == 0:
                written(path, "Qwen3Moe", form)
            dist.barrier()
            whole, model = load_pretrained_whole(path), loaded(path, world)
            banks = [m for m in model.modules() if isinstance(m, pyquant.QExperts)]
            assert [len(bank.here) for bank in banks] == [8 // world] * 2
            if whole.config.num_key_value_heads % world == 0:  # transformers cuts attention between heads alone
                near(model(IDS).logits, whole(IDS).logits, form in EXACT)
            x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
            case = x, torch.arange(12).view(6, 2) % 8, torch.rand(6, 2, generator=torch.Generator().manual_seed(2))
            accept.t1(banks[1](*case), whole.model.layers[1].mlp.experts(*case))
    finally:
        ours.disable()


def load_pretrained_whole(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def plan_on_the_fly(rank: int, world: int, folder: Path) -> None:
    """A model in floating point, quantised from the parts that transformers loaded."""
    from pyquant.integrations.transformers import PyquantConfig

    path = folder / "float"
    if rank == 0:
        model_of().save_pretrained(path)
    dist.barrier()
    for scheme, words in (
        ("W8A8Dynamic", {}),
        ("W8A8Dynamic", {"embeddings": True, "heads": True}),
        ("W4A8Dynamic(group_size=16)", {}),
        (pyquant.Recipe.from_dict({"default": "W8A8Dynamic", "heads": False}), {}),
    ):
        model = loaded(path, world, quantization_config=PyquantConfig(scheme, **words))
        whole = quantised(scheme, **words)
        assert len(shares(model)) == (16 if words else 14)
        if words:
            accept.t1(model(IDS).logits, whole(IDS).logits)
        else:
            near(model(IDS).logits, whole(IDS).logits, scheme in EXACT or isinstance(scheme, pyquant.Recipe))
        state = gather_quantized_(model).state_dict()
        if not words:  # the head is in floating point, and cut by transformers
            with pytest.raises(
                UnsupportedError, match=r"tensor 'model\.embed_tokens\.weight' is a DTensor.*load it in one process"
            ):
                pyquant.save_pretrained(model, folder / "parts")
        for name, tensor in whole.state_dict().items():
            if "proj" in name:
                assert torch.equal(state[name].as_subclass(Tensor), tensor.as_subclass(Tensor)), name


def gradients_agree(model: Any, whole: Any) -> None:
    """Of the embeddings that go in."""
    found = []
    with torch.enable_grad():
        for one in (model, whole):
            x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
            one(inputs_embeds=x).logits.float().square().sum().backward()
            found.append(x.grad)
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()


@torch.no_grad()
def plan_of_experts_on_the_fly(rank: int, world: int, folder: Path) -> None:
    """A mixture in floating point: each rank quantises and keeps the experts that are its own."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from pyquant.integrations.transformers import PyquantConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64, "vocab_size": 96}
    sizes = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "num_hidden_layers": 2, **heads}
    ranks = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    more = {"n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "intermediate_size": 128}
    kinds = {
        "qwen": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=8, head_dim=16)),
        "deepseek": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**sizes, **ranks, **more)),
    }
    for name, make in kinds.items():
        path = folder / f"mixture {name}"
        if rank == 0:
            torch.manual_seed(0)
            make().save_pretrained(path, max_shard_size="40KB")
        dist.barrier()
        for scheme in ("W8A8Dynamic", "W4A16(group_size=16)")[: 2 if name == "qwen" else 1]:
            model = loaded(path, world, quantization_config=PyquantConfig(scheme))
            whole = pyquant.quantize_(load_pretrained_whole(path), scheme, check_speed=False)
            banks = {n: m for n, m in model.named_modules() if isinstance(m, pyquant.QExperts)}
            assert banks
            for place, bank in banks.items():
                assert len(bank.here) in (bank.num_experts // world, -(-bank.num_experts // world))  # 6 on 4 ranks
                assert all(not t.is_meta for t in (*bank.parameters(), *bank.buffers()))
                x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
                ids = torch.arange(12).view(6, 2) % bank.num_experts
                case = x, ids, torch.rand(6, 2, generator=torch.Generator().manual_seed(2))
                accept.t1(bank(*case), whole.get_submodule(place)(*case))
            near(model(IDS).logits, whole(IDS).logits, scheme in EXACT)
            if name == "deepseek":  # one layer is whole on every rank, and has gradients of all
                gradients_agree(model, whole)
            state = gather_quantized_(model).state_dict()
            for key, tensor in whole.state_dict().items():
                if "experts" in key:
                    assert torch.equal(state[key].as_subclass(Tensor), tensor.as_subclass(Tensor)), key


def plan_refused(rank: int, world: int, folder: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from pyquant.integrations.transformers import PyquantConfig, parallel

    path = folder / "refused"
    if rank == 0:
        model_of().save_pretrained(path)
    dist.barrier()
    with pytest.raises(UnsupportedError, match=r"fsdp_size = \d"):
        AutoModelForCausalLM.from_pretrained(
            path,
            distributed_config=DistributedConfig(fsdp_size=world),
            dtype=torch.float32,
            quantization_config=PyquantConfig("W8A8Dynamic"),
        )
    model = model_of()
    model.tp_plan = {"model.layers.*.mlp.up_proj": "packed_colwise"}
    with pytest.raises(UnsupportedError, match=r"layer 'model\.layers\.0\.mlp\.up_proj': style 'packed_colwise'"):
        parallel.styles_of(model, ["model.layers.0.mlp.up_proj"])


_CASES = (by_hand, plan_of_codes, plan_of_experts, plan_on_the_fly, plan_of_experts_on_the_fly, plan_refused)
CASES: dict[str, Callable[[int, int, Path], None]] = {}
if importlib.util.find_spec("transformers") is not None:
    CASES = {case.__name__: case for case in _CASES}
