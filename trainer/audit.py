"""Which policy really answered? The audit recomputes sampled token logprobs from the published files.

The proxy's journal names, for each completion, the version that served it, and for a sample of them keeps the token
logprobs that the replica reported. The audit takes the version's file from the bucket, verifies it, puts it on the base
model with PEFT and computes the same logprobs again. It shares no code with what served them, and trusts no label.

An audit that can't tell policies apart finds nothing wrong either, so it measures its own power: the same samples are
held against the *neighbouring* version (the published one before; after, for the first), with the same tolerance. The
fraction that it would have flagged is `power_frac`. Adjacent policies are the hardest to tell apart.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from bucket_grpo.bucket_sync.stores import NotFound, Store, open_store
from bucket_grpo.bucket_sync.version_file import VerifiedVersion, VersionRejected, verify_version
from bucket_grpo.bucket_sync.vocabulary import SERVED_NAME, parse_version_key, served_name, version_key
from bucket_grpo.report.files import read_yaml, write_json
from bucket_grpo.report.journal import Sample, read_samples

# Largest difference of one token's logprob (nats) that still counts as the same policy. Measured in float32 with vLLM
# 0.31 on a CPU, a 1M-parameter model, 750 answers over 50 versions, one each 4 steps: the right version was off by at
# most 9.4e-6 (p99 3.8e-6), the neighbouring one by at least 2.8e-4. 1e-3 would have missed 1 % of the neighbours.
# Rounding in 16 bits is far larger and was not measured: there, look at the power that is left.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

WORST_CASES = 10


class WorstCase(BaseModel):
    """One of the samples furthest from what its version says. `reason` is set where nothing could be compared."""

    id: str
    served: str
    replica: str | None
    max_abs_logprob_diff: float | None
    reason: str | None = None


class AuditResult(BaseModel):
    """What `audit` prints and `audit.json` holds."""

    model_config = ConfigDict(extra="forbid")

    audited_samples: int
    wrong_policy_samples: int
    """Samples further than `tolerance` from their version, or whose version can't be had or verified."""
    max_abs_logprob_diff: float | None
    """Over all tokens of all samples that could be compared; nats."""
    power_frac: float | None
    """Of all samples, the fraction flagged when held against the neighbouring version; null without samples."""
    tolerance: float
    versions: int
    """How many versions the samples came from."""
    same_neighbour_samples: int
    """Samples whose neighbour is the same policy, tensor by tensor: nothing can flag them; they count against power."""
    unreadable_versions: dict[str, str]
    """Served name → why its file could not be used."""
    unreadable_lines: int
    """Journal lines that could not be parsed, such as the last one of a proxy that was killed."""
    worst: list[WorstCase]


@dataclass
class _Verdict:
    sample: Sample
    key: str | None = None
    """The object that holds the version that the journal names."""
    neighbour: str | None = None
    diff: float | None = None
    neighbour_diff: float | None = None
    reason: str | None = None


def audit_run(
    run_dir: Path,
    store: Store,
    model: str | None = None,
    *,
    dtype: str = "float32",
    tolerance: float | None = None,
    temperature: float = 1.0,
    max_samples: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> AuditResult:
    """Audit every sampled completion in the journal of `run_dir`.

    Args:
        run_dir: the run's folder, with `journal/journal-*.jsonl`.
        store: the bucket that holds the versions.
        model: base model, a name or a path; by default the one that the version files name.
        dtype: what the replicas served in; the recomputation is always in float32.
        tolerance: largest difference in nats that counts as the same policy (default: by `dtype`).
        temperature: the sampling temperature, since vLLM reports the logprobs of the scaled distribution.
        max_samples: audit an evenly spaced part of the samples; all by default.
        on_progress: called with (comparisons done, comparisons in all).

    Raises `FileNotFoundError` without a journal, `ValueError` where the versions name different base models.
    """
    from bucket_grpo.trainer.policies import PolicySwitch

    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    samples, unreadable_lines = read_samples(run_dir / "journal")
    if max_samples is not None and len(samples) > max_samples:
        samples = [samples[i * len(samples) // max_samples] for i in range(max_samples)]
    verdicts = [_Verdict(sample) for sample in samples]

    bucket = _Versions(store)
    for verdict in verdicts:
        _locate(verdict, bucket)
    own, as_neighbour = _by_version(verdicts, "key"), _by_version(verdicts, "neighbour")
    total = sum(map(len, (*own.values(), *as_neighbour.values())))
    done = 0
    switch: PolicySwitch | None = None
    for key in sorted({*own, *as_neighbour}):  # each version is put on the model once
        version = bucket.read(key)
        if version is None:
            for verdict in own[key]:
                verdict.reason = bucket.unreadable[key]
            continue
        if switch is None:
            switch = PolicySwitch(model or version.base_model, temperature=temperature)
        elif model is None and version.base_model != switch.base_model:
            raise ValueError(f"{key} was trained on {version.base_model!r}, others on {switch.base_model!r}: name one")
        switch.use(version)
        for group, result in ((own[key], "diff"), (as_neighbour[key], "neighbour_diff")):
            for batch in switch.batches([v.sample for v in group]):
                for i, diff in zip(batch, switch.max_abs_diffs([group[i].sample for i in batch]), strict=True):
                    setattr(group[i], result, diff)
                done += len(batch)
                if on_progress:
                    on_progress(done, total)
    return _conclude(verdicts, tolerance, bucket, unreadable_lines)


def _locate(verdict: _Verdict, bucket: "_Versions") -> None:
    """Fill in the keys of a sample's version and of the version's neighbour, or the reason why there is none."""
    sample = verdict.sample
    match = SERVED_NAME.match(sample.served)
    if not match:
        verdict.reason = f"{sample.served!r} is not the name of a version"
    elif not sample.prompt or not sample.output or len(sample.output) != len(sample.logprobs):
        verdict.reason = (
            f"the journal holds {len(sample.prompt)} prompt ids, {len(sample.output)} output ids and "
            f"{len(sample.logprobs)} logprobs"
        )
    else:
        run, incarnation, number = match["run"], match["incarnation"], int(match["number"])
        verdict.key = version_key(run, incarnation, number)
        verdict.neighbour = bucket.neighbour(run, incarnation, number)


def _by_version(verdicts: Sequence[_Verdict], attribute: str) -> dict[str, list[_Verdict]]:
    groups: dict[str, list[_Verdict]] = defaultdict(list)
    for verdict in verdicts:
        key = getattr(verdict, attribute)
        if key is not None:
            groups[key].append(verdict)
    return groups


def _conclude(
    verdicts: Sequence[_Verdict], tolerance: float, bucket: "_Versions", unreadable_lines: int
) -> AuditResult:
    def is_wrong(verdict: _Verdict) -> bool:
        return verdict.diff is None or not verdict.diff <= tolerance  # a NaN is wrong too

    diffs = [v.diff for v in verdicts if v.diff is not None]
    flagged = [v for v in verdicts if v.neighbour_diff is not None and not v.neighbour_diff <= tolerance]
    ranked = sorted(verdicts, key=lambda v: float("inf") if v.diff is None else v.diff, reverse=True)
    return AuditResult(
        audited_samples=len(verdicts),
        wrong_policy_samples=sum(map(is_wrong, verdicts)),
        max_abs_logprob_diff=max(diffs, default=None),
        power_frac=len(flagged) / len(verdicts) if verdicts else None,
        tolerance=tolerance,
        versions=len({v.sample.served for v in verdicts}),
        same_neighbour_samples=sum(bucket.same_policy(v.key, v.neighbour) for v in verdicts),
        unreadable_versions={
            served_name(*parse_version_key(key)): reason for key, reason in sorted(bucket.unreadable.items())
        },
        unreadable_lines=unreadable_lines,
        worst=[
            WorstCase(
                id=v.sample.id,
                served=v.sample.served,
                replica=v.sample.replica,
                max_abs_logprob_diff=v.diff,
                reason=v.reason,
            )
            for v in ranked[:WORST_CASES]
        ],
    )


class _Versions:
    """The versions in the bucket: which are there, and their verified contents, each read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listed: dict[tuple[str, str], list[int]] = {}
        self._policies: dict[str | None, tuple[object, ...]] = {}
        self.unreadable: dict[str, str] = {}

    def neighbour(self, run: str, incarnation: str, number: int) -> str | None:
        """Key of the nearest published version below, or above if there is none below."""
        if (run, incarnation) not in self._listed:
            self._listed[run, incarnation] = self._list(run, incarnation)
        published = self._listed[run, incarnation]
        below = [n for n in published if n < number]
        above = [n for n in published if n > number]
        nearest = max(below) if below else min(above, default=None)
        return None if nearest is None else version_key(run, incarnation, nearest)

    def _list(self, run: str, incarnation: str) -> list[int]:
        numbers = []
        for entry in self._store.list(f"{run}/{incarnation}/"):
            try:
                numbers.append(parse_version_key(entry.key)[2])
            except ValueError:
                continue  # a checkpoint, or whatever else lies there
        return numbers

    def read(self, key: str) -> VerifiedVersion | None:
        """The verified version; None with the reason kept in `unreadable`."""
        try:
            version = verify_version(self._store.read(key))
            if version.ref.key != key:
                raise VersionRejected("wrong_version", f"the object {key} says that it is {version.ref.key}")
        except (NotFound, VersionRejected) as error:
            self.unreadable[key] = f"{key}: {error}"
            return None
        self._policies[key] = _fingerprint(version)
        return version

    def same_policy(self, one: str | None, other: str | None) -> bool:
        """Whether two versions, both read before, are the same tensors under the same scale."""
        return one in self._policies and self._policies.get(one) == self._policies.get(other)


def _fingerprint(version: VerifiedVersion) -> tuple[object, ...]:
    index = sorted((name, info.shape, info.start) for name, info in version.tensors.items())
    return hashlib.sha256(version.body).hexdigest(), tuple(index), version.adapter_config.get("lora_alpha")


def audit_folder(
    run_dir: Path,
    *,
    model: str | None = None,
    bucket: str | None = None,
    tolerance: float | None = None,
    max_samples: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """What `bucket-grpo audit RUN` does: audit a run's folder and leave the result there as `audit.json`.

    Args:
        model: the base model; by default the one that `run.yaml` names.
        bucket: a path or `hf://buckets/<namespace>/<name>`; by default `bucket/` in the run's folder if it is there,
            else the one that `run.yaml` names.

    Returns the fields of `AuditResult` as plain JSON values. Raises `FileNotFoundError` if the run, its journal or its
    bucket can't be found; the message says which.
    """
    from bucket_grpo.trainer.tiny_model import resolve_model

    run_file = read_yaml(run_dir / "run.yaml")
    if run_file is None:
        raise FileNotFoundError(f"{run_dir} is not a run's folder: it holds no run.yaml")
    if bucket is None:
        local = run_dir / "bucket"
        bucket = str(local) if local.is_dir() else run_file.get("bucket")
    if bucket is None:
        raise FileNotFoundError(f"{run_dir} holds no bucket/ and its run.yaml names none: say where with --bucket")
    model = model or run_file.get("model_name_or_path")
    result = audit_run(
        run_dir,
        open_store(bucket),
        resolve_model(model) if model else None,
        dtype=run_file.get("dtype") or "float32",
        tolerance=tolerance,
        temperature=run_file.get("temperature") or 1.0,
        max_samples=max_samples,
        on_progress=on_progress,
    )
    figures = result.model_dump(mode="json")
    write_json(run_dir / "audit.json", figures)
    return figures
