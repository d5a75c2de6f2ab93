"""The Hub as the launcher needs it: `huggingface_hub`'s calls with time-outs, bounded retries and errors in one line.

The released client waits for ever and does not retry a POST, and a job that was posted twice costs twice. So a post
whose answer was lost is looked up by its labels before it is tried again.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

from bucket_grpo.jobs.hardware import Prices, documented_prices, prices_from
from bucket_grpo.jobs.labels import APP, name_of
from bucket_grpo.jobs.request import JobRequest

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

REQUEST_TIMEOUT_S = 30.0
ATTEMPTS = 5
LONGEST_PAUSE_S = 60.0
ACTIVE = ("SCHEDULING", "RUNNING")
# A listing may lag behind a post: how often, and how long after one another, a lost answer is looked for.
LOOKUPS, LOOKUP_PAUSE_S = 3, 1.0

Result = TypeVar("Result")


class HubProblem(RuntimeError):
    """The Hub refused, or could not be reached: one line that says what was asked for, why, and what to do."""


def stage(job: "JobInfo") -> str:
    """A job's stage as a plain word, whichever the client's version."""
    return str(getattr(job.status.stage, "value", job.status.stage))


def is_active(job: "JobInfo") -> bool:
    return stage(job) in ACTIVE


class JobsHub:
    """The jobs of one namespace.

    Args:
        namespace: whose jobs; always given, since asking who one is is rate-limited.
        token: by default the one that this machine is logged in with. Raises `HubProblem` if there is none.
        endpoint: another Hub than the one that `HF_ENDPOINT` names.
    """

    def __init__(
        self,
        namespace: str,
        *,
        token: str | None = None,
        endpoint: str | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        from huggingface_hub import HfApi, get_token

        self.namespace = namespace
        self.token = token or get_token() or ""
        if not self.token:
            raise HubProblem("no Hugging Face token: run `hf auth login`, or set HF_TOKEN to one with the role 'write'")
        set_timeouts()
        self.api = HfApi(endpoint=endpoint, token=self.token)
        self._pause = pause

    def prices(self) -> Prices:
        """What the Hub asks for now; the documented prices where it does not say."""
        try:
            return prices_from(self._retried("list the hardware", self.api.list_jobs_hardware))
        except HubProblem:
            return documented_prices()

    def create_bucket(self, bucket_id: str) -> None:
        """Make sure that the bucket is there, private if it is new."""
        import inspect

        known = inspect.signature(self.api.create_bucket).parameters
        private: dict[str, Any] = {"visibility": "private"} if "visibility" in known else {"private": True}
        self._retried(
            f"create the bucket {bucket_id}", lambda: self.api.create_bucket(bucket_id, exist_ok=True, **private)
        )

    def jobs(self, **labels: str) -> list["JobInfo"]:
        """Our jobs with these labels (`run`, `incarnation`, `part`, `role`), oldest first."""
        wanted = {"app": APP, **labels}
        found = self._retried("list jobs", lambda: list(self.api.list_jobs(labels=wanted, namespace=self.namespace)))
        ours = [job for job in found if name_of(job) is not None]
        return sorted(ours, key=lambda job: (job.created_at.timestamp() if job.created_at else 0.0, job.id))

    def active(self, **labels: str) -> list["JobInfo"]:
        return [job for job in self.jobs(**labels) if is_active(job)]

    def inspect(self, job_id: str) -> "JobInfo":
        return self._retried(
            f"inspect job {job_id}", lambda: self.api.inspect_job(job_id=job_id, namespace=self.namespace)
        )

    def cancel(self, job_id: str) -> None:
        """Cancel a job; one that is over, or gone, counts as cancelled."""

        def call() -> None:
            try:
                self.api.cancel_job(job_id=job_id, namespace=self.namespace)
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in (404, 409):
                    raise

        self._retried(f"cancel job {job_id}", call)

    def logs(self, job_id: str, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        try:
            yield from self.api.fetch_job_logs(job_id=job_id, namespace=self.namespace, follow=follow, tail=tail)
        except httpx.HTTPError as error:
            raise HubProblem(f"cannot read the log of job {job_id}: {explain(error)}") from error

    def post(self, request: JobRequest, secrets: Mapping[str, str]) -> "JobInfo":
        """Start the job, once. After an answer that was lost, the job is looked for before it is posted again.

        Raises `HubProblem` if the Hub refuses, or if it stays unclear whether the job exists.
        """
        arguments = request.arguments(secrets, self.api.run_job)
        what = f"start job {request.name.part} on {request.flavor}"
        for attempt in range(ATTEMPTS):
            try:
                return self.api.run_job(**arguments)
            except httpx.HTTPError as error:
                if not _may_pass(error) or attempt == ATTEMPTS - 1:
                    raise HubProblem(f"cannot {what}: {explain(error)}") from error
                if not _was_refused(error) and (found := self._lost(request)):
                    return found
                self._pause(_pause_s(error, attempt))
        raise AssertionError("unreachable")

    def schedule(self, request: JobRequest, secrets: Mapping[str, str], when: str) -> str:
        """Have the Hub start the job at each time of `when` (cron, or `@daily` and the like), one at a time.

        Returns the scheduled job's id. Not repeated after a lost answer: the error says how to look for it.
        """
        arguments = request.arguments(secrets, self.api.create_scheduled_job)
        try:
            return self.api.create_scheduled_job(schedule=when, concurrency=False, **arguments).id
        except httpx.HTTPError as error:
            raise HubProblem(
                f"cannot schedule {request.name.run}: {explain(error)}. `hf jobs scheduled ps` shows if it is there"
            ) from error

    def _lost(self, request: JobRequest) -> "JobInfo | None":
        """The job of a post whose answer was lost, if it was made."""
        for attempt in range(LOOKUPS):
            if attempt:
                self._pause(LOOKUP_PAUSE_S)
            if found := self.active(**request.name.lookup):
                return found[0]
        return None

    def cancel_doubles(self, **labels: str) -> list[str]:
        """End all but the oldest of the jobs that are the same part of an incarnation; returns the ids that were ended.

        Needed because a listing may show a job only after it was looked for and posted again.
        """
        seen: set[tuple[str, str, str]] = set()
        ended = []
        for job in self.active(**labels):
            name = name_of(job)
            assert name is not None
            key = (name.run, name.incarnation, name.part)
            if key in seen:
                self.cancel(job.id)
                ended.append(job.id)
            seen.add(key)
        return ended

    def _retried(self, what: str, call: Callable[[], Result]) -> Result:
        """`call`, again after errors that may pass. Only for calls that may be repeated."""

        def wait(state: RetryCallState) -> float:
            assert state.outcome is not None
            error = state.outcome.exception()
            return _pause_s(error, state.attempt_number - 1) if isinstance(error, httpx.HTTPError) else 1.0

        try:
            return Retrying(
                retry=retry_if_exception(_may_pass),
                stop=stop_after_attempt(ATTEMPTS),
                wait=wait,
                sleep=self._pause,
                reraise=True,
            )(call)
        except httpx.HTTPError as error:
            raise HubProblem(f"cannot {what}: {explain(error)}") from error


def set_timeouts() -> None:
    """Bound every request of `huggingface_hub` in this process: its own client waits for ever."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def bounded() -> httpx.Client:
        client = default_client_factory()
        client.timeout = httpx.Timeout(REQUEST_TIMEOUT_S)
        return client

    set_client_factory(bounded)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return response.status_code if isinstance(response, httpx.Response) else None


def _was_refused(error: BaseException) -> bool:
    """Whether the Hub is known not to have acted: too many requests, or no connection at all."""
    return _status(error) == 429 or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    if status is None:
        return isinstance(error, httpx.TransportError)
    return status in (408, 425, 429) or status >= 500


def _pause_s(error: BaseException, attempt: int) -> float:
    """What the Hub asks for in Retry-After, else 0.5, 1, 2, … seconds."""
    response = getattr(error, "response", None)
    asked = response.headers.get("Retry-After", "") if isinstance(response, httpx.Response) else ""
    return min(LONGEST_PAUSE_S, float(asked) if asked.isdecimal() else 0.5 * 2**attempt)


def explain(error: BaseException) -> str:
    """One line for a failed call: what the Hub said, and what helps."""
    status = _status(error)
    if status is None:
        return (
            f"the Hub does not answer ({type(error).__name__}: {error or 'no details'}): check HF_ENDPOINT and network"
        )
    response: httpx.Response = error.response  # type: ignore[attr-defined]
    said = response.headers.get("X-Error-Message") or _error_in(response) or str(error).splitlines()[0]
    hints = {
        401: "the token is not valid (any more): run `hf auth login`, or set HF_TOKEN",
        402: "the account has no credit left, or may not use jobs: see https://huggingface.co/settings/billing",
        403: "the token may not do that there: use one with the role 'write' for this namespace",
        404: "it does not exist, or this token may not see it",
        429: "too many requests: try again in a few minutes",
    }
    hint = hints.get(status)
    return f"{said} (HTTP {status})" + (f". {hint}" if hint else "")


def _error_in(response: httpx.Response) -> str | None:
    """What the body says; clients of different versions put it into the exception or leave it out."""
    try:
        said = response.json().get("error")
    except (ValueError, AttributeError, httpx.ResponseNotRead):
        return None
    return str(said).splitlines()[0] if said else None


def running_usd(jobs: Iterable["JobInfo"], prices: Prices, exposed_usd_per_hour: float) -> float:
    """What these jobs cost so far, by the Hub's own count of their running time."""
    total = 0.0
    for job in jobs:
        ran_s = (job.durations.running_secs if job.durations else None) or 0
        per_hour = prices.flavor(str(job.flavor)).usd_per_hour
        labels = job.labels or {}
        total += ran_s / 3600 * (per_hour + (exposed_usd_per_hour if labels.get("role") == "vllm" else 0.0))
    return total
