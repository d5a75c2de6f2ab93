"""The labels that make a run's jobs findable: they, and the bucket, are all the state that there is."""

from dataclasses import dataclass
from typing import Any

from bucket_grpo.bucket_sync.vocabulary import check_incarnation, check_run_name

APP = "bucket-grpo"
TRAINER, VLLM, CHECK, LAUNCHER = "trainer", "vllm", "preflight", "launcher"


@dataclass(frozen=True)
class JobName:
    """Which part of which run a job is. `part` is unique within an incarnation: `trainer`, `vllm-0`, …"""

    run: str
    incarnation: str
    role: str
    part: str

    def __post_init__(self) -> None:
        check_run_name(self.run)
        check_incarnation(self.incarnation)

    @property
    def labels(self) -> dict[str, str]:
        return {
            "app": APP,
            "run": self.run,
            "incarnation": self.incarnation,
            "role": self.role,
            "part": self.part,
            "name": f"{self.run}-{self.part}",
        }

    @property
    def lookup(self) -> dict[str, str]:
        """The labels that only this job, and a job posted twice by mistake, can have."""
        return {"run": self.run, "incarnation": self.incarnation, "part": self.part}


def name_of(job: Any) -> JobName | None:
    """What a `JobInfo`'s labels say it is; None for a job that is not ours."""
    labels = job.labels or {}
    if labels.get("app") != APP or not {"run", "incarnation", "role", "part"} <= labels.keys():
        return None
    try:
        return JobName(labels["run"], labels["incarnation"], labels["role"], labels["part"])
    except ValueError:
        return None
