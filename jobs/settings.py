"""The blocks `jobs:` and `budget:` of a run file, checked strictly and without anything that needs torch."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhd]?)\Z")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

VLLM_IMAGE = "vllm/vllm-openai:v0.31.0"


def seconds(duration: str | float) -> int:
    """Seconds of `90`, `"90s"`, `"15m"`, `"4h"` or `"1d"`; `ValueError` for anything else, and for less than one."""
    match = _DURATION.match(str(duration).strip())
    if not match:
        raise ValueError(f"{duration!r} is not a duration: write 90s, 15m, 4h or 1d")
    value = int(float(match["number"]) * _UNIT_S[match["unit"]])
    if value < 1:
        raise ValueError(f"{duration!r} is less than a second")
    return value


def _check_duration(duration: str) -> str:
    seconds(duration)
    return duration


Duration = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_check_duration)]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainerSettings(_Block):
    """`jobs.trainer`: the job that trains and holds the proxy."""

    flavor: str = "h200x2"
    timeout: Duration = "4h"
    image: str = VLLM_IMAGE
    accelerate: str | None = None
    """Name of a launcher config, such as `fsdp2`; None trains in one process."""
    secrets: list[str] = []
    """Names of environment variables on the launching machine that travel as encrypted secrets."""
    env: dict[str, str] = {}
    pip: list[str] = []
    """More packages, pinned: `mypkg==1.2`."""


class VllmSettings(_Block):
    """`jobs.vllm`: the jobs that generate."""

    flavor: str = "h200"
    replicas: int = Field(default=2, ge=1, le=64)
    timeout: Duration = "4h"
    image: str = VLLM_IMAGE
    args: dict[str, Any] = {}
    """vLLM flags, passed through; those that decide which weights answer are refused by the agent."""
    env: dict[str, str] = {}
    pip: list[str] = []


class Expected(_Block):
    """`jobs.expected`: how long the run takes on this hardware, and who says so."""

    hours: float = Field(gt=0)
    source: str = Field(min_length=1)


class JobSettings(_Block):
    """The block `jobs:` of a run file."""

    trainer: TrainerSettings = TrainerSettings()
    vllm: VllmSettings = VllmSettings()
    expected: Expected | None = None
    network: Literal["exposed", "private"] = "exposed"
    """`exposed`: replicas are reached through the Hub's gateway. `private`: through a network group of the run."""
    schedule_timeout: Duration = "30m"
    """A job that is not running by then is given up, and with it the launch."""


class Budget(_Block):
    """The block `budget:`; the run is checkpointed and every job cancelled when one of them is reached."""

    max_usd: float | None = Field(default=None, gt=0)
    no_progress: Duration | None = None
    """Longest time without a finished training step, counted from the first one."""
    alert: str | None = None
    """A webhook (`https://…`, gets a JSON object) or a command, told why a run was ended."""
