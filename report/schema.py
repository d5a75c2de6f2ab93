"""`report.json`: the figures of one run, by name and unit. None means unknown or not applicable, never 0."""

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Routing(Strict):
    """Completions by what the proxy did with them; the counts overlap (a late one may also be retried)."""

    requests: int | None = None
    affinity: int | None = None
    """sent where the group's first rollout went"""
    cold: int | None = None
    """first of its group"""
    spilled: int | None = None
    """sent elsewhere because the group's replica was busier than a cold prefill is dear"""
    parked: int | None = None
    """held until a replica was READY for the version"""
    retried: int | None = None
    """answered by another replica than the first one tried"""
    late: int | None = None
    """asked for a version that was retired already: the newest live one answered"""
    failed: int | None = None


class Groups(Strict):
    trained: int | None = None
    dropped: dict[str, int] | None = Field(default=None, description="reason → groups")


class Evaluation(Strict):
    """Mean reward on the held-out set."""

    base: float | None = None
    best: float | None = None
    last: float | None = None


class Report(Strict):
    """The figures of one run. Names end in their unit; `_p50` is a median, `_frac` lies between 0 and 1."""

    schema_version: int = SCHEMA_VERSION
    run: str
    variant: str | None = None
    """what sets this run apart in a comparison, such as `ours` or `reference`"""
    exit_reason: str | None = None
    seed: int | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    """library → release"""
    steps: int | None = None
    """optimizer steps done"""

    wall_clock_s: float | None = None
    """of the training loop"""
    time_to_first_step_s: float | None = None
    step_s_p50: float | None = None
    fwd_bwd_s_p50: float | None = None
    stall_s_p50: float | None = None
    """how long the training loop stood still for one publish, the first (which is waited for) left out"""
    stall_s_total: float | None = None
    rollout_wait_s_total: float | None = None
    """how long the training loop waited for samples"""
    publish_to_live_s_p50: float | None = None
    """from the end of a step to the moment when rollouts ask for its version"""

    queue_mean: float | None = None
    """samples waiting where the trainer takes them"""
    staleness_mean: float | None = None
    """versions between the policy that is trained and the one that a sample is labelled with"""
    staleness_max: float | None = None
    dropped_stale_frac: float | None = None
    """of all samples, those dropped because they were older than max_staleness"""
    lag_max: int | None = None
    """newest accepted version minus the live one"""

    reward_first20: float | None = None
    reward_last20: float | None = None
    """mean reward of the last 20 steps"""
    rewards: dict[str, float] = Field(default_factory=dict)
    """reward function → its mean over the last 20 steps"""
    zero_std_frac: float | None = None
    """of all groups, those whose rollouts all got the same reward: they teach nothing"""
    clipped_frac: float | None = None
    """of all completions, those cut off by the length limit"""
    abs_log_ratio_mean: float | None = None
    """|log π_trained/π_served| per token, against the policy that answered"""
    abs_log_ratio_max: float | None = None

    samples: int | None = None
    """trained on"""
    generated_tokens: int | None = None
    generated_tok_s: float | None = None
    """over the time in which the fleet answered"""
    publishes: int | None = None
    skipped: int | None = None
    """versions overtaken by a newer one before they were published"""
    loads: int | None = None
    load_retries: int | None = None
    load_failures: int | None = None
    replica_restarts: int | None = None
    routing: Routing = Field(default_factory=Routing)

    audited_samples: int | None = None
    wrong_policy_samples: int | None = None
    max_abs_logprob_diff: float | None = None
    power_frac: float | None = None
    """of the audited samples, those that the audit flags when held against the neighbouring version"""

    groups: Groups = Field(default_factory=Groups)
    eval: Evaluation = Field(default_factory=Evaluation)
    cost_usd: float | None = None
    idle_usd: float | None = None
    adapter_uri: str | None = None
