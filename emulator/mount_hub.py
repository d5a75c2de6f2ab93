"""A bucket on a Hub as the backend of a mount: the REST calls that hf-mount makes, contents through xet by their hash.

Retries are hf-mount's: a request that met a passing trouble (408, 429, 5xx, no connection) is sent three times in all.
"""

import errno
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import hf_xet
import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from bucket_grpo.emulator.backends import Add, FileReader, Listing, Operation, Stat

ATTEMPTS = 3
REQUEST_TIMEOUT_S = 60.0
CACHED_BYTES = 2 << 30


class _PassingTrouble(OSError):
    """A failure that may be gone at the next attempt."""


class HubBackend:
    """`source` is `namespace/name`, perhaps with a folder behind it whose content is then the whole mount.

    `Stat.etag` is the xet hash. Raises `ValueError` for a malformed source, `OSError` for everything that a Hub says
    or fails to say: EACCES for 401 and 403, EIO else.
    """

    def __init__(self, source: str, *, endpoint: str, token: str | None) -> None:
        namespace, _, rest = source.strip("/").partition("/")
        name, _, folder = rest.partition("/")
        if not namespace or not name:
            raise ValueError(f"{source!r} is not a bucket id: expected namespace/name, or namespace/name/folder")
        self._bucket = f"{namespace}/{name}"
        self._prefix = f"{folder}/" if folder else ""
        self._api = f"/api/buckets/{self._bucket}"
        self._endpoint = endpoint.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=self._endpoint, headers=self._headers, timeout=REQUEST_TIMEOUT_S)
        self._xet = hf_xet.XetSession()
        self._contents = _Contents(self._download)
        self._request("GET", self._api)  # a missing bucket or a wrong token shows now, not at the first read

    def stat(self, key: str) -> Stat | None:
        path = quote(self._prefix + key, safe="/")
        answer = self._request("HEAD", f"/buckets/{self._bucket}/resolve/{path}", missing_is_none=True)
        if answer is None:
            return None
        modified = parsedate_to_datetime(answer.headers["Last-Modified"]).timestamp()
        return Stat(key, int(answer.headers["X-Linked-Size"]), modified, answer.headers["X-Xet-Hash"])

    def list_folder(self, folder: str) -> Listing:
        prefix = (self._prefix + folder).rstrip("/")
        url = f"{self._api}/tree" + (f"/{quote(prefix, safe='')}" if prefix else "")
        params: dict[str, Any] | None = {"recursive": "false", "limit": 5000}
        files, folders = [], []
        while url:
            answer = self._request("GET", url, params=params, missing_is_none=True)
            if answer is None:
                break
            for entry in answer.json():
                path: str = entry["path"]
                # The Hub takes the prefix as text: `run1` also finds `run10/…`.
                if prefix and not path.startswith(f"{prefix}/"):
                    continue
                key = path[len(self._prefix) :]
                if entry["type"] == "directory":
                    folders.append(key)
                else:
                    modified = _seconds(entry.get("mtime") or entry["uploadedAt"])
                    files.append(Stat(key, entry["size"], modified, entry["xetHash"]))
            url, params = answer.links.get("next", {}).get("url", ""), None
        return Listing(tuple(files), tuple(folders))

    def open(self, stat: Stat) -> "HubReader":
        return HubReader(stat, self._contents)

    def upload(self, staged: Path, key: str) -> Stat:
        try:
            with self._xet.new_upload_commit(**self._xet_tokens("write")) as commit:
                upload = commit.start_upload_file(str(staged), sha256=hf_xet.SKIP_SHA256)
        except (RuntimeError, OSError) as error:
            raise OSError(errno.EIO, f"upload to {self._bucket} failed: {error}", key) from error
        content = upload.result().xet_info
        return Stat(key, content.file_size, time.time(), content.hash)

    def commit(self, operations: Sequence[Operation]) -> list[Operation]:
        now_ms = int(time.time() * 1000)
        lines = [
            {"type": "addFile", "path": self._prefix + op.key, "xetHash": op.etag, "mtime": now_ms}
            if isinstance(op, Add)
            else {"type": "deleteFile", "path": self._prefix + op.key}
            for op in operations
        ]
        answer = self._request(
            "POST",
            f"{self._api}/batch",
            content="".join(json.dumps(line) + "\n" for line in lines),
            headers={"Content-Type": "application/x-ndjson"},
        )
        assert answer is not None
        failed = {failure["path"] for failure in answer.json().get("failed", [])}
        return [op for op in operations if self._prefix + op.key in failed]

    def _request(self, method: str, url: str, *, missing_is_none: bool = False, **kwargs: Any) -> httpx.Response | None:
        for attempt in Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=0.2, max=5),
            retry=retry_if_exception_type(_PassingTrouble),
            reraise=True,
        ):
            with attempt:
                try:
                    answer = self._http.request(method, url, **kwargs)
                except httpx.TransportError as error:
                    raise _PassingTrouble(errno.EIO, f"{method} {url}: {error!r}") from error
                if answer.is_success or answer.is_redirect:
                    return answer
                if answer.status_code == 404 and missing_is_none:
                    return None
                _refuse(answer)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _xet_tokens(self, role: str) -> dict[str, Any]:
        return {
            "token_refresh_url": f"{self._endpoint}{self._api}/xet-{role}-token",
            "token_refresh_headers": self._headers,
        }

    def _download(self, stat: Stat, target: Path) -> None:
        try:
            with self._xet.new_file_download_group(**self._xet_tokens("read")) as group:
                group.start_download_file(hf_xet.XetFileInfo(stat.etag, stat.size), str(target))
        except (RuntimeError, OSError) as error:
            raise OSError(errno.EIO, f"download of {stat.etag} failed: {error}", stat.key) from error


def _refuse(answer: httpx.Response) -> None:
    text = f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text[:200]}"
    if answer.status_code in (408, 429) or answer.status_code >= 500:
        raise _PassingTrouble(errno.EIO, text)
    raise OSError(errno.EACCES if answer.status_code in (401, 403) else errno.EIO, text)


def _seconds(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()


@dataclass
class _Contents:
    """Whole contents on the local disk by their hash, the oldest dropped beyond `CACHED_BYTES`."""

    download: Callable[[Stat, Path], None]
    folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="bucket-mount-cache-")
    )
    _sizes: dict[str, int] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, stat: Stat) -> FileReader:
        path = Path(self.folder.name, stat.etag)
        with self._lock:
            one_at_a_time = self._locks.setdefault(stat.etag, threading.Lock())
        with one_at_a_time:
            if not path.exists():
                part = path.with_suffix(".part")
                self.download(stat, part)
                part.rename(path)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with self._lock:
            self._sizes.pop(stat.etag, None)
            self._sizes[stat.etag] = stat.size
            while sum(self._sizes.values()) > CACHED_BYTES and len(self._sizes) > 1:
                oldest = next(iter(self._sizes))
                del self._sizes[oldest]
                Path(self.folder.name, oldest).unlink(missing_ok=True)
        return FileReader(descriptor)


class HubReader:
    """Fetches its content at the first read: opening costs nothing, as with hf-mount."""

    def __init__(self, stat: Stat, contents: _Contents) -> None:
        self._stat, self._contents = stat, contents
        self._reader: FileReader | None = None
        self._lock = threading.Lock()

    def read(self, offset: int, size: int) -> bytes:
        if self._stat.size == 0:
            return b""
        with self._lock:
            if self._reader is None:
                self._reader = self._contents.open(self._stat)
        return self._reader.read(offset, size)

    def close(self) -> None:
        with self._lock:
            if self._reader is not None:
                self._reader.close()
