"""A job as the Hub knows it: what was asked for, how it stands, and how it is told to clients."""

import json
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel

from bucket_grpo.emulator.events import iso
from bucket_grpo.emulator.jobs_hardware import NAMES

Stage = Literal["SCHEDULING", "RUNNING", "COMPLETED", "CANCELED", "ERROR", "DELETED"]
FINAL: tuple[Stage, ...] = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
DEFAULT_TIMEOUT_S = 1800
_LABEL = re.compile(r"[A-Za-z0-9_-]{0,100}\Z")
_NAME = re.compile(r"[A-Za-z0-9._-]{0,100}\Z")


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")


class VolumeSpec(_Model):
    type: Literal["bucket", "model", "dataset", "space"]
    source: str
    mount_path: str
    revision: str | None = None
    read_only: bool = False
    path: str | None = None


class ExposeSpec(_Model):
    ports: list[int] = []
    ports_public: list[int] = []


class NetworkSpec(_Model):
    group: str
    aliases: list[str] = []


class JobSpec(_Model):
    """The body of `POST /api/jobs/{namespace}`. An unknown key is refused, so that a client's mistake shows here."""

    command: list[str] = Field(min_length=1)
    arguments: list[str] = []
    environment: dict[str, str] = {}
    secrets: dict[str, str] = {}
    flavor: str = "cpu-basic"
    timeout_seconds: int = Field(default=DEFAULT_TIMEOUT_S, ge=1)
    attempts: int = Field(default=1, ge=1, le=10)
    labels: dict[str, str] = {}
    volumes: list[VolumeSpec] = []
    expose: ExposeSpec = ExposeSpec()
    network: NetworkSpec | None = None
    docker_image: str | None = None
    space_id: str | None = None
    resource_group_id: str | None = None
    ssh: dict[str, Any] | None = None

    @field_validator("flavor")
    @classmethod
    def _known_flavor(cls, flavor: str) -> str:
        if flavor not in NAMES:
            raise ValueError(f"Invalid flavor {flavor!r}: expected one of {', '.join(NAMES)}")
        return flavor

    @field_validator("labels")
    @classmethod
    def _label_characters(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            if not _LABEL.match(key) or not (_NAME if key == "name" else _LABEL).match(value):
                raise ValueError(f"label {key}={value}: only alphanumerics, '-' and '_', 100 characters at most")
        return labels


@dataclass
class Job:
    """One job. Times are in seconds since 1970. `log` holds `(data, timestamp)` of every line."""

    id: str
    namespace: str
    owner: str
    spec: JobSpec
    folder: Path
    created_at: float = field(default_factory=time.time)
    started_at: float | None = None
    finished_at: float | None = None
    stage: Stage = "SCHEDULING"
    message: str | None = None
    attempt: int = 0
    expose_urls: list[str] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)
    pid: int | None = None
    address: str | None = None
    veth: str | None = None

    @property
    def plain_home(self) -> Path:
        """A plain process's temporary files: under a short path, since a socket's has 107 bytes at most."""
        return Path(tempfile.gettempdir()) / f"bgj-{self.id[-12:]}"

    @property
    def final(self) -> bool:
        return self.stage in FINAL

    def add_line(self, data: str) -> None:
        self.log.append((data, iso(time.time()) or ""))

    def shown(self) -> dict[str, Any]:
        """What the Hub answers; secrets are named, never shown."""
        spec = self.spec
        now = self.finished_at or time.time()
        status: dict[str, Any] = {"stage": self.stage, "message": self.message}
        if self.expose_urls:
            status["exposeUrls"] = self.expose_urls
        return {
            "id": self.id,
            "createdAt": iso(self.created_at),
            "startedAt": iso(self.started_at),
            "finishedAt": iso(self.finished_at),
            "dockerImage": spec.docker_image,
            "spaceId": spec.space_id,
            "command": spec.command,
            "arguments": spec.arguments,
            "environment": spec.environment,
            "secrets": dict.fromkeys(spec.secrets, "") or None,
            "flavor": spec.flavor,
            "timeoutSeconds": spec.timeout_seconds,
            "attempts": spec.attempts,
            "labels": spec.labels,
            "volumes": [volume.model_dump(by_alias=True, exclude_none=True) for volume in spec.volumes],
            "network": spec.network.model_dump() if spec.network else None,
            "status": status,
            "durations": {
                "schedulingSecs": int(self.started_at - self.created_at) if self.started_at else None,
                "runningSecs": int(now - self.started_at) if self.started_at else None,
                "totalSecs": int(now - self.created_at),
            },
            "owner": {"id": f"user-{self.owner}", "name": self.namespace, "type": "user"},
            "initiator": {"type": "user", "id": f"user-{self.owner}", "name": self.owner},
        }

    def save(self) -> None:
        """Leave a record in the job's folder, so that a Hub that starts again still knows the job. No secrets."""
        kept = {name: getattr(self, name) for name in _KEPT}
        spec = self.spec.model_dump(by_alias=True, exclude_none=True, exclude={"secrets"})
        scratch = self.folder / "job.tmp"
        scratch.write_text(json.dumps(kept | {"spec": spec}))
        scratch.replace(self.folder / "job.json")

    @classmethod
    def load(cls, folder: Path) -> "Job":
        """A job of an earlier Hub process: if it was not over, it is now, since its processes ended with the Hub."""
        state = json.loads((folder / "job.json").read_text())
        job = cls(spec=JobSpec.model_validate(state.pop("spec")), folder=folder, **state)
        if not job.final:
            job.stage, job.message, job.finished_at = "ERROR", "the Hub was restarted", time.time()
        return job


_KEPT = ("id", "namespace", "owner", "created_at", "started_at", "finished_at", "stage", "message", "attempt")
