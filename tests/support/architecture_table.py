"""Small random models of other people's architectures, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, dict[str, Any]]

_TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_IMAGE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def ids(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 119, (batch, length))


def image(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def text(name: str, **options: Any) -> Callable[[], Made]:
    """A transformers model that reads token ids."""

    def make() -> Made:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**_TEXT, **options})
        return getattr(transformers, f"{name}Model")(config).eval(), {"input_ids": ids()}

    return make


def vision(name: str, **options: Any) -> Callable[[], Made]:
    """A transformers model that reads images."""

    def make() -> Made:
        import transformers

        stem = name.removesuffix("Vision")
        config = getattr(transformers, f"{name}Config")(**{**_IMAGE, **options})
        kind = getattr(transformers, f"{stem}VisionModel" if name.endswith("Vision") else f"{stem}Model")
        return kind(config).eval(), {"pixel_values": image()}

    return make


def convolutional(name: str, **options: Any) -> Callable[[], Made]:
    """A transformers model of convolutions and batch norms, these with the statistics of the images."""

    def make() -> Made:
        import transformers

        model, inputs = (
            getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options)),
            image(64),
        )
        with torch.no_grad():
            for _ in range(30):
                model.train()(inputs)
        return model.eval(), {"pixel_values": inputs}

    return make


def _t5() -> Made:
    import transformers

    config = transformers.T5Config(d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=120)
    return transformers.T5EncoderModel(config).eval(), {"input_ids": ids()}


def _clip() -> Made:
    import transformers

    small = {k: v for k, v in _TEXT.items() if k != "pad_token_id"}
    config = transformers.CLIPConfig(text_config=small, vision_config=dict(_IMAGE), projection_dim=32)
    return transformers.CLIPModel(config).eval(), {"input_ids": ids(), "pixel_values": image()}


def _whisper() -> Made:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=120,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperModel(config).eval()
    return model, {"input_features": torch.randn(2, 16, 32), "decoder_input_ids": ids(2, 6)}


def _bart() -> Made:
    import transformers

    config = transformers.BartConfig(
        vocab_size=120,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=64,
    )
    return transformers.BartModel(config).eval(), {"input_ids": ids()}


def _wav2vec2() -> Made:
    import transformers

    config = transformers.Wav2Vec2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32, 32),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        vocab_size=32,
    )
    return transformers.Wav2Vec2Model(config).eval(), {"input_values": torch.randn(2, 800)}


def _swin() -> Made:
    import transformers

    config = transformers.SwinConfig(
        embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=2, patch_size=4, image_size=32
    )
    return transformers.SwinModel(config).eval(), {"pixel_values": image()}


def torchvision(name: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    """A torchvision classifier."""

    def make() -> Made:
        import pytest

        models = pytest.importorskip("torchvision.models", reason="torchvision is not installed", exc_type=Exception)
        model = getattr(models, name)(weights=None, **options).eval()
        for last in [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]:
            nn.init.normal_(last.weight)  # some start with a head of zeros
        return model, {"x": image(size)}

    return make


def timm(name: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    """A timm classifier."""

    def make() -> Made:
        import pytest

        library = pytest.importorskip("timm", reason="timm is not installed", exc_type=Exception)
        return library.create_model(name, pretrained=False, **options).eval(), {"x": image(size)}

    return make


_MAMBA: dict[str, Any] = {"state_size": 8, "conv_kernel": 4, "expand": 2}
_EFFICIENTNET: dict[str, Any] = {
    "width_coefficient": 0.5,
    "hidden_dim": 640,
    "image_size": 64,
    "in_channels": [32, 16, 24],
    "out_channels": [16, 24, 40],
    "kernel_sizes": [3, 3, 5],
    "strides": [1, 2, 2],
    "num_block_repeats": [1, 1, 1],
    "expand_ratios": [1, 6, 6],
    "depthwise_padding": [],
}
_HEADS: dict[str, Any] = {"num_key_value_heads": 2}

# name -> model and inputs; run at every change
QUICK: dict[str, Callable[[], Made]] = {
    "BERT": text("Bert"),
    "DeBERTa": text("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "ModernBERT": text("ModernBert"),
    "T5": _t5,
    "BART": _bart,
    "Whisper": _whisper,
    "Wav2Vec2": _wav2vec2,
    "Llama": text("Llama", **_HEADS),
    "Qwen3": text("Qwen3", **_HEADS, head_dim=16),
    "Phi-3": text("Phi3", **_HEADS),
    "Gemma3": text("Gemma3Text", **_HEADS, head_dim=16),
    "OPT": text("OPT", ffn_dim=128, word_embed_proj_dim=64),
    "BLOOM": text("Bloom"),
    "GPT-NeoX": text("GPTNeoX"),
    "GPT-2": text("GPT2", n_positions=64),
    "Falcon": text("Falcon"),
    "Mixtral": text("Mixtral", **_HEADS, num_local_experts=4),
    "Mamba": text("Mamba", **_MAMBA),
    "Mamba2": text("Mamba2", **_MAMBA, num_heads=8, head_dim=16, n_groups=1),
    "ViT": vision("ViT"),
    "CLIP": _clip,
    "SigLIP": vision("SiglipVision"),
    "DINOv2": vision("Dinov2"),
    "Swin": _swin,
    "ConvNeXt": vision("ConvNext", hidden_sizes=[32, 64], depths=[1, 1], num_stages=2),
    "ResNet": vision("ResNet", embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic"),
    "RegNet": convolutional("RegNet", embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], groups_width=16),
    "MobileNetV1": convolutional("MobileNetV1", depth_multiplier=0.25),
    "MobileNetV2": convolutional("MobileNetV2", depth_multiplier=0.25),
    "EfficientNet": convolutional("EfficientNet", **_EFFICIENTNET),
    "PoolFormer": vision("PoolFormer", hidden_sizes=[32, 64, 64, 64], depths=[1, 1, 1, 1]),
    "SegFormer": vision("Segformer", hidden_sizes=[16, 32, 32, 64], depths=[1] * 4, num_attention_heads=[1, 2, 2, 4]),
    "CvT": convolutional("Cvt", embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    "FocalNet": vision("FocalNet", embed_dim=32, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3]),
}

# Random ones turn a part in 250 of noise on their images into half of their output: judged layer by layer.
CHAOTIC = {"MobileNetV1", "MobileNetV2"}

# other libraries, and what takes long
NIGHTLY: dict[str, Callable[[], Made]] = {
    "torchvision Swin": torchvision("swin_t"),
    "torchvision SwinV2": torchvision("swin_v2_t"),
    "torchvision ResNet-18": torchvision("resnet18"),
    "torchvision ViT": torchvision("vit_b_32", 224),
    "torchvision MobileNetV3": torchvision("mobilenet_v3_large"),
    "timm ViT": timm("vit_tiny_patch16_224", 64, img_size=64),
    "timm EVA02": timm("eva02_tiny_patch14_224", 56, img_size=56),
    "timm DeiT": timm("deit_tiny_patch16_224", 64, img_size=64),
    "timm ConvNeXt": timm("convnext_atto"),
    "timm EfficientNet": timm("efficientnet_b0"),
    "timm SwinV2": timm("swinv2_cr_tiny_224", 224),
}
