"""One SQLite file under the Hub's root: every change is a transaction, so a killed server restarts where it was."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE IF NOT EXISTS buckets (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, name TEXT NOT NULL, private INTEGER NOT NULL,
    created_at REAL NOT NULL, updated_at REAL NOT NULL, forgotten INTEGER NOT NULL DEFAULT 0,
    UNIQUE (namespace, name));
CREATE TABLE IF NOT EXISTS files (
    bucket INTEGER NOT NULL REFERENCES buckets (id) ON DELETE CASCADE, path TEXT NOT NULL, xet_hash TEXT NOT NULL,
    size INTEGER NOT NULL, mtime REAL, uploaded_at REAL NOT NULL, content_type TEXT,
    PRIMARY KEY (bucket, path)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, bucket INTEGER NOT NULL REFERENCES buckets (id) ON DELETE CASCADE,
    op TEXT NOT NULL, path TEXT NOT NULL, xet_hash TEXT, size INTEGER, mtime REAL, at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS changes_by_bucket ON changes (bucket, seq);
CREATE TABLE IF NOT EXISTS pending (
    id INTEGER PRIMARY KEY AUTOINCREMENT, bucket INTEGER NOT NULL REFERENCES buckets (id) ON DELETE CASCADE,
    due_at REAL NOT NULL, operation TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS xorbs (
    hash TEXT PRIMARY KEY, size INTEGER NOT NULL, chunks BLOB NOT NULL, stored_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS cas_files (
    hash TEXT PRIMARY KEY, size INTEGER NOT NULL, terms TEXT NOT NULL, stored_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS settings (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Database:
    """A SQLite file for one process and many threads. Calls are short; they take turns."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
        self._connection.row_factory = sqlite3.Row
        # WAL with NORMAL survives the death of the process at any point; only a power cut can lose the last commits.
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("PRAGMA foreign_keys=ON")
        self._connection.executescript(SCHEMA)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything done on the connection inside is committed together, or not at all when the block raises."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Any) -> sqlite3.Row | None:
        with self._lock:
            found: sqlite3.Row | None = self._connection.execute(sql, values).fetchone()
            return found

    def setting(self, key: str, default: str) -> str:
        """A value kept for good: `default` the first time it is asked for, the same one ever after."""
        with self.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", (key, default))
            value: str = connection.execute("SELECT value FROM settings WHERE key = ?", (key,)).fetchone()[0]
            return value

    def set_setting(self, key: str, value: str) -> None:
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (key, value))

    def close(self) -> None:
        with self._lock:
            self._connection.close()
