"""The few calls that the agent makes to vLLM's HTTP API, with what their answers really mean (vLLM 0.31).

A load is answered 200 in plain text; 404 and 500 carry the cause in the text; 400 means that the name is taken. A call
that times out here may still take effect in vLLM, so its result is to be looked up in `adapters()`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from bucket_grpo.bucket_sync.wire import Load

CONTROL_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 30.0


class EngineUnreachable(Exception):
    """vLLM did not answer: it is starting, dead, or too slow. What it did with the call is unknown."""


class EngineRefused(Exception):
    """vLLM answered with an error. `status` is the HTTP status, the message its own text."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


@dataclass(frozen=True)
class ServedModel:
    """`root` is the path that it was loaded from; `max_model_len` is given for the base only."""

    root: str
    parent: str | None
    max_model_len: int | None


class VllmClient:
    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self.base_url = base_url

    async def healthy(self) -> bool:
        try:
            await self._call("GET", "/health", timeout_s=CONTROL_TIMEOUT_S)
        except (EngineUnreachable, EngineRefused):
            return False
        return True

    async def models(self) -> dict[str, ServedModel]:
        """What is addressable now, by name."""
        listing = orjson.loads(await self._call("GET", "/v1/models", timeout_s=CONTROL_TIMEOUT_S))
        return {
            entry["id"]: ServedModel(str(entry["root"]), entry.get("parent"), entry.get("max_model_len"))
            for entry in listing["data"]
        }

    async def server_info(self) -> dict[str, Any]:
        info = orjson.loads(await self._call("GET", "/server_info?config_format=json", timeout_s=LOAD_TIMEOUT_S))
        return dict(info["vllm_config"])

    async def load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._call("POST", "/v1/load_lora_adapter", body, timeout_s=LOAD_TIMEOUT_S)

    async def unload_adapter(self, name: str) -> None:
        """A name that is not there counts as unloaded."""
        try:
            await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=LOAD_TIMEOUT_S)
        except EngineRefused as refusal:
            if refusal.status != 404:
                raise

    async def prompt_logprobs(self, model: str, prompt: Sequence[int], *, timeout_s: float) -> list[float]:
        """Natural log-probabilities of `prompt[1:]` under `model`, each given the ids before it.

        `prompt_logprobs: 0` asks for the prompt's own tokens and no alternatives; such a request never reads the prefix
        cache, so the answer is computed now, by this adapter.
        """
        body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = orjson.loads(await self._call("POST", "/v1/completions", body, timeout_s=timeout_s))
        entries = answer["choices"][0]["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], entries[1:], strict=True)]

    async def load(self) -> Load:
        return parse_load((await self._call("GET", "/metrics", timeout_s=CONTROL_TIMEOUT_S)).decode())

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float) -> bytes:
        try:
            async with self._session.request(
                method,
                self.base_url + path,
                data=None if body is None else orjson.dumps(body),
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnreachable(f"{method} {path}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise EngineRefused(response.status, error_text(content))
        return content


def error_text(content: bytes) -> str:
    """The message of vLLM's error body, which is JSON in most cases and plain text in some."""
    try:
        message = orjson.loads(content)["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = content.decode(errors="replace")
    return str(message).strip()[:2000]


_FIELDS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "generated_tokens_total",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries_total",
}


def parse_load(metrics: str) -> Load:
    """The load figures of vLLM's `/metrics`, summed over its engines (the cache's use is their mean)."""
    # The page has some 700 lines of histograms; parsing only the ones that we read takes 0.1 ms instead of 10.
    wanted = "\n".join(line for line in metrics.splitlines() if line.startswith(tuple(_FIELDS)))
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            if sample.name in _FIELDS:
                values.setdefault(_FIELDS[sample.name], []).append(sample.value)
    usage = values.pop("kv_cache_usage", [0.0])
    return Load(kv_cache_usage=sum(usage) / len(usage), **{field: int(sum(found)) for field, found in values.items()})
