"""One base model on which adapters change places, and what each of them says of given completions.

It goes the way a PEFT user would: transformers' own forward, PEFT's LoRA modules, float32. Only the adapter's tensors
are exchanged, so hundreds of versions cost one load of the base.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from bucket_grpo.bucket_sync.safetensors_file import header_for
from bucket_grpo.bucket_sync.version_file import VerifiedVersion
from bucket_grpo.report.journal import Sample

# Logits of one batch, B·T·V float32 values, take at most 512 MiB; log_softmax needs as much again.
MAX_LOGITS = 2**27
MAX_BATCH = 64
# Fields that describe where an adapter came from, not what it computes.
PROVENANCE = {"inference_mode", "revision", "peft_version", "base_model_name_or_path", "auto_mapping"}


class PolicySwitch:
    """A base model with one adapter slot.

    Args:
        base_model: name or path, as for `from_pretrained`.
        temperature: the logits are divided by it before the softmax, as vLLM's processed logprobs are.
    """

    def __init__(self, base_model: str, *, temperature: float = 1.0) -> None:
        self.base_model = base_model
        self._temperature = temperature
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        disable_progress_bar()  # the audit shows its own
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32).eval()
        self._model.to(device=self._device)
        self._vocabulary = self._model.config.get_text_config().vocab_size
        self._peft: PeftModel | None = None
        self._config: dict[str, object] | None = None

    def use(self, version: VerifiedVersion) -> None:
        """Put the version's adapter on the base, in the place of the one before.

        Raises `ValueError` if the base has no place for one of its tensors, or the adapter no tensor for a place.
        """
        config = {key: value for key, value in version.adapter_config.items() if key not in PROVENANCE}
        if self._peft is None or config != self._config:
            if self._peft is not None:
                self._model = self._peft.unload()
            lora = LoraConfig.from_peft_type(**{**version.adapter_config, "base_model_name_or_path": self.base_model})
            self._peft = get_peft_model(self._model, lora).eval()
            self._config = config
        tensors = safetensors.torch.load(header_for({"format": "pt"}, version.tensors) + bytes(version.body))
        places = sum(1 for name, _ in self._peft.named_parameters() if ".lora_" in name)
        loaded: Any = set_peft_model_state_dict(self._peft, tensors)
        unexpected = loaded.unexpected_keys
        if unexpected or places != len(tensors):
            raise ValueError(
                f"{version.ref.key} does not fit {self.base_model}: {len(tensors)} tensors for {places} places"
                + (f"; no place for {unexpected[0]}" if unexpected else "")
            )

    def batches(self, samples: Sequence[Sample]) -> Iterator[list[int]]:
        """Indices of `samples` in batches of similar length that fit in memory."""
        lengths = [len(s.prompt) + len(s.output) for s in samples]
        batch: list[int] = []
        for i in sorted(range(len(samples)), key=lambda i: lengths[i]):
            if batch and (len(batch) == MAX_BATCH or (len(batch) + 1) * lengths[i] * self._vocabulary > MAX_LOGITS):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    @torch.inference_mode()
    def max_abs_diffs(self, samples: Sequence[Sample]) -> list[float]:
        """For each sample, max over its tokens of |logprob here − logprob reported|, in nats."""
        reported = (torch.tensor(s.logprobs) for s in samples)
        return [
            (here_T - there_T).abs().max().item()
            for here_T, there_T in zip(self._logprobs(samples), reported, strict=True)
        ]

    def _logprobs(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """One float32 tensor of shape `(len(output),)` per sample. Padding is on the right: nothing attends to it."""
        assert self._peft is not None, "use() comes first"
        width = max(len(s.prompt) + len(s.output) for s in samples)
        tokens_BT = torch.zeros((len(samples), width), dtype=torch.long)
        mask_BT = torch.zeros_like(tokens_BT)
        for row, s in enumerate(samples):
            ids = torch.tensor(s.prompt + s.output)
            tokens_BT[row, : len(ids)] = ids
            mask_BT[row, : len(ids)] = 1
        first = min(len(s.prompt) for s in samples) - 1  # the position that predicts the first output token of all
        logits_BKV = self._peft(
            input_ids=tokens_BT.to(self._device),
            attention_mask=mask_BT.to(self._device),
            use_cache=False,
            logits_to_keep=width - first,
        ).logits
        logprobs_BKV = torch.log_softmax(logits_BKV.float() / self._temperature, dim=-1)
        found = []
        for row, s in enumerate(samples):
            start = len(s.prompt) - 1 - first
            chosen_T = torch.tensor(s.output, device=self._device)[:, None]
            found.append(logprobs_BKV[row, start : start + len(s.output)].gather(1, chosen_T)[:, 0].cpu())
        return found
