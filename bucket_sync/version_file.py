"""A version is one safetensors file: the LoRA tensors, and in its metadata everything a reader needs to believe it.

One object is there or it isn't: no half adapter, no order between files. `pack_version` is the only writer and refuses
what must not be served; `verify_version` believes nothing that it has not recomputed.
"""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bucket_grpo.bucket_sync.lora_rules import VersionRejected, check_adapter
from bucket_grpo.bucket_sync.safetensors_file import (
    MalformedFile,
    TensorInfo,
    canonical_json,
    header_for,
    index_as_json,
    parse,
)
from bucket_grpo.bucket_sync.vocabulary import VersionRef

__all__ = [
    "FORMAT",
    "MAX_VERSION_BYTES",
    "Canary",
    "VerifiedVersion",
    "VersionRejected",
    "pack_version",
    "verify_version",
]

FORMAT = "bucket-grpo/1"
MAX_VERSION_BYTES = 4 * 1024**3
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


class Canary(BaseModel):
    """A fixed prompt and what the trainer's policy says of it.

    Args:
        prompt: token ids, at least 2.
        logprobs: natural log-probability of `prompt[1:]`, each given the ids before it; one fewer than `prompt`.
        dtype: the dtype that they were computed in, e.g. `float32`; a reader's tolerance follows from it and its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: list[int] = Field(min_length=2)
    logprobs: list[float]
    dtype: str = "float32"

    @model_validator(mode="after")
    def _fits(self) -> "Canary":
        if min(self.prompt) < 0:
            raise ValueError("a canary's prompt holds token ids, which are not negative")
        if len(self.logprobs) != len(self.prompt) - 1:
            raise ValueError(
                f"{len(self.prompt)} prompt ids need {len(self.prompt) - 1} logprobs, not {len(self.logprobs)}"
            )
        if not all(math.isfinite(value) and value <= 1e-4 for value in self.logprobs):
            raise ValueError("a canary's logprobs are finite and not positive")
        return self


@dataclass(frozen=True)
class VerifiedVersion:
    """A version whose every byte was checked. `tensors` is the index (names, dtypes, shapes) of `body`."""

    ref: VersionRef
    base_model: str
    adapter_config: Mapping[str, object]
    canary: Canary | None
    tensors: Mapping[str, TensorInfo]
    body: memoryview

    def write_peft_folder(self, folder: Path) -> Path:
        """Write `adapter_model.safetensors` and `adapter_config.json` so that `folder` appears complete or not at all.

        Raises:
            FileExistsError: `folder` is there already; vLLM's prefix cache is keyed by path, so a path is used once.
        """
        if folder.exists():
            raise FileExistsError(f"{folder} exists already: give each version a folder of its own")
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            with (staging / WEIGHTS_FILE).open("wb") as file:
                file.write(header_for({"format": "pt"}, self.tensors))
                file.write(self.body)
            (staging / CONFIG_FILE).write_text(json.dumps(self.adapter_config, indent=2, sort_keys=True))
            staging.chmod(0o755)
            staging.rename(folder)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return folder


def pack_version(
    adapter_dir: Path,
    *,
    run: str,
    incarnation: str,
    number: int,
    step: int,
    base_model: str,
    canary: Canary | None = None,
) -> tuple[bytes, VersionRef]:
    """Turn what PEFT's `save_pretrained` left in `adapter_dir` into a version's bytes.

    The same folder and arguments always give the same bytes, so a repeated publish is a no-op.

    Args:
        base_model: the name under which replicas serve the base. The adapter must name the same one; a local directory
            as the adapter's base is accepted and replaced by this name, since a path means nothing elsewhere.

    Raises:
        VersionRejected: the adapter must not be served; the message names the tensor or the field.
        FileNotFoundError: the folder holds no adapter.
    """
    config = _read_config(adapter_dir)
    _check_base(config.get("base_model_name_or_path"), base_model)
    config["base_model_name_or_path"] = base_model
    weights = adapter_dir / WEIGHTS_FILE
    if not weights.exists():
        pickles = sorted(path.name for pattern in PICKLES for path in adapter_dir.glob(pattern))
        if pickles:
            raise VersionRejected("pickle", f"{adapter_dir / pickles[0]} is a pickle: save the adapter as safetensors")
        raise FileNotFoundError(f"{weights} does not exist: {adapter_dir} holds no PEFT adapter")
    if weights.stat().st_size > MAX_VERSION_BYTES:
        raise VersionRejected(
            "too_large", f"{weights} has {weights.stat().st_size} bytes, more than {MAX_VERSION_BYTES}"
        )
    try:
        source = parse(weights.read_bytes())
    except MalformedFile as error:
        raise VersionRejected("malformed", f"{weights}: {error}") from error
    check_adapter(config, source.tensors, source.body)
    metadata = {
        "format": FORMAT,
        "run": run,
        "incarnation": incarnation,
        "version": str(number),
        "step": str(step),
        "base_model": base_model,
        "adapter_config": json.dumps(config, sort_keys=True),
    }
    if canary is not None:
        metadata["canary"] = canary.model_dump_json()
    metadata["digest"] = _digest(metadata, source.tensors, source.body)
    data = b"".join((header_for(metadata, source.tensors), source.body))
    ref = VersionRef(
        run=run,
        incarnation=incarnation,
        number=number,
        step=step,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
    )
    return data, ref


def verify_version(
    data: bytes | memoryview, *, expect: VersionRef | None = None, base_model: str | None = None
) -> VerifiedVersion:
    """Check every byte of a version file.

    Args:
        expect: what the publisher told; size and hash are compared before anything is parsed.
        base_model: the base that this reader serves.

    Raises:
        VersionRejected: with a short `reason`; nothing of the file may be used.
    """
    if len(data) > MAX_VERSION_BYTES:
        raise VersionRejected("too_large", f"{len(data)} bytes, more than {MAX_VERSION_BYTES}")
    if expect is not None and len(data) != expect.size:
        raise VersionRejected("wrong_size", f"{expect.key}: {len(data)} bytes, the publisher wrote {expect.size}")
    sha256 = hashlib.sha256(data).hexdigest()
    if expect is not None and sha256 != expect.sha256:
        raise VersionRejected("wrong_hash", f"{expect.key}: sha256 {sha256}, the publisher wrote {expect.sha256}")
    try:
        file = parse(data)
    except MalformedFile as error:
        raise VersionRejected("malformed", str(error)) from error
    metadata = file.metadata
    if metadata.get("format") != FORMAT:
        raise VersionRejected("wrong_format", f"the file's format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.get("digest") != _digest(metadata, file.tensors, file.body):
        raise VersionRejected("wrong_digest", "the digest in the metadata is not that of the metadata, index and body")
    ref, config, canary = _read_metadata(metadata, sha256, len(data))
    if expect is not None and ref != expect:
        raise VersionRejected(
            "wrong_version",
            f"the file says that it is {ref.key} of step {ref.step}, expected {expect.key} of step {expect.step}",
        )
    if config.get("base_model_name_or_path") != metadata["base_model"]:
        raise VersionRejected(
            "wrong_base",
            f"adapter_config names base {config.get('base_model_name_or_path')!r}, "
            f"the version {metadata['base_model']!r}",
        )
    if base_model is not None and base_model != metadata["base_model"]:
        raise VersionRejected(
            "wrong_base", f"{ref.key} belongs to base {metadata['base_model']!r}, this replica serves {base_model!r}"
        )
    check_adapter(config, file.tensors, file.body)
    return VerifiedVersion(
        ref=ref,
        base_model=metadata["base_model"],
        adapter_config=config,
        canary=canary,
        tensors=file.tensors,
        body=file.body,
    )


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo], body: memoryview) -> str:
    claims = {key: value for key, value in metadata.items() if key != "digest"}
    digest = hashlib.sha256(canonical_json({"metadata": claims, "tensors": index_as_json(tensors)}))
    digest.update(body)
    return digest.hexdigest()


def _read_metadata(metadata: Mapping[str, str], sha256: str, size: int) -> tuple[VersionRef, dict, Canary | None]:
    try:
        ref = VersionRef(
            run=metadata["run"],
            incarnation=metadata["incarnation"],
            number=int(metadata["version"]),
            step=int(metadata["step"]),
            sha256=sha256,
            size=size,
        )
        if not metadata["base_model"]:
            raise ValueError("base_model is empty")
        config = json.loads(metadata["adapter_config"])
        if not isinstance(config, dict):
            raise ValueError("adapter_config is not a JSON object")
        canary = Canary.model_validate_json(metadata["canary"]) if "canary" in metadata else None
    except (KeyError, ValueError, ValidationError) as error:
        raise VersionRejected("bad_metadata", f"the metadata cannot be read: {error!r}") from error
    return ref, config, canary


def _read_config(adapter_dir: Path) -> dict:
    path = adapter_dir / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise VersionRejected("bad_config", f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise VersionRejected("bad_config", f"{path} is not a JSON object")
    return config


def _check_base(named: object, base_model: str) -> None:
    if not base_model:
        raise VersionRejected("wrong_base", "no base model was named for this version")
    if not isinstance(named, str) or not named:
        raise VersionRejected("wrong_base", f"adapter_config names no base (base_model_name_or_path is {named!r})")
    if named != base_model and not Path(named).is_dir():
        raise VersionRejected("wrong_base", f"the adapter was trained on {named!r}, this run serves {base_model!r}")
