"""What the fleet view is made of: versions, replicas, and the answers that it gives. Plain values, no I/O."""

from dataclasses import dataclass, field
from typing import Literal

from bucket_grpo.bucket_sync.vocabulary import VersionRef, VersionState
from bucket_grpo.bucket_sync.wire import AgentStatus


class VersionConflict(ValueError):
    """The same version was announced with other content, or for another run or incarnation."""


@dataclass
class Version:
    """One accepted version. Times are the fleet clock's, in seconds."""

    ref: VersionRef
    accepted_at: float
    first_ready_at: float | None = None
    live_at: float | None = None
    first_failed_at: float | None = None
    failure: str | None = None
    unloaded: bool = False
    retired: bool = False
    in_flight: int = 0

    @property
    def state(self) -> Literal["pending", "live", "retired", "failed"]:
        if self.retired:
            return "retired"
        if self.failure is not None:
            return "failed"
        return "pending" if self.live_at is None else "live"


@dataclass
class Replica:
    """One agent as last heard of. `problem` says why it can't be reached."""

    url: str
    status: AgentStatus | None = None
    problem: str | None = "no word from its agent yet"
    in_flight: int = 0
    disproved: dict[str, float] = field(default_factory=dict)
    progress_at: float = 0.0
    progress_tokens: int = 0
    stalled_until: float | None = None
    routable: bool = False
    reason: str | None = "no word from its agent yet"

    @property
    def name(self) -> str:
        return self.status.replica if self.status else self.url

    @property
    def up(self) -> bool:
        """Its agent answers and says that vLLM is ready."""
        return self.problem is None and self.status is not None and self.status.engine == "ready"

    def state(self, name: str) -> VersionState | None:
        known = self.status.versions.get(name) if self.status else None
        if known is None or (known.state is VersionState.READY and name in self.disproved):
            return None
        return known.state


@dataclass(frozen=True)
class Target:
    """What will answer a request: `number` is None for the base model. `late` if the one asked for has retired."""

    number: int | None
    name: str
    late: bool = False


@dataclass(frozen=True)
class Refusal:
    status: int
    reason: str


@dataclass(frozen=True)
class Unknown:
    """Not known yet, but may be in a moment: the proxy has just started."""

    reason: str


@dataclass(frozen=True)
class Event:
    """`restarted` and `down`: a replica's belongings are gone. `retired`, `live`, `failed`: a version's state."""

    kind: Literal["restarted", "down", "live", "retired", "failed"]
    url: str | None = None
    number: int | None = None
