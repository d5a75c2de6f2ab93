"""What one trainer job is told by its launcher, beyond the run file."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bucket_grpo.report.files import write_text


class TrainerJob(BaseModel):
    """`python -m bucket_grpo.trainer --config trainer.json`."""

    model_config = ConfigDict(extra="forbid")

    run_file: Path
    """The resolved run file."""
    run: str
    incarnation: str
    run_dir: Path
    """Local folder for logs, metrics, the journal and the report."""
    bucket: str
    """Where this job writes: the path of its own mount, or `hf://buckets/<namespace>/<name>`."""
    confirm: str | None = None
    """How to see that a version written through the mount has reached the bucket: the bucket's id on the Hub, or the
    object folder of a local emulation. Not needed when `bucket` is a Hub URL."""
    replicas: list[str] = Field(min_length=1)
    """Base URLs of the agents."""
    proxy_host: str = "127.0.0.1"
    proxy_port: int = Field(default=0, ge=0, le=65535)
    """0: any free port."""
    sync: str = Field(default="deferred", pattern="^(deferred|blocking)$")
    """`deferred`: publishing stops nothing. `blocking`: TRL's own order through the proxy, for comparison."""
    server_timeout_s: float = 600.0
    """How long the trainer waits for a first replica, and for the first version to be live."""
    journal_sample_frac: float = Field(default=0.06, ge=0, le=1)
    max_proxy_restarts: int = 20
    checkpoints: str | None = None
    """Where checkpoints go: a mount of their own, or a Hub URL, so that they are never in the way of a version.
    Default: `bucket`."""
    resume: bool = False
    """Continue from the newest checkpoint that verifies; without one, start from the beginning."""
    resume_from: Path | None = None
    """A checkpoint's folder that is here already; it takes precedence over `resume`."""
    max_training_restarts: int = Field(default=3, ge=0)
    """How often a training process that was killed is started again from its newest checkpoint."""

    @classmethod
    def read(cls, path: Path) -> "TrainerJob":
        return cls.model_validate_json(path.read_text())

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=1))
        return path


class Outcome(BaseModel):
    """`outcome.json` in the run folder: how the training process ended."""

    model_config = ConfigDict(extra="forbid")

    exit_reason: str
    """`finished`, `error`, `superseded`, `terminated`, or `died` where the process left no word."""
    error: str | None = None
    seed: int | None = None
    steps: int | None = None
    wall_clock_s: float | None = None
    """From the start of the training loop to its end."""
    time_to_first_step_s: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    groups: dict[str, Any] = Field(default_factory=dict)
    """`{"trained": n, "dropped": {reason: n}}`."""
    adapter: str | None = None
    """Key of the newest live version."""
    cost_usd: float | None = None
    """What the run's jobs cost; their launcher's steward knows."""

    def write(self, run_dir: Path) -> None:
        write_text(run_dir / "outcome.json", self.model_dump_json(indent=1))
