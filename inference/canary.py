"""Proof that a loaded version answers as the trainer computed, and that LoRA has an effect at all. Pure.

A load that was answered 200 proves nothing: vLLM accepts adapters that it then ignores. Version 1 of a run equals the
base by construction, so its canary cannot tell the two apart; the probe can.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bucket_grpo.bucket_sync.version_file import Canary

# Largest accepted |difference| of one logprob, in nats. Measured for the right adapter of a small model on CPU: float32
# 5e-7, float16 0.013, bfloat16 0.12. In float32 neighbouring versions of a run differ by more than the tolerance; in 16
# bits the canary tells a broken adapter from a right one, not one version from the next.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
# Kernels on a GPU may round float32 factors to TF32 (10 bits of mantissa, as float16).
TOLERANCE_TF32 = 0.02
# A probe as large as the weights moves logprobs by tenths at least; noise stays below.
PROBE_MIN_EFFECT = {"float32": 1e-2, "bfloat16": 0.1, "float16": 0.1}
FALLBACK_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Verdict:
    ok: bool
    reason: str | None = None


def tolerance(canary_dtype: str, served_dtype: str, device: str, override: float | None = None) -> float:
    """The looser of both sides' noise, unless the user said one."""
    floor = TOLERANCE_TF32 if device == "cuda" else 0.0
    return override or max(floor, TOLERANCE[served_dtype], TOLERANCE.get(canary_dtype, 0.0))


def judge_canary(canary: Canary, served: Sequence[float], allowed: float) -> Verdict:
    """Compare what vLLM answered for `canary.prompt` with what the trainer expects, in nats."""
    problem = _unusable(served, len(canary.logprobs))
    if problem:
        return Verdict(False, f"canary: {problem}")
    differences = [abs(got - expected) for got, expected in zip(served, canary.logprobs, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    if differences[worst] <= allowed:
        return Verdict(True)
    return Verdict(
        False,
        f"canary: logprobs differ from the trainer's by up to {differences[worst]:.4g} "
        f"(mean {sum(differences) / len(differences):.4g}, allowed {allowed:g}); at token {worst + 1} of the prompt "
        f"vLLM answers {served[worst]:.4f}, expected {canary.logprobs[worst]:.4f}: "
        "vLLM does not serve this version's weights",
    )


def judge_probe(base: Sequence[float], probe: Sequence[float], dtype: str) -> Verdict:
    """Whether a large random adapter changed what the base answers."""
    problem = _unusable(base, len(probe)) or _unusable(probe, len(base))
    if problem:
        return Verdict(False, f"probe: {problem}")
    effect = max(abs(a - b) for a, b in zip(base, probe, strict=True))
    if effect >= PROBE_MIN_EFFECT[dtype]:
        return Verdict(True)
    return Verdict(
        False,
        f"LoRA has no effect: a large random adapter moved the base's logprobs by {effect:.3g} at most "
        f"(expected at least {PROBE_MIN_EFFECT[dtype]:g}), so vLLM serves the base under an adapter's name",
    )


def _unusable(logprobs: Sequence[float], expected: int) -> str | None:
    if len(logprobs) != expected:
        return f"vLLM answered {len(logprobs)} logprobs, expected {expected}"
    if not all(math.isfinite(value) for value in logprobs):
        return "vLLM answered logprobs that are not finite: its memory is poisoned"
    return None
