"""`/metrics`: read from the proxy's own state when scraped, so that counting costs the hot route nothing extra.

The names are a promise; docs/metrics.md lists them.
"""

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bucket_grpo.proxy.service import Service

PREFIX = "bucket_grpo_proxy_"


class ProxyCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service, fleet = self._service, self._service.fleet
        routing = CounterMetricFamily(
            PREFIX + "requests", "Completion requests, by what became of them", labels=["outcome"]
        )
        for outcome, count in asdict(service.counters).items():
            routing.add_metric(["all" if outcome == "requests" else outcome], count)
        yield routing
        yield CounterMetricFamily(PREFIX + "tokens", "Completion tokens passed on", value=service.tokens.total)
        yield GaugeMetricFamily(
            PREFIX + "in_flight", "Requests being answered, parked ones included", service.in_flight
        )
        yield GaugeMetricFamily(PREFIX + "parked", "Requests that wait for a replica", service.parked)
        yield GaugeMetricFamily(PREFIX + "version_live", "Newest live version", fleet.live)
        yield GaugeMetricFamily(PREFIX + "version_accepted", "Newest accepted version", fleet.accepted)
        yield GaugeMetricFamily(PREFIX + "version_lag", "Newest accepted minus newest live version", fleet.lag)
        yield CounterMetricFamily(PREFIX + "journal_lines", "Journal lines written", value=service.journal.written)
        yield CounterMetricFamily(PREFIX + "journal_dropped", "Completions not recorded", value=service.journal.dropped)
        yield from self._replicas()

    def _replicas(self) -> Iterator[Metric]:
        labels = ["replica"]
        routable = GaugeMetricFamily(PREFIX + "replica_routable", "1 if the replica gets requests", labels=labels)
        in_flight = GaugeMetricFamily(PREFIX + "replica_in_flight", "Requests at the replica", labels=labels)
        expected = GaugeMetricFamily(
            PREFIX + "replica_expected_tokens", "Work at the replica, in expected decode tokens", labels=labels
        )
        ready = GaugeMetricFamily(PREFIX + "replica_versions_ready", "Versions READY on the replica", labels=labels)
        generated = CounterMetricFamily(PREFIX + "replica_generated_tokens", "By vLLM's own count", labels=labels)
        restarts = CounterMetricFamily(PREFIX + "replica_engine_restarts", "Restarts of vLLM", labels=labels)
        for replica in list(self._service.fleet.replicas.values()):
            name, status = [replica.name], replica.status
            backlog = self._service.router.backlogs.get(replica.url)
            routable.add_metric(name, int(replica.routable))
            in_flight.add_metric(name, replica.in_flight)
            expected.add_metric(name, max(0.0, backlog.tokens) if backlog else 0.0)
            if status is not None:
                ready.add_metric(name, sum(version.state == "READY" for version in status.versions.values()))
                generated.add_metric(name, status.load.generated_tokens_total)
                restarts.add_metric(name, status.engine_restarts)
        yield from (routable, in_flight, expected, ready, generated, restarts)


def registry_for(service: Service) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ProxyCollector(service))
    return registry
