"""Shapes of the parameters of known models, by the names that their weights files use."""

from __future__ import annotations

from collections.abc import Callable

Shapes = dict[str, tuple[int, ...]]

# The width of a stage's bottlenecks, and the number of bottlenecks.
_RESNET50_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


def resnet50() -> Shapes:
    """Returns ResNet-50 (arXiv 1512.03385, table 1) as torchvision names it."""
    shapes = {"conv1.weight": (64, 3, 7, 7), **_batch_norm("bn1", 64)}
    width = 64
    for stage, (planes, num_blocks) in enumerate(_RESNET50_STAGES, 1):
        for block in range(num_blocks):
            name = f"layer{stage}.{block}"
            convolutions = [
                ("conv1", "bn1", (planes, width, 1, 1)),
                ("conv2", "bn2", (planes, planes, 3, 3)),
                ("conv3", "bn3", (4 * planes, planes, 1, 1)),
            ]
            if block == 0:
                convolutions.append(("downsample.0", "downsample.1", (4 * planes, width, 1, 1)))
            for convolution, norm, shape in convolutions:
                shapes[f"{name}.{convolution}.weight"] = shape
                shapes |= _batch_norm(f"{name}.{norm}", shape[0])
            width = 4 * planes
    return {**shapes, "fc.weight": (1000, width), "fc.bias": (1000,)}


def _batch_norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def gpt2(width: int = 768, num_layers: int = 12) -> Shapes:
    """Returns GPT-2 of 124 million parameters; the output layer shares the embedding."""
    shapes: Shapes = {"wte.weight": (50257, width), "wpe.weight": (1024, width)}
    for layer in range(num_layers):
        parts = {
            "ln_1.weight": (width,), "ln_1.bias": (width,),
            "attn.c_attn.weight": (width, 3 * width), "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,), "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width), "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width), "mlp.c_proj.bias": (width,),
        }  # fmt: skip
        shapes |= {f"h.{layer}.{name}": shape for name, shape in parts.items()}
    return {**shapes, "ln_f.weight": (width,), "ln_f.bias": (width,)}


def llama_7b(width: int = 4096, hidden: int = 11008, num_layers: int = 32) -> Shapes:
    """Returns LLaMA of 7 billion parameters (arXiv 2302.13971, table 2)."""
    shapes: Shapes = {"embed_tokens.weight": (32000, width)}
    for layer in range(num_layers):
        parts = {
            **{f"self_attn.{each}_proj.weight": (width, width) for each in "qkvo"},
            "mlp.gate_proj.weight": (hidden, width),
            "mlp.up_proj.weight": (hidden, width),
            "mlp.down_proj.weight": (width, hidden),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    return {**shapes, "norm.weight": (width,), "lm_head.weight": (32000, width)}


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "gpt2": gpt2,
    "llama-7b": llama_7b,
}
