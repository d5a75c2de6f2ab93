"""Will it fit? A rough, documented estimate of GPU memory for each role, from the model's shape alone.

Replica: weights + 1.5 GiB for CUDA and vLLM itself + the adapters; what is left of 90 % of the GPU is KV cache.
Trainer: weights (sharded) + activations of one micro-batch + its float32 logits twice (logprobs and their gradient).
A LoRA of rank 1 and its optimizer state are negligible. Activations without checkpointing: 34 bytes per token, layer
and hidden unit in 16 bits; with it, 2 bytes and one layer's worth.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

from bucket_grpo.jobs.hardware import Flavor

GIB = 2**30
RUNTIME_GIB = 1.5
USABLE_FRAC = 0.9
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """What the estimate needs to know of a decoder-only model."""

    parameters: float
    layers: int
    hidden: int
    kv_width: int  # key/value heads × head size
    vocabulary: int


# Published configurations; a key matches the end of a model's name, with any of the suffixes that keep the shape.
SHAPES = {
    "Qwen2.5-0.5B": Shape(0.494e9, 24, 896, 128, 151_936),
    "Qwen2.5-1.5B": Shape(1.54e9, 28, 1536, 256, 151_936),
    "Qwen2.5-3B": Shape(3.09e9, 36, 2048, 256, 151_936),
    "Qwen2.5-7B": Shape(7.62e9, 28, 3584, 512, 152_064),
    "SmolLM2-135M": Shape(0.135e9, 30, 576, 192, 49_152),
    "SmolLM2-360M": Shape(0.362e9, 32, 960, 320, 49_152),
    "SmolLM2-1.7B": Shape(1.71e9, 24, 2048, 2048, 49_152),
    "builtin:tiny": Shape(1.0e6, 4, 128, 128, 262),
    "builtin:smollm2": Shape(0.135e9, 30, 576, 192, 49_152),
}


def shape_of(model: str) -> Shape | None:
    """The shape of a model that is known by name; None for any other (nothing is asked of the network)."""
    name = re.sub(r"-(Math|Coder|Instruct|Base|Chat)(?=-|$)", "", model.rsplit("/", 1)[-1], flags=re.IGNORECASE)
    return SHAPES.get(model) or SHAPES.get(name)


@dataclass(frozen=True)
class VramEstimate:
    """GiB on one GPU. `kv_cache_tokens` is how many tokens a replica can hold at once; None for a trainer."""

    flavor: str
    gpu_gib: float
    weights_gib: float
    activations_gib: float
    needed_gib: float
    fits: bool
    kv_cache_tokens: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def replica_vram(shape: Shape, flavor: Flavor, dtype: str, max_model_len: int) -> VramEstimate:
    weights = shape.parameters * BYTES[dtype] / GIB
    fixed = weights + RUNTIME_GIB
    token_bytes = 2 * shape.layers * shape.kv_width * BYTES[dtype]
    tokens = max(0, int((USABLE_FRAC * flavor.vram_gib - fixed) * GIB / token_bytes))
    needed = fixed + max_model_len * token_bytes / GIB
    return VramEstimate(
        flavor.name,
        flavor.vram_gib,
        round(weights, 2),
        0.0,
        round(needed, 2),
        needed <= USABLE_FRAC * flavor.vram_gib,
        tokens,
    )


def trainer_vram(
    shape: Shape, flavor: Flavor, dtype: str, tokens_per_microbatch: int, gradient_checkpointing: bool
) -> VramEstimate:
    weights = shape.parameters * BYTES[dtype] / max(1, flavor.gpus) / GIB
    unit = tokens_per_microbatch * shape.hidden * BYTES[dtype] / 2
    activations = unit * (2 * shape.layers + 34) if gradient_checkpointing else unit * 34 * shape.layers
    logits = 2 * 4 * tokens_per_microbatch * shape.vocabulary
    working = (activations + logits) / GIB
    needed = weights + working + RUNTIME_GIB
    return VramEstimate(
        flavor.name,
        flavor.vram_gib,
        round(weights, 2),
        round(working, 2),
        round(needed, 2),
        needed <= USABLE_FRAC * flavor.vram_gib,
    )
