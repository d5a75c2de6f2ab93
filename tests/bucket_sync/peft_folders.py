import json
from pathlib import Path

import numpy as np

from bucket_grpo.bucket_sync.safetensors_file import TensorInfo, header_for

RUN, INCARNATION, BASE = "sanity-r1", "20261130t154500z-a1b2c3", "tiny/base"

NUMPY_DTYPE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def write_adapter(
    folder: Path,
    *,
    tensors: dict[str, tuple[str, np.ndarray]] | None = None,
    seed: int = 0,
    width: int = 8,
    **config: object,
) -> Path:
    """A PEFT folder of a one-layer rank-1 adapter, written without PEFT; `config` overrides fields of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed)
    if tensors is None:
        prefix = "base_model.model.model.layers.0.self_attn"
        tensors = {}
        for module in ("q_proj", "v_proj"):
            tensors[f"{prefix}.{module}.lora_A.weight"] = ("F32", values.normal(size=(1, width)).astype("<f4"))
            tensors[f"{prefix}.{module}.lora_B.weight"] = ("F32", values.normal(size=(width, 1)).astype("<f4"))
    index, body = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array, dtype=NUMPY_DTYPE[dtype]).tobytes()
        index[name] = TensorInfo(dtype, array.shape, len(body), len(body) + len(raw))
        body += raw
    (folder / "adapter_model.safetensors").write_bytes(header_for({"format": "pt"}, index) + body)
    fields = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": 2,
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": BASE,
        "bias": "none",
        "rank_pattern": {},
        "alpha_pattern": {},
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder
