"""The one place that leans on TRL 1.16: `AsyncGRPOTrainer` with publishing that stops nothing.

TRL's own order at a sync is pause, save, load on the server, resume, bump the version that rollouts ask for. Here
pause and resume do nothing (a versioned adapter needs none), "load" hands the saved adapter to the publisher thread
and returns, and the bump reaches the rollout worker only when the version is live on the fleet. TRL's code is not
patched: the trainer is a subclass, its HTTP client and the worker's `update_model_version` are wrapped.
"""

import json
import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.vllm_client import VLLMClient

from bucket_grpo.bucket_sync.publisher import Publisher
from bucket_grpo.bucket_sync.version_file import Canary
from bucket_grpo.trainer.canary import expected_logprobs
from bucket_grpo.trainer.ledger import STALE, Ledger, ObservedQueue
from bucket_grpo.trainer.lineage import Lineage, PromptOrder

VERSIONED_NAME = re.compile(r".+-v(\d+)\Z")


def version_number(lora_name: str) -> int:
    match = VERSIONED_NAME.match(lora_name)
    if not match:
        raise ValueError(f"TRL asked for the adapter {lora_name!r}, which is not of the form <name>-v<N>")
    return int(match[1])


class DeferredBump:
    """Stands in front of the worker's `update_model_version`: passes a version on when it is live, not before.

    TRL bumps when it has published; what it says then is only recorded (`accepted`).
    """

    def __init__(self, tell_worker: Callable[[int], None]) -> None:
        self._tell_worker = tell_worker
        self._lock = threading.Lock()
        self.accepted = 0
        self.live = 0

    def accept(self, number: int) -> None:
        with self._lock:
            self.accepted = number

    def went_live(self, number: int) -> None:
        with self._lock:
            if number > self.live:
                self.live = number
                self._tell_worker(number)

    @property
    def lag(self) -> int:
        """Newest accepted version minus the live one."""
        return max(0, self.accepted - self.live)


class StallFreeClient(VLLMClient):
    """TRL's client with the calls of a sync redirected to the publisher; the read-only calls still go to the proxy."""

    def __init__(
        self,
        server_url: str,
        server_timeout: float,
        *,
        publisher: Publisher,
        canary: Callable[[], Canary | None],
        step: Callable[[], int],
        first_version_timeout_s: float,
    ) -> None:
        super().__init__(server_url, server_timeout)
        self._publisher = publisher
        self._canary = canary
        self._step = step
        self._first_version_timeout_s = first_version_timeout_s
        self._first: int | None = None

    def pause(self, timeout: int = 1800) -> None:
        """Nothing stops: rollouts in flight finish under the version that they started with."""

    def resume(self, timeout: int = 1800) -> None:
        """Nothing was paused."""

    def load_lora_adapter(self, lora_name: str, lora_path: str, timeout: int = 1800) -> None:
        """Accept the version and return; the publisher goes on behind. Only the first one is waited for."""
        number = version_number(lora_name)
        self._publisher.submit(number, self._step(), Path(lora_path), self._canary())
        if self._first is None:
            self._publisher.wait_live(number, self._first_version_timeout_s)
            self._first = number

    def unload_lora_adapter(self, lora_name: str, timeout: int = 1800) -> None:
        """Tell the fleet that TRL no longer needs the version; a name it never had is no error."""
        self._publisher.retire(version_number(lora_name))


class ResumedLoop(AsyncRolloutWorker._loop_cls):
    """TRL's rollout loop, first through the rows that a resumed run still owes, then through whole epochs."""

    def __init__(self, *, first_rows: list[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._dataset_iter = iter(self.dataset.select(first_rows))


class BucketGRPOTrainer(AsyncGRPOTrainer):
    """`AsyncGRPOTrainer` whose adapter versions go through a bucket.

    Args beyond TRL's:
        make_publisher: called once the trainer stands, with the callback that the publisher calls for each version
            that went live (from its own thread, ascending). None: TRL publishes in its own, blocking order.
        canary_prompt: token ids for the canary.
        first_version_timeout_s: how long the first version may take to go live.
        on_sample: is shown every `RolloutSample` that reaches the trainer.
        on_checkpoint: is given each saved checkpoint's folder and step.

    Raises `RuntimeError` if TRL did not choose adapter-only sync: it would fall back to NCCL with only a warning.
    """

    def __init__(
        self,
        *args: Any,
        make_publisher: Callable[[Callable[[int], None]], Publisher] | None,
        canary_prompt: list[int],
        first_version_timeout_s: float = 300.0,
        on_sample: Callable[[Any], None] = lambda _sample: None,
        on_checkpoint: Callable[[Path, int], None] = lambda _folder, _step: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not self._lora_sync:
            raise RuntimeError(
                "TRL did not choose adapter-only sync, so it would stream merged weights over NCCL. Check that the "
                "replicas run with --enable-lora, that data_parallel_size is 1, and that the LoRA config is one that "
                "vLLM can serve (no DoRA, no modules_to_save, no bias)."
            )
        self._canary_prompt = canary_prompt
        self._canary: Canary | None = None
        self._on_sample = on_sample
        self._on_checkpoint = on_checkpoint
        self._lineage_before = Lineage()
        self._order = PromptOrder(len(self.train_dataset), self._lineage_before)
        self._trained_groups = self.ledger = Ledger()
        self.publisher: Publisher | None = None
        self.bump: DeferredBump | None = None
        if self.accelerator.is_main_process:
            self.rollout_queue = ObservedQueue(self.rollout_worker.rollout_buffer, self._observe)
        if self.accelerator.is_main_process and make_publisher is not None:
            self.bump = DeferredBump(self.rollout_worker.update_model_version)
            self.rollout_worker.update_model_version = self.bump.accept
            self.publisher = make_publisher(self.bump.went_live)
            self.vllm_client = StallFreeClient(
                self.args.vllm_server_base_url,
                self.args.vllm_server_timeout,
                publisher=self.publisher,
                canary=lambda: self._canary,
                step=lambda: self.state.global_step,
                first_version_timeout_s=first_version_timeout_s,
            )

    @property
    def lineage(self) -> Lineage:
        """What became of each prompt group so far, over all starts of the run."""
        return self._lineage_before.extended(
            map(self._order.position, self.ledger),
            {self._order.position(group): reason for group, reason in self.ledger.dropped.items()},
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if not self.accelerator.is_main_process:
            return
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        lineage = self.lineage
        lineage.write(folder)
        # TRL would go on at its first untrained group, which one dropped group holds back for ever. Its count of done
        # groups decides when the epochs are over.
        state = {"prompt_index": len(lineage.settled()), "model_version": self.model_version}
        (folder / "rollout_state.json").write_text(json.dumps(state))
        self._on_checkpoint(folder, step)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint = kwargs.get("resume_from_checkpoint")
        if checkpoint and self.accelerator.is_main_process:
            self._lineage_before = Lineage.read(Path(checkpoint))
            self._order = PromptOrder(len(self.train_dataset), self._lineage_before)
            self.rollout_worker._loop_cls = ResumedLoop
            self.rollout_worker._loop_kwargs["first_rows"] = self._order.first_rows()
        return super()._inner_training_loop(*args, **kwargs)

    def _sync_weight(self) -> None:
        started = time.perf_counter()
        self._canary = expected_logprobs(self.model, self._canary_prompt, str(self.model.dtype).removeprefix("torch."))
        super()._sync_weight()
        self._metrics["train"]["bucket_grpo/stall_s"].append(time.perf_counter() - started)

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's loss; beside it how far this policy is from the one that answered, token by token.

        TRL's own `ratio` cannot show it: its mean is 1 whichever policy answered.
        """
        outputs: Any = None

        def forward(**model_inputs: Any) -> Any:
            nonlocal outputs
            outputs = model(**model_inputs)
            return outputs

        loss = super().compute_loss(forward, inputs, *args, **kwargs)
        with torch.no_grad():
            selected = inputs["token_index"] >= 0
            logprobs = outputs.log_probs.flatten()[inputs["token_index"][selected]]
            distance = (logprobs - inputs["old_log_probs"][selected]).abs()
        metrics = self._metrics["train"]
        metrics["bucket_grpo/abs_log_ratio_mean"].append((distance.sum().item(), float(distance.numel())))
        if distance.numel():
            metrics["bucket_grpo/abs_log_ratio_max"].append(distance.max().item())
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.is_main_process:
            self.ledger.commit()
        return loss

    def _observe(self, sample: Any) -> None:
        """See a sample as TRL is about to: what it earned, whether its group teaches anything, whether TRL drops it."""
        self._on_sample(sample)
        if not math.isnan(std := sample.metrics["reward_std"]):
            self._metrics["train"]["bucket_grpo/zero_std_frac"].append(float(std == 0))
        if self.model_version - sample.model_version > self.args.max_staleness:
            self.ledger.drop(sample.group_id, STALE)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.bump is not None:
            self._metrics["train"]["bucket_grpo/lag"].append(float(self.bump.lag))
            self._metrics["train"]["bucket_grpo/live_version"].append(float(self.bump.live))
            self._metrics["train"]["bucket_grpo/accepted_version"].append(float(self.bump.accepted))
        super().log(logs, start_time)
