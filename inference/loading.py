"""Getting one version into vLLM, and proving that it is there. Every doubt is settled by asking `/v1/models`."""

import asyncio
import logging
from pathlib import Path

from bucket_grpo.bucket_sync.version_file import Canary
from bucket_grpo.inference import canary as proof
from bucket_grpo.inference.board import Counters
from bucket_grpo.inference.canary import Verdict
from bucket_grpo.inference.probe import write_probe
from bucket_grpo.inference.vllm_client import EngineRefused, EngineUnreachable, VllmClient

log = logging.getLogger(__name__)

LOAD_ATTEMPTS = 3
PROOF_TIMEOUT_S = 60.0
PROBE_NAME = "bucket-grpo-probe"


class LoadFailed(Exception):
    """vLLM does not take this adapter; the message is its own."""


async def load(client: VllmClient, name: str, folder: Path, counters: Counters) -> None:
    """Make `name` addressable, loaded from exactly `folder`.

    Raises `LoadFailed` after `LOAD_ATTEMPTS` refusals, `EngineUnreachable` if vLLM answers no more.
    """
    cause = ""
    for attempt in range(LOAD_ATTEMPTS):
        if attempt:
            counters.load_retries += 1
            await asyncio.sleep(0.2 * 2**attempt)
        try:
            await client.load_adapter(name, folder)
            counters.loads += 1
            return
        except EngineRefused as refusal:
            cause = str(refusal)
        except EngineUnreachable as silence:
            cause = str(silence)  # a client's timeout does not cancel the load
        served = (await client.models()).get(name)
        if served is not None and served.root == str(folder):
            counters.loads += 1
            return
        if served is not None:
            await client.unload_adapter(name)
    counters.load_failures += 1
    raise LoadFailed(f"vLLM refused {name} {LOAD_ATTEMPTS} times: {cause}")


async def probe(client: VllmClient, base: str, version_folder: Path, prompt: list[int], dtype: str) -> Verdict:
    """Show that LoRA has an effect in this engine, with an adapter shaped like the one in `version_folder`."""
    folder = version_folder.with_name(f".{PROBE_NAME}")
    if not folder.exists():
        await asyncio.to_thread(write_probe, version_folder, folder)
    await load(client, PROBE_NAME, folder, Counters())
    try:
        plain = await client.prompt_logprobs(base, prompt, timeout_s=PROOF_TIMEOUT_S)
        probed = await client.prompt_logprobs(PROBE_NAME, prompt, timeout_s=PROOF_TIMEOUT_S)
    finally:
        await _unload_probe(client)
    return proof.judge_probe(plain, probed, dtype)


async def _unload_probe(client: VllmClient) -> None:
    """A probe that stays costs a slot until newer adapters push it out; that must not hide what the proof found."""
    try:
        await client.unload_adapter(PROBE_NAME)
    except (EngineUnreachable, EngineRefused) as error:
        log.warning("the probe adapter stays loaded: %s", error)


async def check_canary(client: VllmClient, name: str, canary: Canary, allowed: float) -> Verdict:
    served = await client.prompt_logprobs(name, canary.prompt, timeout_s=PROOF_TIMEOUT_S)
    return proof.judge_canary(canary, served, allowed)
