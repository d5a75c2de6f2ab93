"""The released client with its network taken away: every request is kept, and answered as the Hub would."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import huggingface_hub

Answer = Callable[[httpx.Request], httpx.Response]


def job_answer(body: dict[str, Any], number: int = 1, stage: str = "SCHEDULING") -> dict[str, Any]:
    return {
        "id": f"{number:024x}",
        "owner": {"id": "u1", "name": "me", "type": "user"},
        "status": {"stage": stage},
        "createdAt": f"2026-11-30T16:00:{number:02d}.000Z",
        "flavor": body.get("flavor"),
        "labels": body.get("labels"),
    }


@dataclass
class ScriptedHub:
    """Keeps jobs in memory. `faults` are taken from the front, one for each POST of a job: an exception, a status, or
    `"lost"` (the job is made, its answer is not)."""

    faults: list[Any] = field(default_factory=list)
    lists_lag: int = 0
    """How many listings still show nothing new after a post."""
    requests: list[httpx.Request] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    _hidden: int = 0

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests if self._is_post(request)]

    @staticmethod
    def _is_post(request: httpx.Request) -> bool:
        return request.method == "POST" and re.fullmatch(r"/api/jobs/[^/]+", request.url.path) is not None

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        path = request.url.path
        if self._is_post(request):
            return self._post(request)
        if path.endswith("/cancel"):
            job_id = path.split("/")[-2]
            self.cancelled.append(job_id)
            for job in self.jobs:
                if job["id"] == job_id:
                    job["status"]["stage"] = "CANCELED"
            return httpx.Response(200, json={}, request=request)
        if request.method == "GET" and re.fullmatch(r"/api/jobs/[^/]+", path):
            return httpx.Response(200, json=self._listed(request), request=request)
        return httpx.Response(404, json={"error": f"no route {path}"}, request=request)

    def _post(self, request: httpx.Request) -> httpx.Response:
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return httpx.Response(fault, json={"error": "refused"}, headers={"Retry-After": "0"}, request=request)
        if isinstance(fault, Exception):
            raise fault
        self.jobs.append(job_answer(json.loads(request.content), len(self.jobs) + 1))
        self._hidden = self.lists_lag
        if fault == "lost":
            raise httpx.ReadTimeout("the answer was lost", request=request)
        return httpx.Response(200, json=self.jobs[-1], request=request)

    def _listed(self, request: httpx.Request) -> list[dict[str, Any]]:
        shown = self.jobs
        if self._hidden:
            self._hidden -= 1
            shown = self.jobs[:-1]
        wanted = [label.partition("=")[::2] for label in request.url.params.get_list("label")]
        return [job for job in shown if all(job["labels"].get(key) == value for key, value in wanted)]


@contextmanager
def client_talks_to(answer: Answer) -> Iterator[None]:
    """Within the block, `huggingface_hub` sends every request to `answer`."""
    from bucket_grpo.jobs import hub

    before = hub.set_timeouts
    transport = httpx.MockTransport(answer)
    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=transport))
    hub.set_timeouts = lambda: None  # type: ignore[assignment]
    try:
        yield
    finally:
        hub.set_timeouts = before  # type: ignore[assignment]
        before()
