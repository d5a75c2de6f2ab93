"""What agents, the proxy and the trainer say to each other over HTTP, as strict models.

Level-triggered: each message states the whole wish or the whole state, so a lost or repeated one does no harm.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from bucket_grpo.bucket_sync.vocabulary import VersionRef, VersionState

EngineState = Literal["starting", "ready", "stalled", "dead", "failed", "stopping"]


class Wanted(BaseModel):
    """`PUT /agent/wanted`: every version that this replica should hold. One that is missing is to be retired."""

    model_config = ConfigDict(extra="forbid")

    versions: list[VersionRef]


class VersionStatus(BaseModel):
    """One version on one replica. `seconds` holds how long each finished phase took (`staging`, `load`, `canary`)."""

    state: VersionState
    reason: str | None = None
    seconds: dict[str, float] = Field(default_factory=dict)


class Load(BaseModel):
    """What vLLM's metrics say. `generated_tokens_total` is the sign of life: `/health` is 200 on a stalled engine."""

    running: int = 0
    waiting: int = 0
    generated_tokens_total: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_hits_total: int = 0
    prefix_cache_queries_total: int = 0


class AgentStatus(BaseModel):
    """`GET /agent/status?after=<seq>&wait=<seconds>`: answers when `seq` has passed `after`, or after `wait`."""

    seq: int
    replica: str
    boot_id: str = Field(description="new at each start of the agent")
    engine_epoch: int = Field(
        description="counts starts of vLLM under this agent; a change means that nothing is loaded"
    )
    engine: EngineState
    reason: str | None = Field(default=None, description="why the engine is not ready, from its own log")
    base_model: str
    dtype: str
    max_model_len: int | None = None
    versions: dict[str, VersionStatus] = Field(default_factory=dict, description="by served name")
    load: Load = Field(default_factory=Load)
    loads: int = 0
    load_retries: int = 0
    load_failures: int = 0
    engine_restarts: int = 0
    rejected: dict[str, int] = Field(default_factory=dict, description="version files refused, by reason")


class VersionLiveness(BaseModel):
    """`GET /versions/<name>?wait=<seconds>` of the proxy: answers at once when it goes live or fails everywhere."""

    name: str
    state: Literal["pending", "live", "retired", "failed"]
    ready_on: list[str] = Field(default_factory=list)
    failed_on: dict[str, str] = Field(default_factory=dict, description="replica → reason")
    reason: str | None = None
    published_to_live_s: float | None = None
