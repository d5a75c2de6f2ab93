"""The content-addressable store on disk: xorbs are files named by their hash, what they hold stands in SQLite.

Nothing is trusted on the way in (see `cas`): a xorb is stored only when it hashes to its name, a file only when every
xorb that it needs is there. Writes are atomic; the same bytes twice are one object.
"""

import json
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from bucket_grpo.emulator.cas import (
    EMPTY_FILE,
    Chunk,
    Term,
    cut_terms,
    read_shard,
    read_xorb,
    unpack_chunk,
    verify_file,
)
from bucket_grpo.emulator.hub_database import Database

CHUNK_RECORD = struct.Struct("<32sII")


class StoredFile(NamedTuple):
    """A file that the store can rebuild: its hash, its size in bytes, and its terms in order."""

    hash: str
    size: int
    terms: tuple[Term, ...]


class ObjectStore:
    """Xorbs and files under `root`. Safe to call from many threads."""

    def __init__(self, root: Path, database: Database) -> None:
        self._folder = root / "xorbs"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._database = database
        self._clear_unfinished()
        self._load_chunks = lru_cache(maxsize=512)(self._read_chunks)

    def put_xorb(self, name: str, data: bytes) -> bool:
        """Store a xorb; False if it was there. Raises `CasRefusal`, or `OSError` when the disk is full."""
        if self.has_xorb(name):
            return False
        chunks = read_xorb(data, name)
        self._write(self._path(name), data)
        record = b"".join(CHUNK_RECORD.pack(*chunk) for chunk in chunks)
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO xorbs VALUES (?, ?, ?, ?)", (name, len(data), record, time.time())
            )
        return True

    def has_xorb(self, name: str) -> bool:
        return self._database.row("SELECT 1 FROM xorbs WHERE hash = ?", name) is not None

    def put_shard(self, data: bytes) -> int:
        """Register the files of a shard; how many are new. Raises `CasRefusal` and then registers none of them."""
        entries = read_shard(data)
        for entry in entries:
            verify_file(entry, self.chunks)
        with self._database.transaction() as connection:
            return sum(
                connection.execute(
                    "INSERT OR IGNORE INTO cas_files VALUES (?, ?, ?, ?)",
                    (entry.hash, entry.size, json.dumps(entry.terms), time.time()),
                ).rowcount
                for entry in entries
            )

    def file(self, name: str) -> StoredFile | None:
        if name == EMPTY_FILE:
            return StoredFile(name, 0, ())
        row = self._database.row("SELECT size, terms FROM cas_files WHERE hash = ?", name)
        if row is None:
            return None
        return StoredFile(name, row["size"], tuple(Term(*term) for term in json.loads(row["terms"])))

    def chunks(self, xorb: str) -> list[Chunk] | None:
        """The chunks of a xorb in order, or None for one that is not there."""
        try:
            return self._load_chunks(xorb)
        except KeyError:
            return None

    def span(self, term: Term) -> tuple[int, int]:
        """Where a term's chunks stand in its xorb, headers included: bytes `[start, end)`."""
        chunks = self._load_chunks(term.xorb)
        end = chunks[term.last].offset if term.last < len(chunks) else self._end_of_chunks(term.xorb)
        return chunks[term.first].offset, end

    def xorb_size(self, name: str) -> int | None:
        row = self._database.row("SELECT size FROM xorbs WHERE hash = ?", name)
        return None if row is None else row["size"]

    def xorb_bytes(self, name: str, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of a stored xorb, fewer where it ends before."""
        with self._path(name).open("rb") as xorb:
            xorb.seek(start)
            return xorb.read(max(0, end - start))

    def read(self, file: StoredFile, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Bytes `[start, end)` of a file, rebuilt, one piece per chunk."""
        end = file.size if end is None else min(end, file.size)
        skip, terms = cut_terms(file.terms, start, end)
        left = max(0, end - start)
        for term in terms:
            first, last = self.span(term)
            packed = memoryview(self.xorb_bytes(term.xorb, first, last))
            bounds = [chunk.offset - first for chunk in self._load_chunks(term.xorb)[term.first : term.last]]
            for at, until in zip(bounds, [*bounds[1:], last - first], strict=True):
                content = unpack_chunk(packed[at:until])
                piece = content[skip : skip + left]
                skip = max(0, skip - len(content))
                left -= len(piece)
                if piece:
                    yield piece
                if not left:
                    return

    def collect_garbage(self, older_than_s: float) -> int:
        """Drop files that no bucket names and xorbs that no file needs; the number of xorbs removed.

        What is younger than `older_than_s` stays: a client uploads first and names the file in a bucket afterwards.
        """
        before = time.time() - older_than_s
        with self._database.transaction() as connection:
            connection.execute(
                "DELETE FROM cas_files WHERE stored_at <= ? AND hash NOT IN (SELECT xet_hash FROM files) "
                "AND hash NOT IN (SELECT json_extract(operation, '$.xetHash') FROM pending "
                "WHERE json_extract(operation, '$.xetHash') IS NOT NULL)",
                (before,),
            )
            needed = {
                term[0]
                for (terms,) in connection.execute("SELECT terms FROM cas_files").fetchall()
                for term in json.loads(terms)
            }
            old = connection.execute("SELECT hash FROM xorbs WHERE stored_at <= ?", (before,)).fetchall()
            dead = [name for (name,) in old if name not in needed]
            connection.executemany("DELETE FROM xorbs WHERE hash = ?", [(name,) for name in dead])
        self._load_chunks.cache_clear()
        for name in dead:
            self._path(name).unlink(missing_ok=True)
        return len(dead)

    def _clear_unfinished(self) -> None:
        """Remove what a killed server was still writing, or had written but not yet noted."""
        known = {name for (name,) in self._database.rows("SELECT hash FROM xorbs")}
        for path in self._folder.glob("*/*"):
            if path.name not in known:
                path.unlink()

    def _read_chunks(self, name: str) -> list[Chunk]:
        row = self._database.row("SELECT chunks FROM xorbs WHERE hash = ?", name)
        if row is None:
            raise KeyError(name)
        return [Chunk(*record) for record in CHUNK_RECORD.iter_unpack(row["chunks"])]

    def _end_of_chunks(self, name: str) -> int:
        last = self._load_chunks(name)[-1].offset
        header = self.xorb_bytes(name, last, last + 4)
        return last + 8 + int.from_bytes(header[1:4], "little")

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".upload-")
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
