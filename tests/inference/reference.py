"""What PEFT computes on its own: the policy that a replica claims to serve."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from bucket_grpo.bucket_sync.version_file import Canary


def random_adapter(model: str, folder: Path, seed: int, base: str, scale: float = 0.1) -> Path:
    """A rank-1 all-linear adapter with random weights, saved by PEFT."""
    torch.manual_seed(seed)
    config = LoraConfig(r=1, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=scale)
    policy.save_pretrained(folder)
    config_file = (
        folder / "adapter_config.json"
    )  # renamed afterwards: while saving, PEFT would look for `base` on the Hub
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"base_model_name_or_path": base}))
    return folder


@torch.no_grad()
def logprobs(model: str, adapter: Path | None, ids: list[int]) -> list[float]:
    """Log-probability of `ids[1:]`, each given the ids before it, in float32."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        policy = PeftModel.from_pretrained(policy, str(adapter))
    ids_T = torch.tensor(ids)
    logprobs_TV = torch.log_softmax(policy(ids_T[None]).logits[0, :-1], dim=-1)
    return logprobs_TV.gather(1, ids_T[1:, None])[:, 0].tolist()


def canary(model: str, adapter: Path, ids: list[int]) -> Canary:
    return Canary(prompt=ids, logprobs=logprobs(model, adapter, ids), dtype="float32")
