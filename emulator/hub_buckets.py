"""Buckets and the files in them, as the Hub keeps them: mutable names for immutable content, without versions.

A path is a key, not a place in a tree: a prefix matches lexically, so `logs` also finds `logs.json`. A batch is not a
transaction: each operation takes effect or fails by itself.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.alias_generators import to_camel

from bucket_grpo.emulator.events import ChangeLog, Content
from bucket_grpo.emulator.hub_database import Database
from bucket_grpo.emulator.hub_errors import HubError, entry_not_found
from bucket_grpo.emulator.objects import ObjectStore

LAST_CHARACTER = "\U0010ffff"


class _Operation(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)
    path: str


class AddFile(_Operation):
    type: Literal["addFile"]
    xet_hash: str
    mtime: float | None = None
    content_type: str | None = None


class CopyFile(_Operation):
    type: Literal["copyFile"]
    xet_hash: str
    source_repo_type: str
    source_repo_id: str
    mtime: float | None = None
    content_type: str | None = None


class DeleteFile(_Operation):
    type: Literal["deleteFile"]


Operation = Annotated[AddFile | CopyFile | DeleteFile, Field(discriminator="type")]
OPERATION: TypeAdapter[AddFile | CopyFile | DeleteFile] = TypeAdapter(Operation)


class Refused(ValueError):
    """One operation of a batch that could not be done; the others go on."""


@dataclass(frozen=True)
class Bucket:
    """A bucket's row. Times are in seconds since 1970."""

    row: int
    namespace: str
    name: str
    private: bool
    created_at: float
    updated_at: float

    @property
    def id(self) -> str:
        return f"{self.namespace}/{self.name}"


class File(NamedTuple):
    """A file in a bucket. `mtime` and `uploaded_at` are in seconds since 1970."""

    path: str
    xet_hash: str
    size: int
    mtime: float | None
    uploaded_at: float
    content_type: str | None


class Folder(NamedTuple):
    """A folder as a listing shows it: the common start of some files' paths, uploaded when the newest of them was."""

    path: str
    uploaded_at: float


class Buckets:
    """All buckets of a Hub. `on_change` is called, from any thread, after files changed."""

    def __init__(
        self, database: Database, objects: ObjectStore, log: ChangeLog, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._database = database
        self._objects = objects
        self._log = log
        self._on_change = on_change
        self._applying_due = threading.Lock()

    def create(self, namespace: str, name: str, private: bool) -> Bucket:
        """A new, empty bucket. Raises `KeyError` where the name is taken."""
        now = time.time()
        try:
            with self._database.transaction() as connection:
                connection.execute(
                    "INSERT INTO buckets (namespace, name, private, created_at, updated_at) VALUES (?, ?, ?, ?, ?)",
                    (namespace, name, private, now, now),
                )
        except sqlite3.IntegrityError as error:
            raise KeyError(f"{namespace}/{name} already exists") from error
        return self.get(namespace, name)

    def get(self, namespace: str, name: str) -> Bucket:
        """The bucket. Raises `KeyError`: the caller knows how to say it to whom."""
        row = self._database.row("SELECT * FROM buckets WHERE namespace = ? AND name = ?", namespace, name)
        if row is None:
            raise KeyError(f"{namespace}/{name}")
        return _bucket(row)

    def in_namespace(self, namespace: str) -> list[Bucket]:
        return [_bucket(row) for row in self._database.rows("SELECT * FROM buckets WHERE namespace = ?", namespace)]

    def usage(self, bucket: Bucket) -> tuple[int, int]:
        """The bucket's size in bytes and its number of files."""
        row = self._database.row("SELECT COALESCE(SUM(size), 0), COUNT(*) FROM files WHERE bucket = ?", bucket.row)
        assert row is not None
        return row[0], row[1]

    def delete(self, bucket: Bucket) -> None:
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM buckets WHERE id = ?", (bucket.row,))
        self._on_change()

    def set_private(self, bucket: Bucket, private: bool) -> None:
        with self._database.transaction() as connection:
            connection.execute("UPDATE buckets SET private = ? WHERE id = ?", (private, bucket.row))

    def move(self, bucket: Bucket, namespace: str, name: str) -> None:
        """Give a bucket another name. Raises `KeyError` where the name is taken."""
        try:
            with self._database.transaction() as connection:
                connection.execute(
                    "UPDATE buckets SET namespace = ?, name = ? WHERE id = ?", (namespace, name, bucket.row)
                )
        except sqlite3.IntegrityError as error:
            raise KeyError(f"{namespace}/{name} already exists") from error

    def file(self, bucket: Bucket, path: str) -> File:
        row = self._database.row(f"SELECT {FILE_COLUMNS} FROM files WHERE bucket = ? AND path = ?", bucket.row, path)
        if row is None:
            raise entry_not_found(path)
        return File(*row)

    def holds(self, bucket: Bucket, xet_hash: str) -> bool:
        """Whether some file of the bucket has this content."""
        row = self._database.row("SELECT 1 FROM files WHERE bucket = ? AND xet_hash = ?", bucket.row, xet_hash)
        return row is not None

    def files(self, bucket: Bucket, prefix: str = "", after: str = "", limit: int = -1) -> list[File]:
        """Files whose path starts with `prefix` and sorts behind `after`, in the order of their bytes."""
        rows = self._database.rows(
            f"SELECT {FILE_COLUMNS} FROM files WHERE bucket = ? AND path >= ? AND path < ? AND path > ? "
            "ORDER BY path LIMIT ?",
            *(bucket.row, prefix, prefix + LAST_CHARACTER, after, limit),
        )
        return [File(*row) for row in rows]

    def children(self, bucket: Bucket, prefix: str) -> list[File | Folder]:
        """What a listing that is not recursive shows: below the folder `prefix` one level, and its lexical siblings."""
        folders: dict[str, float] = {}
        entries: list[File] = []
        for file in self.files(bucket, prefix):
            below = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
            start = len(below) if file.path.startswith(below) else len(prefix)
            name, slash, _ = file.path[start:].partition("/")
            if not slash:
                entries.append(file)
                continue
            folder = file.path[:start] + name
            folders[folder] = max(folders.get(folder, 0.0), file.uploaded_at)
        found: list[File | Folder] = [*entries, *(Folder(path, at) for path, at in folders.items())]
        return sorted(found, key=lambda entry: entry.path)

    def apply(self, bucket: Bucket, operation: AddFile | CopyFile | DeleteFile) -> None:
        """Do one operation, now. Raises `Refused`."""
        check_path(operation.path)
        with self._database.transaction() as connection:
            if isinstance(operation, DeleteFile):
                self._delete(connection, bucket, operation.path)
            else:
                self._add(connection, bucket, operation)
            connection.execute("UPDATE buckets SET updated_at = ? WHERE id = ?", (time.time(), bucket.row))
        self._on_change()

    def check(self, bucket: Bucket, operation: AddFile | CopyFile | DeleteFile) -> None:
        """Raise `Refused` where `apply` would, without changing anything."""
        check_path(operation.path)
        if not isinstance(operation, DeleteFile):
            self._content_size(operation)

    def apply_later(self, bucket: Bucket, operation: AddFile | CopyFile | DeleteFile, due_at: float) -> None:
        """Accept an operation that nobody sees before `due_at` (seconds since 1970), also across a restart."""
        self.check(bucket, operation)
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO pending (bucket, due_at, operation) VALUES (?, ?, ?)",
                (bucket.row, due_at, operation.model_dump_json(by_alias=True)),
            )
        self._on_change()

    def apply_due(self) -> float | None:
        """Do what `apply_later` put off and is due. Seconds until the next one is, None if there is none."""
        with self._applying_due:
            for row in self._database.rows("SELECT * FROM pending WHERE due_at <= ? ORDER BY due_at, id", time.time()):
                bucket = self._database.row("SELECT * FROM buckets WHERE id = ?", row["bucket"])
                if bucket is not None:
                    self.apply(_bucket(bucket), OPERATION.validate_json(row["operation"]))
                with self._database.transaction() as connection:
                    connection.execute("DELETE FROM pending WHERE id = ?", (row["id"],))
        upcoming = self._database.row("SELECT MIN(due_at) FROM pending")
        return None if upcoming is None or upcoming[0] is None else max(0.0, upcoming[0] - time.time())

    def _add(self, connection: sqlite3.Connection, bucket: Bucket, operation: AddFile | CopyFile) -> None:
        size = self._content_size(operation)
        now = time.time()
        mtime = None if operation.mtime is None else operation.mtime / 1000
        known = connection.execute(
            "SELECT 1 FROM files WHERE bucket = ? AND path = ?", (bucket.row, operation.path)
        ).fetchone()
        connection.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            (bucket.row, operation.path, operation.xet_hash, size, mtime, now, operation.content_type),
        )
        content = Content(operation.xet_hash, size, mtime)
        self._log.append(connection, bucket.row, "update" if known else "add", operation.path, content)

    def _delete(self, connection: sqlite3.Connection, bucket: Bucket, path: str) -> None:
        gone = connection.execute("DELETE FROM files WHERE bucket = ? AND path = ?", (bucket.row, path)).rowcount
        if gone:
            self._log.append(connection, bucket.row, "delete", path, None)

    def _content_size(self, operation: AddFile | CopyFile) -> int:
        stored = self._objects.file(operation.xet_hash)
        if stored is None:
            raise Refused(f"no content with the hash {operation.xet_hash} was uploaded")
        return stored.size


FILE_COLUMNS = ", ".join(File._fields)


def parse_batch(body: bytes) -> Iterator[AddFile | CopyFile | DeleteFile]:
    """The operations of an NDJSON body. Raises 400 for a line that is not one."""
    for number, line in enumerate(body.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield OPERATION.validate_python(json.loads(line))
        except ValueError as error:
            raise HubError(400, f"line {number} of the batch is not an operation: {error}") from error


def check_path(path: str) -> None:
    """Raise `Refused` for a path that is no key of a bucket: empty, absolute, climbing, or not printable."""
    parts = path.split("/")
    if len(path) > 1024 or min(path, default="") < " " or any(part in ("", ".", "..") for part in parts):
        raise Refused(f"{path!r} is not a valid path")


def _bucket(row: sqlite3.Row) -> Bucket:
    return Bucket(row["id"], row["namespace"], row["name"], bool(row["private"]), row["created_at"], row["updated_at"])
