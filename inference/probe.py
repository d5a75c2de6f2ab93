"""A random adapter, large enough that no model can answer the same with it as without: shows once per engine start that
vLLM applies adapters at all."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

SEED = 20_200


def write_probe(version_folder: Path, folder: Path) -> Path:
    """Write a PEFT folder shaped like the adapter in `version_folder` (same modules, rank and scaling 1).

    A is drawn with variance 1/fan_in and B with variance 1, so that each module adds about as much as its input holds:
    a change far above any rounding, and far below what overflows in 16 bits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = json.loads((version_folder / "adapter_config.json").read_text())
    config |= {"lora_alpha": config["r"], "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(_tensors(version_folder / "adapter_model.safetensors"), folder / "adapter_model.safetensors")
    return folder


def _tensors(weights: Path) -> dict[str, np.ndarray]:
    random = np.random.default_rng(SEED)
    with safe_open(weights, framework="np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
    made = {}
    for name, shape in sorted(shapes.items()):
        scale = 1.0 / math.sqrt(shape[1]) if ".lora_A." in name else 1.0
        made[name] = (random.standard_normal(shape) * scale).astype(np.float32)
    return made
