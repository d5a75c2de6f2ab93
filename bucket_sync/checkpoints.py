"""Checkpoints in the bucket: files under content names, then a list of their digests, then a pointer to the list.

A crash at any point leaves the pointer on an earlier checkpoint that is complete. Resuming believes neither pointer nor
list: it takes the newest checkpoint whose every file verifies.

`<run>/checkpoints/<incarnation>/step-000050/<sha256>`, `<run>/checkpoints/<incarnation>/step-000050.json`,
`<run>/checkpoints/latest.json`.
"""

import hashlib
import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bucket_grpo.bucket_sync.current import check_fence
from bucket_grpo.bucket_sync.handover import hand_over
from bucket_grpo.bucket_sync.safetensors_file import canonical_json
from bucket_grpo.bucket_sync.store_contract import NotFound, Store, StoreError
from bucket_grpo.bucket_sync.vocabulary import check_incarnation, check_run_name

log = logging.getLogger(__name__)

FORMAT = "bucket-grpo-checkpoint/1"
MANIFEST_KEY = re.compile(r"(?P<run>[^/]+)/checkpoints/(?P<incarnation>[^/]+)/step-(?P<step>\d{6,})\.json\Z")
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
MAX_FILE_BYTES = 64 * 1024**3


class CheckpointRejected(Exception):
    """A checkpoint is incomplete, damaged, or names a path outside its folder."""


class CheckpointFile(BaseModel):
    """`path` is relative to the checkpoint's folder, with `/`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size: int = Field(ge=0, le=MAX_FILE_BYTES)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """What a checkpoint consists of. `digest` is over all the rest, so a damaged list is noticed."""

    model_config = ConfigDict(extra="forbid")

    format: str = FORMAT
    run: str
    incarnation: str
    step: int = Field(ge=0)
    files: list[CheckpointFile]
    digest: str = ""

    @property
    def key(self) -> str:
        return f"{self.folder[:-1]}.json"

    @property
    def folder(self) -> str:
        return f"{checkpoints_folder(self.run)}{check_incarnation(self.incarnation)}/step-{self.step:06d}/"

    def expected_digest(self) -> str:
        return hashlib.sha256(canonical_json(self.model_dump(exclude={"digest"}))).hexdigest()


@dataclass(frozen=True)
class RestoredCheckpoint:
    """`passed_over`: newer checkpoints that did not verify, as manifest key → why."""

    step: int
    incarnation: str
    folder: Path
    passed_over: dict[str, str]


def checkpoints_folder(run: str) -> str:
    return f"{check_run_name(run)}/checkpoints/"


def latest_key(run: str) -> str:
    return f"{checkpoints_folder(run)}latest.json"


def save_checkpoint(
    store: Store, folder: Path, *, run: str, incarnation: str, step: int, attempts: int = 3, confirm_s: float = 60.0
) -> Manifest:
    """Upload every file below `folder`; the checkpoint counts only once its pointer is written, last.

    Raises:
        Superseded: a newer incarnation owns the run; its pointer is not touched.
        StoreError: it did not get there; an earlier checkpoint stays the latest.
        ValueError: the folder is empty, or holds something that is not a plain file.
    """
    sources = _plain_files(folder)
    files = [CheckpointFile(path=path, size=size, sha256=sha256) for path, (_, size, sha256) in sources.items()]
    manifest = Manifest(run=run, incarnation=incarnation, step=step, files=files)
    manifest.digest = manifest.expected_digest()
    records: dict[str, Callable[[], bytes]] = {
        manifest.folder + sha256: partial(_read_unchanged, source, sha256) for source, _, sha256 in sources.values()
    }
    hand_over(store, records, attempts=attempts, confirm_s=confirm_s)
    text = manifest.model_dump_json().encode()
    hand_over(store, {manifest.key: lambda: text}, attempts=attempts, confirm_s=confirm_s)
    check_fence(store, run, incarnation)
    store.write_pointer(latest_key(run), canonical_json({"manifest": manifest.key}))
    return manifest


def restore_checkpoint(store: Store, run: str, target: Path) -> RestoredCheckpoint | None:
    """Bring the newest checkpoint that verifies to the new folder `target`; None if the run never wrote one.

    Raises:
        CheckpointRejected: there are checkpoints, and none verifies; the message says why, for each.
        StoreError: the store could not be listed.
        FileExistsError: `target` is there already.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already: restore into a new folder")
    keys = list_checkpoints(store, run)
    passed_over: dict[str, str] = {}
    for key in keys:
        try:
            manifest = read_manifest(store, key)
            _download(store, manifest, target)
        except (CheckpointRejected, StoreError) as error:
            log.warning("checkpoint %s is passed over: %s", key, error)
            passed_over[key] = str(error)
            continue
        return RestoredCheckpoint(manifest.step, manifest.incarnation, target, passed_over)
    if not keys:
        return None
    reasons = "; ".join(f"{key}: {reason}" for key, reason in passed_over.items())
    raise CheckpointRejected(f"none of the {len(keys)} checkpoints of {run} verifies: {reasons}")


def list_checkpoints(store: Store, run: str) -> list[str]:
    """Keys of the run's digest lists, newest first: a later incarnation continued an earlier one.

    The pointer is read too: on a mount, a listing may be too old to show what it names.
    """
    found = {info.key for info in store.list(checkpoints_folder(run))}
    try:
        pointed = Pointer.model_validate_json(store.read(latest_key(run), max_bytes=64 * 1024)).manifest
        found.add(pointed)
    except (NotFound, ValidationError) as error:
        log.info("no usable pointer to the latest checkpoint of %s: %s", run, error)
    named = [(match["incarnation"], int(match["step"]), key) for key in found if (match := MANIFEST_KEY.match(key))]
    return [key for _, _, key in sorted(named, reverse=True) if key.startswith(checkpoints_folder(run))]


def read_manifest(store: Store, key: str) -> Manifest:
    """A digest list that is whole, of this run, and names only paths inside its folder."""
    try:
        manifest = Manifest.model_validate_json(store.read(key, max_bytes=MAX_MANIFEST_BYTES))
    except ValidationError as error:
        raise CheckpointRejected(f"{key} is not a digest list: {error.errors()[0]['msg']}") from error
    if manifest.format != FORMAT or manifest.digest != manifest.expected_digest():
        raise CheckpointRejected(f"{key} is damaged: its digest is not that of its content")
    try:
        named = manifest.key
    except ValueError as error:
        raise CheckpointRejected(f"{key}: {error}") from error
    if named != key:
        raise CheckpointRejected(f"{key} says that it is {named}")
    for file in manifest.files:
        _check_path(file.path)
    return manifest


def prune_checkpoints(store: Store, run: str, incarnation: str, keep: int) -> list[str]:
    """Delete all but the newest `keep` checkpoints, each by its exact keys, the digest list first; returns the keys."""
    if keep < 1:
        raise ValueError(f"keep {keep} must be at least 1")
    check_fence(store, run, incarnation)
    deleted: list[str] = []
    for key in list_checkpoints(store, run)[keep:]:
        store.delete([key])
        files = [info.key for info in store.list(key.removesuffix(".json") + "/")]
        store.delete(files)
        deleted += [key, *files]
    return deleted


class Pointer(BaseModel):
    model_config = ConfigDict(extra="ignore")

    manifest: str


def _plain_files(folder: Path) -> dict[str, tuple[Path, int, str]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is not a plain file: a checkpoint holds plain files only")
        if path.is_file():
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = (path, path.stat().st_size, sha256)
    if not found:
        raise ValueError(f"{folder} holds no files: there is no checkpoint to save")
    return found


def _read_unchanged(source: Path, sha256: str) -> bytes:
    data = source.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{source} changed while it was being saved: save a folder that nobody writes to")
    return data


def _download(store: Store, manifest: Manifest, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for file in manifest.files:
            data = store.read(manifest.folder + file.sha256, max_bytes=file.size)
            if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
                raise CheckpointRejected(f"{manifest.key}: {file.path} is damaged ({len(data)} of {file.size} bytes)")
            path = staging / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        staging.rename(target)
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointRejected(f"{manifest.key} names a path that is both a file and a folder: {error}") from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _check_path(path: str) -> None:
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or pure.as_posix() != path or set(path) & set("\\\0"):
        raise CheckpointRejected(f"{path!r} is not a path inside a checkpoint's folder")
