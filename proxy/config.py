"""What the proxy is told at start: a strict JSON file, and two secrets that only ever come from the environment."""

import ipaddress
import json
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from bucket_grpo.bucket_sync.vocabulary import check_incarnation, check_run_name

API_KEY_ENV = "BUCKET_GRPO_API_KEY"
AGENT_TOKEN_ENV = "BUCKET_GRPO_TOKEN"


class ProxyConfig(BaseModel):
    """Configuration of one proxy. Times are in seconds; an unknown key is an error.

    The bounds are chosen so that parking and retrying end before a client gives up: keep `request_timeout_s` below
    TRL's `request_timeout`.
    """

    model_config = ConfigDict(extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    run: str
    incarnation: str
    lora_name: str = Field(default="trl-policy", description="TRL names its versions `<lora_name>-v<N>`")
    base_model: str = Field(description="the name under which the replicas serve the base model")
    dtype: str | None = Field(
        default=None, description="what the trainer computes in; a replica with another is refused"
    )
    replicas: list[str] = Field(default_factory=list, description="URLs of the agents; PUT /replicas replaces them")
    journal_dir: Path
    journal_sample_frac: float = Field(default=0.06, ge=0, le=1)
    live_grace_s: float = Field(default=5.0, ge=0, description="a version is live this long after its first READY")
    fail_grace_s: float = Field(default=60.0, ge=0, description="how long a starting replica may still save a version")
    park_timeout_s: float = Field(default=90.0, gt=0)
    request_timeout_s: float = Field(default=570.0, gt=0, description="bound on a request, with all its retries")
    max_attempts: int = Field(default=6, ge=1)
    stall_after_s: float = Field(default=30.0, gt=0)
    stall_retry_s: float = Field(default=60.0, gt=0)
    rebuild_grace_s: float = Field(
        default=10.0, ge=0, description="after a start, how long to wait for every agent's word"
    )
    max_body_bytes: int = Field(default=8 << 20, gt=0)
    max_header_bytes: int = Field(default=32 << 10, gt=0)
    bucket: str | None = Field(default=None, description="path or hf://buckets/… ; only for scripts that load by path")
    confirm: str | None = Field(
        default=None, description="where a version that was written through a mount shows once it is in the bucket"
    )

    @field_validator("run")
    @classmethod
    def _run(cls, run: str) -> str:
        return check_run_name(run)

    @field_validator("incarnation")
    @classmethod
    def _incarnation(cls, incarnation: str) -> str:
        return check_incarnation(incarnation)

    @field_validator("replicas")
    @classmethod
    def _replicas(cls, urls: list[str]) -> list[str]:
        return check_replica_urls(urls)

    @model_validator(mode="after")
    def _names_differ(self) -> "ProxyConfig":
        if self.base_model.startswith(f"{self.lora_name}-v"):
            raise ValueError(f"base_model {self.base_model!r} reads as a version of {self.lora_name!r}")
        return self

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def check_replica_urls(urls: list[str]) -> list[str]:
    """Agent URLs without a trailing slash, in order, each once; `ValueError` for anything but http(s)://host."""
    checked: dict[str, None] = {}
    for url in urls:
        if not url.startswith(("http://", "https://")) or not url.split("//", 1)[1].strip("/") or "@" in url:
            raise ValueError(f"replica {url!r} is not an http:// or https:// URL without credentials")
        checked[url.rstrip("/")] = None
    return list(checked)


class Secrets(BaseModel):
    """What never appears in a log, an error or a metric."""

    api_key: str | None = Field(default=None, repr=False)
    agent_token: str | None = Field(default=None, repr=False)

    @classmethod
    def from_env(cls) -> "Secrets":
        return cls(api_key=os.environ.get(API_KEY_ENV) or None, agent_token=os.environ.get(AGENT_TOKEN_ENV) or None)


def load_config(path: Path) -> ProxyConfig:
    return ProxyConfig.model_validate(json.loads(path.read_text()))


def check_exposure(config: ProxyConfig, secrets: Secrets) -> None:
    """Refuse to listen where others can reach it without a key; raises `ValueError`."""
    if not config.loopback and secrets.api_key is None:
        raise ValueError(
            f"the proxy would listen on {config.host}, which others can reach, without a key: "
            f"set {API_KEY_ENV}, or use host 127.0.0.1"
        )
