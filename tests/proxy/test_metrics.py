"""The documented figures are there and right."""

import re
from pathlib import Path

import pytest
from fake_agent import FakeAgent
from proxy_harness import proxy_for

DOCUMENTED = set(re.findall(r"`(bucket_grpo_proxy_\w+)`", (Path(__file__).parents[2] / "docs/metrics.md").read_text()))


@pytest.mark.anyio
async def test_every_documented_metric_is_there_and_every_metric_is_documented(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a"), FakeAgent("b")], tmp_path) as proxy:
        await proxy.live(1)
        for seed in range(8):
            await proxy.complete(1, seed=seed)
        _, text = await proxy.get("/metrics")
        samples = dict(re.findall(r"^(bucket_grpo_proxy_[^ ]+) ([0-9.e+]+)$", text, re.MULTILINE))
        assert {sample.split("{")[0] for sample in samples} == DOCUMENTED
        assert float(samples['bucket_grpo_proxy_requests_total{outcome="all"}']) == 8
        assert float(samples['bucket_grpo_proxy_requests_total{outcome="affinity"}']) == 7
        assert float(samples["bucket_grpo_proxy_tokens_total"]) == 32
        assert float(samples["bucket_grpo_proxy_version_live"]) == 1
        assert float(samples['bucket_grpo_proxy_replica_routable{replica="a"}']) == 1


@pytest.mark.anyio
async def test_status_tells_what_people_and_the_report_read(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a")], tmp_path) as proxy:
        await proxy.live(1)
        await proxy.complete(1)
        status = await proxy.status()
        assert {"run", "incarnation", "live", "accepted", "lag", "lag_max", "tokens_per_s", "journal"} <= set(status)
        assert set(status["routing"]) == {
            *("requests", "affinity", "cold", "spilled", "parked", "retried", "late", "failed")
        }
        replica, version = status["replicas"][0], status["versions"][0]
        assert {"url", "replica", "engine", "routable", "reason", "in_flight", "versions", "load"} <= set(replica)
        assert {"loads", "load_retries", "load_failures", "engine_restarts"} <= set(replica)
        assert (version["number"], version["state"], version["ready_on"]) == (1, "live", ["a"])
        assert 0 <= version["published_to_live_s"] < 5
