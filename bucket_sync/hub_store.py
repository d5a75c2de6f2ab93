"""A bucket through the Hub's API: no mount, no debounce. An upload that returned is committed.

Works with huggingface_hub 1.33 and 2.x. That client sets no timeouts, and xet's transfers take none, so each call
runs under a deadline of its own.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from bucket_grpo.bucket_sync.deadline import Result, with_deadline
from bucket_grpo.bucket_sync.store_contract import (
    Conflict,
    NotConfirmed,
    NotFound,
    ObjectInfo,
    StoreError,
    check_folder,
    check_key,
)
from bucket_grpo.bucket_sync.version_file import MAX_VERSION_BYTES

if TYPE_CHECKING:
    from huggingface_hub import BucketFile

URL_PREFIX = "hf://buckets/"
POLL_S = 0.15
PERMANENT_STATUS = frozenset({400, 401, 402, 403, 404, 409, 413})


class HubStore:
    """The bucket `namespace/name`.

    Args:
        bucket_id: `namespace/name`, also with `hf://buckets/` in front; a path behind it becomes a prefix of all keys.
        token: as in `HfApi`; by default the one that the machine is logged in with.
        request_timeout_s: for each read or write of one HTTP request.
        transfer_timeout_s: for one upload or download as a whole, beside a second per 10 MB.
        attempts: of an operation that failed for a reason that may pass.
    """

    def __init__(
        self,
        bucket_id: str,
        *,
        token: str | None = None,
        endpoint: str | None = None,
        request_timeout_s: float = 20.0,
        transfer_timeout_s: float = 60.0,
        attempts: int = 3,
    ) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # one bar per version and replica would bury every log
        namespace, name, *folder = bucket_id.removeprefix(URL_PREFIX).strip("/").split("/")
        self.bucket_id = f"{namespace}/{name}"
        self._prefix = "".join(f"{part}/" for part in folder)
        self.api: HfApi = HfApi(endpoint=endpoint, token=token)
        self._request_timeout_s = request_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._attempts = attempts

    def __repr__(self) -> str:
        return f"HubStore({self.bucket_id}{'/' + self._prefix if self._prefix else ''})"

    def read(self, key: str, *, max_bytes: int = MAX_VERSION_BYTES) -> bytes:
        info = self._info(key)
        if info is None:
            raise NotFound(f"{self}: cannot read {key}: it is not there")
        if info.size > max_bytes:
            raise StoreError(f"{self}: {key} has {info.size} bytes, more than {max_bytes}")

        def download() -> bytes:
            with tempfile.TemporaryDirectory(prefix="bucket-grpo-") as folder:
                target = Path(folder) / "object"
                self.api.download_bucket_files(self.bucket_id, [(info, target)], raise_on_missing_files=True)
                return target.read_bytes()

        data = self._call("read", key, download, size=info.size)
        if len(data) != info.size:
            raise StoreError(f"{self}: {key} came with {len(data)} of {info.size} bytes")
        return data

    def write_once(self, key: str, data: bytes) -> None:
        size = self.committed_size(key)
        if size is None:
            self._add(key, data)
        elif size != len(data) or self.read(key) != data:
            raise Conflict(f"{self}: {key} holds other bytes already; a version's name is used once")

    def confirm(self, key: str, size: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while (seen := self.committed_size(key)) != size:
            if time.monotonic() >= deadline:
                raise NotConfirmed(
                    f"{self}: {key} ({size} bytes) not there after {timeout_s:.1f} s (seen: {seen} bytes)"
                )
            time.sleep(POLL_S)

    def committed_size(self, key: str) -> int | None:
        info = self._info(key)
        return None if info is None else info.size

    def key_of(self, path: str) -> str:
        """The key of a path of the bucket, which may lie above this store's prefix."""
        return path.removeprefix(self._prefix)

    def write_pointer(self, key: str, data: bytes) -> None:
        self._add(key, data)

    def list(self, folder: str) -> Sequence[ObjectInfo]:
        prefix = self._prefix + check_folder(folder)

        def tree() -> list[ObjectInfo]:
            items = self.api.list_bucket_tree(self.bucket_id, prefix=prefix or None, recursive=True)
            return [
                ObjectInfo(item.path.removeprefix(self._prefix), item.size, item.uploaded_at or item.mtime)
                for item in items
                if item.type == "file" and item.path.startswith(prefix)
            ]

        try:
            return sorted(self._call("list", folder, tree))
        except NotFound:
            return []

    def delete(self, keys: Sequence[str]) -> None:
        paths = [self._prefix + check_key(key) for key in keys]
        if not paths:
            return
        what = f"{len(paths)} objects, the first {paths[0]}"
        try:
            self._call("delete", what, lambda: self.api.batch_bucket_files(self.bucket_id, delete=paths))
        except StoreError:
            # A key that was gone before may be listed as failed: what counts is what is there now.
            left = self._call("look up", what, lambda: [*self.api.get_bucket_paths_info(self.bucket_id, paths)])
            if left:
                raise

    def _info(self, key: str) -> "BucketFile | None":
        path = self._prefix + check_key(key)
        found = self._call("look up", key, lambda: [*self.api.get_bucket_paths_info(self.bucket_id, [path])])
        return next((info for info in found if info.path == path), None)

    def _add(self, key: str, data: bytes) -> None:
        path = self._prefix + check_key(key)
        # A batch that failed in part raises BucketBatchError, also on a 200.
        self._call(
            "write", key, lambda: self.api.batch_bucket_files(self.bucket_id, add=[(data, path)]), size=len(data)
        )

    def _call(self, verb: str, key: str, operation: Callable[[], Result], *, size: int | None = None) -> Result:
        """Run `operation` with a deadline and bounded retries; every failure becomes a `StoreError`."""
        from huggingface_hub import get_session
        from huggingface_hub.utils import EntryNotFoundError

        limit_s = self._request_timeout_s * 3 if size is None else self._transfer_timeout_s + size / 10e6

        def attempt() -> Result:
            get_session().timeout = self._request_timeout_s
            return with_deadline(operation, limit_s)

        retrying = Retrying(
            stop=stop_after_attempt(self._attempts),
            wait=wait_exponential(multiplier=0.2, max=3.0),
            retry=retry_if_exception(_may_pass),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except EntryNotFoundError as error:
            raise NotFound(f"{self}: cannot {verb} {key}: it is not there") from error
        except Exception as error:
            raise StoreError(f"{self}: cannot {verb} {key}: {type(error).__name__}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(line for line in lines if line and not line.startswith("For more information check"))


def _may_pass(error: BaseException) -> bool:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return isinstance(error, Exception) and status not in PERMANENT_STATUS
