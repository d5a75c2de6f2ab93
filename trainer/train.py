"""The training process: run file → `AsyncGRPOConfig` → TRL's trainer on our seam → metrics and an outcome."""

import argparse
import importlib.metadata
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import torch
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig

from bucket_grpo.bucket_sync.checkpoint_uploader import CheckpointUploader
from bucket_grpo.bucket_sync.checkpoints import restore_checkpoint
from bucket_grpo.bucket_sync.proxy_client import ProxyClient
from bucket_grpo.bucket_sync.publisher import Publisher, PublishFailed, Superseded
from bucket_grpo.bucket_sync.retention import Janitor, RetentionRules, RetentionThread
from bucket_grpo.bucket_sync.store_contract import Store, StoreError
from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.bucket_sync.version_file import VersionRejected
from bucket_grpo.bucket_sync.vocabulary import version_key
from bucket_grpo.report.completions import rollout_key
from bucket_grpo.report.files import write_json, write_text
from bucket_grpo.runtime.processes import end_with_parent
from bucket_grpo.trainer import tree_attention
from bucket_grpo.trainer.canary import canary_tokens
from bucket_grpo.trainer.chat import TokenizerError, prepare_tokenizer
from bucket_grpo.trainer.datasets import load_train_dataset
from bucket_grpo.trainer.heartbeat import Heartbeat
from bucket_grpo.trainer.job import Outcome, TrainerJob
from bucket_grpo.trainer.reward_guard import load_rewards, try_rewards
from bucket_grpo.trainer.run_file import RunFile, RunFileError
from bucket_grpo.trainer.tiny_model import resolve_model
from bucket_grpo.trainer.trl_seam import BucketGRPOTrainer

VERSIONS_OF = ("trl", "peft", "transformers", "torch", "huggingface_hub", "accelerate")


class Terminated(BaseException):
    """SIGTERM came before the first step was done."""


class RunFolder(TrainerCallback):
    """Writes each logged step to `metrics.jsonl`; stops the training cleanly after SIGTERM, or when superseded."""

    def __init__(self, run_dir: Path, heartbeat: Heartbeat) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.heartbeat = heartbeat
        self._rollouts = open(run_dir / "rollouts.jsonl", "a")  # noqa: SIM115 - open as long as the process
        self.started = time.monotonic()
        self.first_step_s: float | None = None
        self.terminated = False

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        self.started = time.monotonic()
        drop_rows_after(self.path, state.global_step)

    def on_step_end(self, _args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        if self.first_step_s is None:
            self.first_step_s = time.monotonic() - self.started
        if self.heartbeat.superseded:
            raise Superseded(self.heartbeat.superseded)
        if self.terminated:
            control.should_save = True
            control.should_training_stop = True

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any] | None = None, **_kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self._rollouts.flush()
        row = {"step": state.global_step, "time": time.time(), **logs}
        with open(self.path, "a") as file:
            file.write(json.dumps(row, default=float) + "\n")

    def on_sample(self, sample: Any) -> None:
        """Keep a sample's reward where the report finds it: the journal of the proxy knows no rewards."""
        prompt_tokens = int(sample.completion_mask.argmax())
        ids = sample.input_ids.tolist()
        reward = sample.metrics["reward"]
        row = {
            "key": rollout_key(ids[:prompt_tokens], ids[prompt_tokens:]),
            "reward": None if math.isnan(reward) else reward,
            "group": sample.group_id,
            "version": sample.model_version,
        }
        self._rollouts.write(json.dumps(row) + "\n")

    def on_sigterm(self, _signum: int, _frame: FrameType | None) -> None:
        self.terminated = True
        if self.first_step_s is None:  # still waiting for replicas or the first version: there is nothing to save
            raise Terminated


def drop_rows_after(path: Path, step: int) -> None:
    """Rows of steps that a resume trains again would stand twice: keep the one curve of the final lineage."""
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines(keepends=True) if _is_whole_row(line, step)]
    write_text(path, "".join(kept))


def _is_whole_row(line: str, last_step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= last_step)
    except ValueError:  # the process was killed while it wrote the line
        return False


def build_config(run: RunFile, job: TrainerJob, proxy_url: str) -> AsyncGRPOConfig:
    """TRL's config: what the run file says, and what follows from where the job runs."""
    on_cpu = {} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}
    return AsyncGRPOConfig(
        **{
            **on_cpu,
            **run.trl_arguments(),
            # Local disk: a slow bucket must never be in the way of a step.
            "output_dir": str(job.run_dir / "trl"),
            "vllm_server_base_url": proxy_url,
            "vllm_server_timeout": job.server_timeout_s,
        }
    )


def build_trainer(
    run: RunFile, job: TrainerJob, store: Store, proxy_url: str, folder: RunFolder, uploader: CheckpointUploader
) -> BucketGRPOTrainer:
    model = resolve_model(run.model_name_or_path)
    tokenizer = prepare_tokenizer(AutoTokenizer.from_pretrained(model))
    dataset = load_train_dataset(run, tokenizer)
    rewards = load_rewards(run, failure_log=job.run_dir / "reward_failures.jsonl")
    try_rewards(rewards, dataset[0])
    tree_attention.install_where_needed()

    def make_publisher(on_live: Callable[[int], None]) -> Publisher:
        return Publisher(
            store,
            proxy_url,
            run=job.run,
            incarnation=job.incarnation,
            base_model=run.model_name_or_path,
            max_staleness=run.max_staleness,
            on_live=on_live,
        )

    return BucketGRPOTrainer(
        model=model,
        args=build_config(run, job, proxy_url),
        reward_funcs=rewards,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LoraConfig(**run.lora_arguments()),
        callbacks=[folder],
        make_publisher=make_publisher if job.sync == "deferred" else None,
        canary_prompt=canary_tokens(tokenizer, dataset[0]["prompt"]),
        first_version_timeout_s=job.server_timeout_s,
        on_sample=folder.on_sample,
        on_checkpoint=uploader.submit,
    )


def train(job: TrainerJob, proxy_url: str) -> Outcome:
    """Train to the end. Raises what stops the run; the publisher's figures are left in the run folder in any case."""
    run = RunFile.load(job.run_file)
    store = open_store(job.bucket, confirm=job.confirm)
    heartbeat = Heartbeat(store, job.run, job.incarnation)
    try:
        outcome = _train(run, job, store, proxy_url, RunFolder(job.run_dir, heartbeat))
    except BaseException:
        heartbeat.stop("failed")
        raise
    outcome.write(job.run_dir)
    heartbeat.stop("finished" if outcome.exit_reason == "finished" else "failed")
    return outcome


def _train(run: RunFile, job: TrainerJob, store: Store, proxy_url: str, folder: RunFolder) -> Outcome:
    signal.signal(signal.SIGTERM, folder.on_sigterm)
    checkpoints = open_store(job.checkpoints, confirm=job.confirm) if job.checkpoints else store
    checkpoint = str(job.resume_from) if job.resume_from else restore(checkpoints, job) if job.resume else None
    uploader = CheckpointUploader(checkpoints, job.run, job.incarnation, job.run_dir / "spool")
    trainer = build_trainer(run, job, store, proxy_url, folder, uploader)
    sweeper = start_sweeper(run, job, store, proxy_url)
    started = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        wall_clock_s = time.monotonic() - started
        trainer.rollout_worker.stop()
        if sweeper is not None:
            sweeper.close(timeout=5)
        close(trainer, uploader, job.run_dir, hurry=folder.terminated)
        save_proxy_status(job.run_dir, proxy_url)
    if trainer.publisher is not None and not folder.terminated:
        trainer.publisher.check()
    trainer.lineage.write(job.run_dir)
    live = trainer.publisher.live if trainer.publisher is not None else trainer.model_version
    return Outcome(
        exit_reason="terminated" if folder.terminated else "finished",
        seed=trainer.args.seed,
        steps=trainer.state.global_step,
        wall_clock_s=wall_clock_s,
        time_to_first_step_s=folder.first_step_s,
        groups=trainer.lineage.summary(),
        adapter=version_key(job.run, job.incarnation, live) if live else None,
        versions={name: importlib.metadata.version(name) for name in VERSIONS_OF},
    )


def start_sweeper(run: RunFile, job: TrainerJob, store: Store, proxy_url: str) -> RetentionThread | None:
    """Deletes versions that nobody needs any more; None where the run file keeps all."""
    if run.retention.window is None:
        return None
    rules = RetentionRules(
        window=run.retention.window,
        every=run.retention.every,
        dead_after=timedelta(days=run.retention.dead_after_days),
    )
    wanted = ProxyClient(proxy_url).wanted
    return RetentionThread(Janitor(store, job.run, job.incarnation, wanted, rules))


def close(trainer: BucketGRPOTrainer, uploader: CheckpointUploader, run_dir: Path, *, hurry: bool) -> None:
    """Bring up what is under way. In a hurry (after SIGTERM) there are 25 seconds in all, and TRL's worker had some."""
    try:
        uploader.close(timeout=12 if hurry else 120)
    except TimeoutError as error:
        print(f"the last checkpoint may be missing in the bucket: {error}", file=sys.stderr)
    if trainer.publisher is not None:
        trainer.publisher.close(timeout=3 if hurry else 30)
        write_json(run_dir / "publisher.json", trainer.publisher.stats())


def restore(checkpoints: Store, job: TrainerJob) -> str | None:
    """The newest checkpoint that verifies, brought to local disk; None if the run never wrote one."""
    restored = restore_checkpoint(checkpoints, job.run, job.run_dir / "restored" / job.incarnation)
    if restored is None:
        print("no checkpoint yet: starting from the beginning", flush=True)
        return None
    print(f"resuming from step {restored.step} of incarnation {restored.incarnation}", flush=True)
    return str(restored.folder)


def save_proxy_status(run_dir: Path, proxy_url: str) -> None:
    """Keep the proxy's last word for the report. The proxy may be gone when the run failed: then there is none."""
    try:
        status = httpx.get(f"{proxy_url}/status", timeout=5, trust_env=False).json()
    except (httpx.HTTPError, ValueError) as error:
        print(f"no last status of the proxy: {error}", file=sys.stderr)
        return
    write_json(run_dir / "proxy_status.json", status)


def root_cause(error: BaseException) -> str:
    """The innermost cause's message: TRL wraps what happened in its worker in several layers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bucket_grpo.trainer.train", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--proxy-url", required=True)
    arguments = parser.parse_args()
    end_with_parent(signal.SIGTERM)
    job = TrainerJob.read(arguments.config)
    try:
        outcome = train(job, arguments.proxy_url)
    except Terminated:
        outcome = Outcome(exit_reason="terminated", error="stopped before the first step")
    except Superseded as error:
        outcome = Outcome(exit_reason="superseded", error=str(error))
    except (PublishFailed, VersionRejected, StoreError, RunFileError, TokenizerError) as error:
        outcome = Outcome(exit_reason="error", error=str(error))
    except Exception as error:
        Outcome(exit_reason="error", error=root_cause(error)).write(job.run_dir)
        raise
    if outcome.error:
        outcome.write(job.run_dir)
        print(outcome.error, file=sys.stderr)
        return 1
    return 0 if outcome.exit_reason == "finished" else 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
