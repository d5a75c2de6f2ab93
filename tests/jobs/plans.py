from bucket_grpo.bucket_sync.vocabulary import mint_incarnation
from bucket_grpo.jobs.plan import Plan, RunNeeds
from bucket_grpo.jobs.settings import Budget, JobSettings


def make_plan(**changes: object) -> Plan:
    """A plan of two replicas and a trainer on CPU flavors; keyword arguments replace parts of what is needed."""
    needs = RunNeeds(
        run_name="r1",
        bucket="hf://buckets/me/rl",
        model="Qwen/Qwen2.5-Math-1.5B",
        dtype="bfloat16",
        lora_r=1,
        max_staleness=4,
        jobs=JobSettings.model_validate(
            {"trainer": {"flavor": "cpu-basic", "timeout": "1m"}, "vllm": {"flavor": "cpu-basic", "timeout": "1m"}}
        ),
        budget=Budget(),
    ).model_copy(update=changes)
    return Plan.of(needs, mint_incarnation(), "0.1.0")
