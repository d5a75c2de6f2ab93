"""The content-addressable store on disk."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bucket_grpo.emulator.cas import EMPTY_FILE, CasRefusal, Term
from bucket_grpo.emulator.hub_database import Database
from bucket_grpo.emulator.objects import ObjectStore
from tests.emulator.xet_bytes import pack_file, pack_shard

CONTENTS = [os.urandom(700), b"zeros" * 400, os.urandom(1), b"ab" * 999]
WHOLE = b"".join(CONTENTS)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "hub.sqlite")
    yield database
    database.close()


@pytest.fixture
def store(tmp_path: Path, database: Database) -> ObjectStore:
    return ObjectStore(tmp_path, database)


def put_file(store: ObjectStore, contents: list[bytes] = CONTENTS, scheme: int = 0) -> str:
    name, (xorb, data), shard = pack_file(contents, scheme)
    store.put_xorb(xorb, data)
    store.put_shard(shard)
    return name


@pytest.mark.parametrize("scheme", [0, 1, 2])
def test_a_file_comes_back_whole_and_in_any_range(store: ObjectStore, scheme: int) -> None:
    file = store.file(put_file(store, scheme=scheme))
    assert file is not None
    assert file.size == len(WHOLE)
    assert b"".join(store.read(file)) == WHOLE
    for _ in range(200):
        start, end = sorted(random.sample(range(len(WHOLE) + 1), 2))
        assert b"".join(store.read(file, start, end)) == WHOLE[start:end]
    assert b"".join(store.read(file, 10, 10**9)) == WHOLE[10:]


def test_the_same_bytes_twice_are_one_object(store: ObjectStore, tmp_path: Path) -> None:
    _, (xorb, data), shard = pack_file(CONTENTS)
    assert store.put_xorb(xorb, data) is True
    assert store.put_xorb(xorb, data) is False
    assert store.put_shard(shard) == 1
    assert store.put_shard(shard) == 0
    assert len(list((tmp_path / "xorbs").rglob("*/*"))) == 1


def test_a_shard_with_one_bad_file_registers_none(store: ObjectStore) -> None:
    name, (xorb, data), _ = pack_file(CONTENTS)
    other, _, _ = pack_file([b"never uploaded"])
    store.put_xorb(xorb, data)
    with pytest.raises(CasRefusal):
        store.put_shard(
            pack_shard([(name, [Term(xorb, 0, 4, len(WHOLE))], []), (other, [Term("3" * 64, 0, 1, 14)], [])])
        )
    assert store.file(name) is None


def test_a_refused_xorb_leaves_nothing_behind(store: ObjectStore, tmp_path: Path) -> None:
    _, (xorb, data), _ = pack_file(CONTENTS)
    with pytest.raises(CasRefusal):
        store.put_xorb(xorb, data[:-1])
    assert not store.has_xorb(xorb)
    assert not list((tmp_path / "xorbs").rglob("*/*"))


def test_a_file_of_no_bytes_needs_no_upload(store: ObjectStore) -> None:
    file = store.file(EMPTY_FILE)
    assert file is not None
    assert list(store.read(file)) == []


def test_another_store_on_the_same_folder_has_it_all(store: ObjectStore, database: Database, tmp_path: Path) -> None:
    name = put_file(store)
    again = ObjectStore(tmp_path, database)
    file = again.file(name)
    assert file is not None
    assert b"".join(again.read(file)) == WHOLE


def test_what_a_killed_server_left_half_done_is_cleared_at_the_start(
    store: ObjectStore, database: Database, tmp_path: Path
) -> None:
    name = put_file(store)
    _, (xorb, data), _ = pack_file([b"written but not noted"])
    folder = tmp_path / "xorbs" / xorb[:2]
    folder.mkdir(exist_ok=True)
    (folder / xorb).write_bytes(data)
    (folder / ".upload-half").write_bytes(data[:10])
    again = ObjectStore(tmp_path, database)
    assert len(list((tmp_path / "xorbs").rglob("*/*"))) == 1
    file = again.file(name)
    assert file is not None
    assert b"".join(again.read(file)) == WHOLE


def test_garbage_is_what_no_bucket_names_and_old_enough(store: ObjectStore, database: Database) -> None:
    kept, dropped, waiting = put_file(store), put_file(store, [b"dropped"]), put_file(store, [b"waiting"])
    with database.transaction() as connection:
        connection.execute("INSERT INTO buckets VALUES (1, 'me', 'b', 0, 0, 0, 0)")
        connection.execute("INSERT INTO files VALUES (1, 'a', ?, 1, NULL, 0, NULL)", (kept,))
        hidden = f'{{"type": "addFile", "path": "p", "xetHash": "{waiting}"}}'
        connection.execute("INSERT INTO pending (bucket, due_at, operation) VALUES (1, 0, ?)", (hidden,))
    assert store.collect_garbage(older_than_s=3600) == 0
    assert store.collect_garbage(older_than_s=0) == 1
    assert store.file(dropped) is None
    for name in (kept, waiting):
        file = store.file(name)
        assert file is not None
        assert b"".join(store.read(file))
