"""How well does the router place requests? A trace is played against simulated replicas with continuous batching.

The trace is the reference run's shape: 8 rollouts a prompt, a template of 23 tokens that all prompts share, lognormal
completions up to 3,000 tokens, a new version now and then, and a fixed number of requests in flight, as TRL keeps them.
A simulated replica runs its whole batch in steps; a step takes longer the more requests are in it; a request waits for
its uncached prompt to be prefilled first.

    python benchmarks/routing.py --json
"""

import argparse
import heapq
import json
import math
import random
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from reference_proxy import PrefixRouter

from bucket_grpo.proxy.router import Placement, Router

GROUP = 8
TEMPLATE = list(range(23))
MAX_TOKENS = 3000
VERSIONS = 6
IN_FLIGHT_PER_REPLICA = 64

# In seconds: a step of an idle replica (launches, reading 3 GB of weights), what each request in the batch adds to it
# (reading some 60 MB of its keys and values), and a prompt token's prefill. The orders of a 1.5B model on one H200.
STEP_S = 0.006
STEP_PER_REQUEST_S = 0.000015
PREFILL_S = 0.00002
BATCH_LIMIT = 256


@dataclass(frozen=True)
class Call:
    version: int
    prompt: list[int]
    key: bytes
    prompt_bytes: bytes
    completion: int


def trace(groups: int, seed: int) -> list[Call]:
    """Requests in the order in which TRL would send them."""
    draw = random.Random(seed)
    calls = []
    for index in range(groups):
        version = 1 + index * VERSIONS // groups
        prompt = TEMPLATE + [draw.randrange(1000, 150_000) for _ in range(draw.randrange(40, 300))]
        packed = array("I", prompt).tobytes()
        mean = draw.lognormvariate(6.4, 0.6)  # a hard prompt is hard for all rollouts
        for _ in range(GROUP):
            completion = max(8, min(MAX_TOKENS, round(mean * draw.lognormvariate(0, 0.45))))
            calls.append(Call(version, prompt, sha256(packed).digest(), packed, completion))
    return calls


@dataclass
class Running:
    call: Call
    started: float
    finish: Callable[[int, float], None]


@dataclass
class Replica:
    """Continuous batching: every request in the batch gets one token a step.

    All of them advance together, so progress is counted in steps: a request that joins at step s ends at step
    s + its tokens, and only joins and ends change how long a step takes.
    """

    speed: float
    cached: set[tuple[int, bytes]] = field(default_factory=set)
    now: float = 0.0
    steps: float = 0.0
    busy_until: float = 0.0
    ends: list[tuple[float, int, Running]] = field(default_factory=list)
    queue: list[Running] = field(default_factory=list)
    order: int = 0

    def step_s(self) -> float:
        return (STEP_S + STEP_PER_REQUEST_S * len(self.ends)) / self.speed

    def next_end(self) -> float:
        if not self.ends:
            return math.inf
        return max(self.now, self.busy_until) + max(0.0, self.ends[0][0] - self.steps) * self.step_s()

    def advance(self, to: float) -> None:
        begin = max(self.now, self.busy_until)
        if self.ends and to > begin:
            self.steps += (to - begin) / self.step_s()
        self.now = max(self.now, to)

    def join(self, running: Running) -> None:
        if len(self.ends) >= BATCH_LIMIT:
            self.queue.append(running)
            return
        prompt = (running.call.version, running.call.key)
        if prompt not in self.cached:
            # The prefill holds up the whole batch.
            self.cached.add(prompt)
            prefill_s = PREFILL_S * len(running.call.prompt) / self.speed
            self.busy_until = max(self.now, self.busy_until) + prefill_s
        self.order += 1
        heapq.heappush(self.ends, (self.steps + running.call.completion, self.order, running))

    def end_first(self) -> Running:
        self.steps = max(self.steps, self.ends[0][0])
        _, _, running = heapq.heappop(self.ends)
        if self.queue:
            self.join(self.queue.pop(0))
        return running


Place = Callable[[Call], tuple[str, Callable[[int, float], None]]]


def play(calls: Sequence[Call], speeds: Sequence[float], place: Place) -> float:
    """The makespan in seconds: when the last request has ended, with a fixed number in flight until then."""
    replicas = {f"r{index}": Replica(speed) for index, speed in enumerate(speeds)}
    pending: Iterator[Call] = iter(calls)
    now = 0.0

    def send() -> bool:
        call = next(pending, None)
        if call is None:
            return False
        url, finish = place(call)
        replicas[url].advance(now)
        replicas[url].join(Running(call, now, finish))
        return True

    for _ in range(IN_FLIGHT_PER_REPLICA * len(speeds)):
        send()
    while True:
        replica = min(replicas.values(), key=Replica.next_end)
        end = replica.next_end()
        if math.isinf(end):
            return now
        now = end
        replica.advance(now)
        ended = replica.end_first()
        ended.finish(ended.call.completion, now - ended.started)
        send()


def ours(urls: list[str], counts: dict[str, int]) -> Place:
    router = Router()
    newest = 0

    def place(call: Call) -> tuple[str, Callable[[int, float], None]]:
        nonlocal newest
        if call.version > newest:
            newest = call.version
            router.forget_version(newest - 5)
        placement: Placement = router.place(call.version, call.key, call.prompt_bytes, MAX_TOKENS, urls)
        counts[placement.route] = counts.get(placement.route, 0) + 1
        return placement.url, lambda tokens, seconds: router.finish(placement, tokens=tokens, seconds=seconds)

    return place


def reference(urls: list[str], counts: dict[str, int]) -> Place:
    router = PrefixRouter(urls)
    router.counts = counts

    def place(call: Call) -> tuple[str, Callable[[int, float], None]]:
        url = router.place(str(call.version), call.prompt)
        return url, lambda _tokens, _seconds: router.finish(url)

    return place


def compare(calls: Sequence[Call], speeds: Sequence[float]) -> tuple[float, dict[str, int], dict[str, int]]:
    """Our makespan over the reference's, and both counts by kind of placement."""
    urls = [f"r{index}" for index in range(len(speeds))]
    our_counts: dict[str, int] = {}
    reference_counts = {"affinity": 0, "cold": 0, "spilled": 0}
    our_s = play(calls, speeds, ours(urls, our_counts))
    reference_s = play(calls, speeds, reference(urls, reference_counts))
    return our_s / reference_s, our_counts, reference_counts


def cost_us(calls: Sequence[Call], replicas: Sequence[int], repeats: int = 7) -> list[float]:
    """Time of one placement and its end, for each number of replicas; the best of alternating passes."""
    best = [math.inf] * len(replicas)
    for _ in range(repeats):
        for index, count in enumerate(replicas):
            urls = [f"r{replica}" for replica in range(count)]
            router, open_calls = Router(), deque()
            began = time.perf_counter()
            for call in calls:
                open_calls.append(router.place(call.version, call.key, call.prompt_bytes, MAX_TOKENS, urls))
                if len(open_calls) > IN_FLIGHT_PER_REPLICA * count:
                    router.finish(open_calls.popleft(), tokens=call.completion, seconds=call.completion * 0.02)
            best[index] = min(best[index], (time.perf_counter() - began) / len(calls) * 1e6)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2600, help="prompts; each is asked 8 times")
    parser.add_argument("--seeds", type=int, default=3, help="traces; medians are printed")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    traces = [trace(options.groups, seed) for seed in range(options.seeds)]
    total, equal, half, cold, spilled = options.groups * GROUP, {}, {}, [], []
    for replicas in (2, 3, 8):
        results = [compare(calls, [1.0] * replicas) for calls in traces]
        equal[str(replicas)] = round(statistics.median(ratio for ratio, _, _ in results), 3)
        cold += [counts.get("cold", 0) / total for _, counts, _ in results]
        spilled += [counts.get("spilled", 0) / total for _, counts, _ in results]
        print(
            f"{replicas} equal replicas: {[round(ratio, 4) for ratio, _, _ in results]} of the reference's makespan; "
            f"ours {results[0][1]}, reference {results[0][2]}",
            file=sys.stderr,
        )
    for replicas in (2, 3):
        results = [compare(calls, [1.0] * (replicas - 1) + [0.5]) for calls in traces]
        half[str(replicas)] = round(statistics.median(ratio for ratio, _, _ in results), 3)
        print(
            f"{replicas} replicas, one at half speed: {[round(ratio, 4) for ratio, _, _ in results]}; "
            f"ours {results[0][1]}, reference {results[0][2]}",
            file=sys.stderr,
        )
    router_8_us, router_64_us = cost_us(traces[0], (8, 64))
    result = {
        "benchmark": "routing",
        "requests": total,
        "cold_frac": round(max(cold), 5),
        "spilled_frac": round(max(spilled), 5),
        "makespan_equal": equal,
        "makespan_half_speed": half,
        "router_8_us": round(router_8_us, 2),
        "router_64_us": round(router_64_us, 2),
    }
    print(json.dumps(result) if options.json else "\n".join(f"{key}: {value}" for key, value in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
