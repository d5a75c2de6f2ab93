"""`/server_info` and `/v1/models` for the whole fleet: the smallest of each limit, and an error where replicas differ.

Asked of each routable replica once per engine start.
"""

from typing import Any

import orjson

from bucket_grpo.proxy.service import Service
from bucket_grpo.proxy.upstream import UpstreamError

# (where in vllm_config, what to do when replicas differ)
LIMITS = (
    ("lora_config", "max_loras"),
    ("lora_config", "max_lora_rank"),
    ("lora_config", "max_cpu_loras"),
    ("model_config", "max_model_len"),
)
SAME = (("model_config", "dtype"), ("model_config", "model"))


class ReplicasDiffer(Exception):
    """Replicas can't stand for one server, or none can be asked; the message says which and why."""


class ServerInfo:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._cache: dict[tuple[str, str, int, str], Any] = {}

    async def server_info(self) -> dict[str, Any]:
        """vLLM's `/server_info?config_format=json`; raises `ReplicasDiffer`."""
        answers = await self._ask("/server_info?config_format=json")
        configs = {url: answer.get("vllm_config") for url, answer in answers.items()}
        merged = next(iter(answers.values()))
        first = merged["vllm_config"]
        for url, config in configs.items():
            if not isinstance(config, dict):
                raise ReplicasDiffer(f"{url} describes no vllm_config: it must run with VLLM_SERVER_DEV_MODE=1")
            for part, key in SAME:
                if (config.get(part) or {}).get(key) != (first.get(part) or {}).get(key):
                    raise ReplicasDiffer(f"replicas differ in {part}.{key}: {_values(configs, part, key)}")
            if config.get("lora_config") is None:
                raise ReplicasDiffer(f"{url} runs without --enable-lora")
        for part, key in LIMITS:
            values = [value for value in _values(configs, part, key).values() if isinstance(value, int)]
            if values:
                first[part] = {**first[part], key: min(values)}
        return merged

    async def models(self) -> dict[str, Any]:
        """The base model with the smallest context length, and each version that is live; raises `ReplicasDiffer`."""
        fleet, config = self._service.fleet, self._service.config
        answers = await self._ask("/v1/models")
        lengths = []
        for url, answer in answers.items():
            base = [card for card in answer.get("data", ()) if card.get("id") == config.base_model]
            if not base:
                raise ReplicasDiffer(f"{url} does not serve {config.base_model!r}")
            lengths.append(base[0].get("max_model_len"))
        known = [length for length in lengths if isinstance(length, int)]
        data = [
            {"id": config.base_model, "object": "model", "owned_by": "vllm", "max_model_len": min(known, default=None)}
        ]
        for number in sorted(fleet.versions):
            if fleet.versions[number].state == "live":
                name = f"{config.lora_name}-v{number}"
                data.append({"id": name, "object": "model", "owned_by": "vllm", "parent": config.base_model})
        return {"object": "list", "data": data}

    async def _ask(self, path: str) -> dict[str, dict[str, Any]]:
        """The replicas' answers by URL, at least one. One that fails to answer is left out."""
        answers, failures = {}, []
        for url in self._service.fleet.ready_on(None):
            replica = self._service.fleet.replicas.get(url)
            if replica is None or replica.status is None:
                continue
            key = (url, replica.status.boot_id, replica.status.engine_epoch, path)
            if key not in self._cache:
                try:
                    self._cache[key] = await self._service.agents.get(url, path)
                except UpstreamError as error:
                    failures.append(str(error))
                    continue
            answers[url] = orjson.loads(self._cache[key])
        if not answers:
            raise ReplicasDiffer("; ".join(failures) or self._service.fleet.why_not_ready(None))
        return answers


def _values(configs: dict[str, Any], part: str, key: str) -> dict[str, Any]:
    return {url: ((config or {}).get(part) or {}).get(key) for url, config in configs.items()}
