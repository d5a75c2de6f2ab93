"""Which replicas a run has, and which of its parts must be started again. Pure but for the environment's names."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucket_grpo.jobs.hub import is_active, stage
from bucket_grpo.jobs.labels import VLLM, name_of
from bucket_grpo.jobs.plan import PORT, Plan

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

MAX_STARTS = 3
# A listing may miss a job for a moment: it counts as lost once it is missing this often in a row.
MISSING_LOOKS = 3


def replica_url(job: "JobInfo", environment: Mapping[str, str] = os.environ) -> str | None:
    """Where the agent of a running replica is reached: the gateway's URL, or its name in the run's private network."""
    if stage(job) != "RUNNING":
        return None
    if job.network is not None and job.network.aliases:
        return f"http://{environment.get('HF_NETWORK_GROUP_PREFIX', '')}{job.network.aliases[0]}:{PORT}"
    urls = job.status.expose_urls or []
    return urls[0].rstrip("/") if urls else None


@dataclass
class FleetWatch:
    """Follows the replicas of one incarnation from look to look."""

    plan: Plan
    starts: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)

    def urls(self, jobs: Sequence["JobInfo"]) -> list[str]:
        """The URLs of all running replicas, in the order of their names."""
        newest = self._newest(jobs)
        return [url for part in sorted(newest) if (url := replica_url(newest[part])) is not None]

    def lost(self, jobs: Sequence["JobInfo"]) -> list[int]:
        """The replicas to start again: those that failed, and those that the Hub does not list any more.

        One that was cancelled stays so: somebody wanted that. After `MAX_STARTS` a part is given up.
        """
        newest = self._newest(jobs)
        self.seen |= set(newest)
        again = []
        for index in range(self.plan.replicas):
            part = f"vllm-{index}"
            job = newest.get(part)
            self.missing[part] = self.missing[part] + 1 if job is None and part in self.seen else 0
            failed = job is not None and stage(job) in ("ERROR", "DELETED")
            if not failed and self.missing[part] < MISSING_LOOKS:
                continue
            if self.starts[part] >= MAX_STARTS - 1:
                self.given_up.add(part)
                continue
            self.starts[part] += 1
            self.missing[part] = 0
            again.append(index)
        return again

    def _newest(self, jobs: Sequence["JobInfo"]) -> dict[str, "JobInfo"]:
        newest: dict[str, JobInfo] = {}
        for job in jobs:  # oldest first
            name = name_of(job)
            if name is not None and name.role == VLLM and (name.part not in newest or not is_active(newest[name.part])):
                newest[name.part] = job
        return newest
