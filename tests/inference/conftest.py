from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from replicas import Bucket, Replica, replica_in_thread


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    (tmp_path / "bucket").mkdir()
    return Bucket(tmp_path / "bucket")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The folder that scripts the fake vLLM: a file named after a misbehaviour switches it on."""
    folder = tmp_path / "script"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path: Path, bucket: Bucket, script: Path) -> Callable[..., AbstractContextManager[Replica]]:
    """`with start(…spec fields…) as replica` runs the real agent over the fake vLLM."""
    return lambda **changes: replica_in_thread(tmp_path, bucket.root, script, **changes)


@pytest.fixture
def replica(start: Callable[..., AbstractContextManager[Replica]]) -> Iterator[Replica]:
    with start() as running:
        yield running


@pytest.fixture(scope="module")
def idle_replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """One replica, ready, for tests that change nothing."""
    folder = tmp_path_factory.mktemp("idle")
    for name in ("bucket", "script"):
        (folder / name).mkdir()
    with replica_in_thread(folder, folder / "bucket", folder / "script") as running:
        running.wait_for(lambda s: s["engine"] == "ready")
        yield running
