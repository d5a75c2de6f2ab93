"""The trainer's side of the proxy's control API: announce a version, wait until it is live, retire one, ask for all.

The proxy may be restarting, and then has forgotten what it was told: calls are retried for a bounded time without an
answer, and a version that it does not know is announced again.
"""

import time
from collections.abc import Callable

import httpx
from pydantic import TypeAdapter

from bucket_grpo.bucket_sync.vocabulary import VersionRef, parse_served_name, version_key
from bucket_grpo.bucket_sync.wire import VersionLiveness

LONG_POLL_S = 30
RETRY_PAUSE_S = (0.1, 2.0)


class ProxyError(Exception):
    """The proxy refused a call, or could not be reached for as long as allowed."""


class ProxyClient:
    """Args:
    url: of the proxy, e.g. `http://127.0.0.1:8000`.
    token: sent as bearer token, if given.
    outage_s: how long the proxy may go without an answer before a call gives up.
    """

    def __init__(
        self, url: str, *, token: str | None = None, outage_s: float = 60.0, lora_name: str = "trl-policy"
    ) -> None:
        self.url = url.rstrip("/")
        self.retries = 0
        self._outage_s = outage_s
        self._lora_name = lora_name
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # trust_env: the proxy is on this machine, an HTTP_PROXY of the environment is not meant for it.
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=10.0, trust_env=False)

    def announce(self, ref: VersionRef) -> None:
        """`POST /versions`; idempotent."""
        self._insist("announce", lambda: self._client.post("/versions", json=ref.model_dump()))

    def wait_live(self, ref: VersionRef, timeout_s: float) -> VersionLiveness:
        """Wait until the version is live, retired or failed on every replica; raises `ProxyError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            wait_s = min(LONG_POLL_S, left_s)
            answer = self._insist(
                "wait for",
                lambda wait_s=wait_s: self._client.get(  # type: ignore[misc]
                    f"/versions/{ref.name}", params={"wait": round(wait_s, 3)}, timeout=wait_s + 10
                ),
                missing_ok=True,
            )
            if answer.status_code == 404:
                self.announce(ref)
                time.sleep(RETRY_PAUSE_S[0])
                continue
            liveness = VersionLiveness.model_validate_json(answer.content)
            if liveness.state != "pending":
                return liveness
        raise ProxyError(
            f"version {ref.name} was not live on any replica after {timeout_s:.0f} s; see {self.url}/status"
        )

    def wanted(self) -> set[str]:
        """The keys of the versions that the proxy has not retired: its fleet may still have to read them."""
        answer = self._insist("list", lambda: self._client.get("/versions"))
        known = TypeAdapter(list[VersionLiveness]).validate_json(answer.content)
        return {version_key(*parse_served_name(one.name)) for one in known if one.state in ("pending", "live")}

    def retire(self, number: int) -> None:
        """Say that TRL needs the version no more; a version that the proxy never had is a success."""
        name = f"{self._lora_name}-v{number}"
        self._insist(
            "retire", lambda: self._client.post("/v1/unload_lora_adapter", json={"lora_name": name}), missing_ok=True
        )

    def close(self) -> None:
        self._client.close()

    def _insist(self, verb: str, call: Callable[[], httpx.Response], *, missing_ok: bool = False) -> httpx.Response:
        deadline: float | None = None  # counts from the first failure: a long poll may take its time
        pause_s, longest_s = RETRY_PAUSE_S
        while True:
            try:
                answer = call()
                if answer.is_success or (missing_ok and answer.status_code == 404):
                    return answer
                problem = f"HTTP {answer.status_code}: {answer.text[:500]}"
                if answer.is_client_error and answer.status_code not in (408, 425, 429):
                    raise ProxyError(f"the proxy at {self.url} refused to {verb} a version: {problem}")
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            deadline = deadline or time.monotonic() + self._outage_s
            if time.monotonic() + pause_s >= deadline:
                raise ProxyError(
                    f"the proxy at {self.url} gave no good answer for {self._outage_s:.0f} s "
                    f"when asked to {verb} a version: {problem}"
                )
            self.retries += 1
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
