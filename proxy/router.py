"""Which replica answers a request: whole groups together, on the replica with the least expected work.

A group is all rollouts of one prompt under one version. Its first request decides for all of them; later ones follow
it, since the prompt is in that replica's prefix cache. Work is counted in decode tokens: the completion that is to be
expected, plus the uncached prompt at `prefill_weight`. Pure: no I/O and no clock; every placement is given back
through `finish`. Nothing here needs to survive a restart.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Route = Literal["affinity", "cold", "spilled"]

TOKEN_BYTES = 4
BLOCK_BYTES = 16 * TOKEN_BYTES
PACE_NOISE = 0.25
REUSE_RATIO = 1.1


@dataclass(slots=True)
class Pace:
    """Seconds per token in an empty batch, in effect 1 over a speed: a ratio of two fading sums."""

    fading: float
    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds = self.fading * self.seconds + seconds
        self.tokens = self.fading * self.tokens + tokens

    @property
    def value(self) -> float:
        return self.seconds / self.tokens if self.tokens > 0 else 1.0


@dataclass(slots=True)
class Backlog:
    """One replica's work. `pace` is the fleet's, unless what was `measured` here clearly differs."""

    url: str
    pace: float
    measured: Pace = field(default_factory=lambda: Pace(fading=0.95))
    epoch: int = 0
    running: int = 0
    tokens: float = 0.0


@dataclass(slots=True)
class Group:
    """`reserved` is the work of the rollouts that are still to come: it counts before they arrive."""

    key: bytes
    owner: Backlog
    epoch: int
    prompt_bytes: int
    end: tuple[int, bytes] | None
    complete: bool = False
    size: int = 0
    reserved: float = 0.0


@dataclass(slots=True)
class Placement:
    url: str
    route: Route
    version: int
    charge: float
    running_at_start: int


@dataclass(slots=True)
class Prompts:
    """The groups of one version, oldest first, and where their prompts end in the chain of blocks.

    Only the end of a whole known prompt attracts a longer one: that is the next turn of a conversation. A prefix that
    prompts merely share (a template) ends no prompt and so attracts nothing.
    """

    expected_tokens: float
    groups: "OrderedDict[bytes, Group]" = field(default_factory=OrderedDict)
    ends: dict[tuple[int, bytes], Group] = field(default_factory=dict)
    tail_lengths: dict[int, Counter[int]] = field(default_factory=dict)

    def remember(self, group: Group, limit: int) -> None:
        self.groups[group.key] = group
        if group.end is not None:
            link, tail = group.end
            if group.end not in self.ends:
                self.tail_lengths.setdefault(link, Counter())[len(tail)] += 1
            self.ends[group.end] = group
        if len(self.groups) > limit:
            _, oldest = self.groups.popitem(last=False)
            if oldest.end is not None and self.ends.get(oldest.end) is oldest:
                self._forget_end(oldest.end)

    def _forget_end(self, end: tuple[int, bytes]) -> None:
        del self.ends[end]
        link, tail = end
        lengths = self.tail_lengths[link]
        lengths[len(tail)] -= 1
        if lengths[len(tail)] == 0:
            del lengths[len(tail)]
        if not lengths:
            del self.tail_lengths[link]

    def longest_ending_in(self, prompt: bytes, chain: list[int]) -> Group | None:
        """The known group with the longest prompt that `prompt` begins with."""
        for blocks in range(len(chain), 0, -1):
            link = chain[blocks - 1]
            start = blocks * BLOCK_BYTES
            for length in sorted(self.tail_lengths.get(link, ()), reverse=True):
                group = self.ends.get((link, prompt[start : start + length]))
                if group is not None:
                    return group
        return None


def chain_of(prompt: bytes) -> list[int]:
    """One hash per whole block, each over all blocks up to it."""

    def links() -> Iterator[int]:
        link = 0
        for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
            link = hash((link, prompt[start : start + BLOCK_BYTES]))
            yield link

    return list(links())


class Router:
    """Places requests; a replica is known from the first time that it is a candidate.

    Args:
        prefill_weight: what a prompt token costs, in decode tokens.
        spill_ratio: a group moves only if its replica has this much more work than the best other would have with it.
        open_groups: a group is taken for complete when this many younger ones have started.
        max_groups: how many groups a version remembers.
        batch_knee: with this many requests in its batch a replica takes twice as long for a token as with one.
        expected_tokens: the length of a completion before any has been seen.
    """

    def __init__(
        self,
        *,
        prefill_weight: float = 0.05,
        spill_ratio: float = 2.0,
        open_groups: int = 16,
        max_groups: int = 4096,
        batch_knee: float = 32.0,
        expected_tokens: float = 256.0,
    ) -> None:
        self._prefill_weight = prefill_weight / TOKEN_BYTES
        self._spill_ratio, self._knee = spill_ratio, batch_knee
        self._open_limit, self._max_groups = open_groups, max_groups
        self._expected_tokens = expected_tokens
        self._group_size = 1.0
        self._pace = Pace(fading=0.98)
        self._finished = 0
        self._candidates: Sequence[str] = ()
        self._choice: dict[str, Backlog] = {}
        self._turns: list[Backlog] = []
        self._least: Backlog | None = None
        self.backlogs: dict[str, Backlog] = {}
        self._versions: dict[int, Prompts] = {}
        self._open: deque[Group] = deque()

    def place(self, version: int, key: bytes, prompt: bytes, max_tokens: int, candidates: Sequence[str]) -> Placement:
        """Choose one of `candidates` (at least one) for a request.

        Args:
            version: the number of the version that will answer; 0 for the base model.
            key: identifies the whole prompt, e.g. its digest.
            prompt: the prompt's token ids as little-endian 32-bit integers.
            max_tokens: the most that may be generated.
        """
        self._choose_among(candidates)
        prompts = self._versions.get(version)
        if prompts is None:
            prompts = self._versions[version] = Prompts(self._expected_tokens)
        completion = min(prompts.expected_tokens, max_tokens)
        group = prompts.groups.get(key)
        route: Route
        if group is None:
            group, route, uncached = self._start(prompts, key, prompt, completion)
        else:
            route = self._follow(group, completion)
            uncached = 0 if route == "affinity" else len(prompt)
        owner = group.owner
        arrived = min(group.reserved, completion)
        group.reserved -= arrived
        group.size += 1
        charge = completion + self._prefill_weight * uncached
        owner.tokens += charge - arrived
        owner.running += 1
        return Placement(owner.url, route, version, charge, owner.running)

    def finish(self, placement: Placement, *, tokens: int = 0, seconds: float = 0.0) -> None:
        """Give a placement back: `tokens` were generated in `seconds`; 0 tokens if it failed."""
        backlog = self.backlogs[placement.url]
        beside = (placement.running_at_start + backlog.running) / 2
        backlog.tokens -= placement.charge
        backlog.running -= 1
        if tokens <= 0 or seconds <= 0:
            return
        prompts = self._versions.get(placement.version)
        if prompts is not None:
            gain = max(0.02, 1 / (1 + self._finished))
            prompts.expected_tokens += gain * (tokens - prompts.expected_tokens)
            self._expected_tokens = prompts.expected_tokens
        self._finished += 1
        alone_s = seconds / (1 + beside / self._knee)
        self._pace.add(alone_s, tokens)
        backlog.measured.add(alone_s, tokens)
        self._judge_pace(backlog)

    def forget_replica(self, url: str) -> None:
        """Its cache is gone, and maybe it is another machine now: no group is there any more."""
        backlog = self.backlogs.get(url)
        if backlog is not None:
            backlog.epoch += 1
            backlog.measured = Pace(fading=0.95)
            backlog.pace = self._pace.value

    def forget_version(self, version: int) -> None:
        """It has retired: none of its prompts will come again."""
        self._versions.pop(version, None)

    def expected_tokens(self, version: int) -> float:
        """How long a completion of `version` (or of the one before it) is on average, in tokens."""
        prompts = self._versions.get(version)
        return self._expected_tokens if prompts is None else prompts.expected_tokens

    def seconds_for(self, url: str, tokens: int) -> float | None:
        """How long `tokens` would take on a replica with what runs there now; None before anything has finished."""
        backlog = self.backlogs[url]
        return tokens * backlog.pace * (1 + backlog.running / self._knee) if self._finished else None

    def _judge_pace(self, backlog: Backlog) -> None:
        fleet, here = self._pace.value, backlog.measured.value
        backlog.pace = here if abs(here - fleet) > PACE_NOISE * fleet and backlog.measured.tokens > 0 else fleet

    def _forgive(self, backlog: Backlog) -> None:
        """An idle replica is not measured any more: what made it slow may have passed, so it is tried now and then."""
        if backlog.running == 0 and backlog.measured.tokens > 0:
            backlog.measured.seconds += 0.02 * (self._pace.value - backlog.measured.value) * backlog.measured.tokens
        self._judge_pace(backlog)

    def _cost(self, backlog: Backlog, extra: float = 0.0) -> float:
        """How long a token takes with all this work in the batch; only comparable with another replica's."""
        return (backlog.tokens + self._knee * self._expected_tokens + extra) * backlog.pace

    def _choose_among(self, candidates: Sequence[str]) -> None:
        """Look up the candidates' backlogs, unless they are the same object as last time."""
        if candidates is not self._candidates:
            for url in candidates:
                if url not in self.backlogs:
                    self.backlogs[url] = Backlog(url, self._pace.value)
            self._candidates, self._choice = candidates, {url: self.backlogs[url] for url in candidates}
            self._turns = list(self._choice.values())
            self._least = None

    def _least_loaded(self) -> Backlog:
        """Where a new group goes: where each token comes soonest. Of equals each in turn."""
        self._turns.append(self._turns.pop(0))
        self._forgive(self._turns[0])
        room = self._knee * self._expected_tokens
        least, least_cost = self._turns[0], math.inf
        for backlog in self._turns:
            cost = (backlog.tokens + room) * backlog.pace
            if cost < least_cost:
                least, least_cost = backlog, cost
        self._least = least
        return least

    def _start(self, prompts: Prompts, key: bytes, prompt: bytes, completion: float) -> tuple[Group, Route, int]:
        """A new group goes where a prompt that it extends was answered, else where the least work is."""
        chain = chain_of(prompt)
        before = prompts.longest_ending_in(prompt, chain)
        owner, uncached = self._least_loaded(), len(prompt)
        route: Route = "cold"
        if before is not None and before.owner.url in self._choice and before.owner.epoch == before.epoch:
            if self._worth_moving(before.owner, owner, completion + self._prefill_weight * len(prompt)):
                route = "spilled"
            else:
                owner, route, uncached = before.owner, "affinity", len(prompt) - before.prompt_bytes
        end = (chain[-1], prompt[len(chain) * BLOCK_BYTES :]) if chain else None
        group = Group(key, owner, owner.epoch, len(prompt), end)
        prompts.remember(group, self._max_groups)
        if before is None:
            self._reserve(group, completion)
        return group, route, uncached

    def _reserve(self, group: Group, completion: float) -> None:
        """Count the rollouts that are still to come, until enough younger groups have started."""
        group.reserved = self._group_size * completion
        group.owner.tokens += group.reserved
        self._open.append(group)
        if len(self._open) > self._open_limit:
            self._close(self._open.popleft())

    def _close(self, group: Group) -> None:
        """No more rollouts are expected; its size teaches what to reserve for the next groups."""
        group.owner.tokens -= group.reserved
        group.reserved = 0.0
        group.complete = True
        self._group_size += 0.2 * (group.size - self._group_size)

    def _follow(self, group: Group, completion: float) -> Route:
        """One more rollout of a known group: to its replica, unless that has lost it or is far behind."""
        if group.owner.url not in self._choice or group.owner.epoch != group.epoch:
            self._move(group, self._least_loaded())
            return "cold"
        if group.complete:
            return self._ask_again(group, completion)
        extra = max(group.reserved, completion) + self._prefill_weight * group.prompt_bytes
        # The last one found is a hint that costs nothing; only if it promises a saving are all of them looked at.
        if self._least is None or self._worth_moving(group.owner, self._least, extra):
            best = self._least_loaded()
            if self._worth_moving(group.owner, best, extra):
                self._move(group, best)
                return "spilled"
        return "affinity"

    def _ask_again(self, group: Group, completion: float) -> Route:
        """A prompt that was complete begins anew: it could go anywhere, its cache is only worth a prefill."""
        best = self._least_loaded()
        stays = self._cost(group.owner) <= REUSE_RATIO * self._cost(best, self._prefill_weight * group.prompt_bytes)
        if not stays:
            group.owner, group.epoch = best, best.epoch
        group.complete, group.size = False, 0
        self._reserve(group, completion)
        return "affinity" if stays else "cold"

    def _worth_moving(self, owner: Backlog, best: Backlog, extra: float) -> bool:
        """A spill costs a prefill, so each token must come clearly sooner, even after the work has moved."""
        return best is not owner and self._cost(owner) > self._spill_ratio * self._cost(best, extra)

    @staticmethod
    def _move(group: Group, to: Backlog) -> None:
        group.owner.tokens -= group.reserved
        to.tokens += group.reserved
        group.owner, group.epoch = to, to.epoch
