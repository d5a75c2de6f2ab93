"""The released, unmodified clients and their `hf` command work with only HF_ENDPOINT and a token set."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.emulator.hub_clients import ReleasedClient, client_of
from tests.emulator.hubs import RunningHub, running_hub

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub"), users=("me", "other")) as hub:
        yield hub


@pytest.fixture(params=["1", "2"], ids=["hub-1.33", "hub-2.4"])
def client(request: pytest.FixtureRequest, hub: RunningHub, tmp_path: Path) -> ReleasedClient:
    return client_of(request.param, hub, tmp_path / "home")


@pytest.fixture(autouse=True)
def no_fault_outlives_its_test(hub: RunningHub) -> Iterator[None]:
    yield
    hub.clear_faults()


@pytest.fixture
def bucket(hub: RunningHub, request: pytest.FixtureRequest) -> str:
    """A private bucket of this test's own."""
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    return hub.create_bucket(f"me/{name}")


def make_files(folder: Path) -> dict[str, bytes]:
    """Contents of every kind that the client packs in another way: plain, compressed, grouped by four, empty, large."""
    rng = np.random.default_rng(0)
    contents = {
        "random.bin": rng.bytes(5_000_000),
        "text.txt": b"hello bucket\n" * 20_000,
        "sub/weights.f32": rng.standard_normal(300_000).astype(np.float32).tobytes(),
        "sub/deep/small": b"x",
        "empty": b"",
        "odd name #1 é.txt": b"odd",
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return contents


def impatient(client: ReleasedClient) -> ReleasedClient:
    """The client with few retries: with its own five, up to a minute apart, a CAS that fails shows after minutes."""
    retries = {"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1", "HF_XET_CLIENT_RETRY_BASE_DELAY": "100ms"}
    return ReleasedClient(client.python, client.environment | retries)


def read_back(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_goes_up_comes_down(client: ReleasedClient, bucket: str, tmp_path: Path) -> None:
    contents = make_files(tmp_path / "up")
    client.run(
        """
bucket, up, down = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
names = [str(path.relative_to(up)) for path in up.rglob("*") if path.is_file()]
api.batch_bucket_files(bucket, add=[(up / name, name) for name in names])
assert {info.path: info.size for info in api.get_bucket_paths_info(bucket, names)} == {
    name: (up / name).stat().st_size for name in names
}
assert api.bucket_info(bucket).total_files == len(names)
assert api.get_bucket_file_metadata(bucket, "text.txt").size == (up / "text.txt").stat().st_size
api.download_bucket_files(bucket, [(name, down / name) for name in names])
""",
        bucket,
        str(tmp_path / "up"),
        str(tmp_path / "down"),
    )
    assert read_back(tmp_path / "down") == contents


def test_the_hf_command_syncs_copies_lists_and_deletes(
    hub: RunningHub, client: ReleasedClient, bucket: str, tmp_path: Path
) -> None:
    contents = make_files(tmp_path / "up")
    remote = f"hf://buckets/{bucket}"
    client.hf("buckets", "sync", str(tmp_path / "up"), f"{remote}/data")
    assert hub.paths(bucket) == sorted(f"data/{name}" for name in contents)

    listed = client.hf("buckets", "ls", bucket, "-R", "--quiet").stdout
    assert "data/sub/deep/small" in listed
    assert "data/" in client.hf("buckets", "ls", bucket).stdout

    client.hf("buckets", "cp", f"{remote}/data/text.txt", str(tmp_path / "one.txt"))
    assert (tmp_path / "one.txt").read_bytes() == contents["text.txt"]
    client.hf("buckets", "cp", str(tmp_path / "one.txt"), f"{remote}/copied.txt")

    (tmp_path / "up" / "text.txt").unlink()
    client.hf("buckets", "sync", str(tmp_path / "up"), f"{remote}/data", "--delete")
    assert "data/text.txt" not in hub.paths(bucket)

    client.hf("buckets", "sync", f"{remote}/data", str(tmp_path / "down"))
    assert read_back(tmp_path / "down") == {name: c for name, c in contents.items() if name != "text.txt"}

    client.hf("buckets", "rm", f"{bucket}/data", "--recursive", "--yes")
    assert hub.paths(bucket) == ["copied.txt"]
    assert json.loads(client.hf("buckets", "info", bucket, "--format", "json").stdout)["id"] == bucket
    client.hf("buckets", "delete", bucket, "--yes")
    assert client.hf("buckets", "info", bucket, check=False).returncode != 0


def test_uploads_go_through_the_cas_even_with_xet_disabled(
    hub: RunningHub, client: ReleasedClient, bucket: str
) -> None:
    without = ReleasedClient(client.python, client.environment | {"HF_HUB_DISABLE_XET": "1"})
    without.run("api.batch_bucket_files(sys.argv[1], add=[(os.urandom(1000), 'a')])", bucket)
    assert hub.paths(bucket) == ["a"]


def test_the_hf_command_knows_who_it_is(client: ReleasedClient) -> None:
    assert "me" in client.hf("auth", "whoami").stdout


def test_a_bucket_is_copied_to_another_without_an_upload(client: ReleasedClient, bucket: str, hub: RunningHub) -> None:
    xorbs = hub.root / "xorbs"
    client.run("api.batch_bucket_files(sys.argv[1], add=[(os.urandom(100_000), f'v/{i}') for i in range(3)])", bucket)
    before = sorted(path.name for path in xorbs.rglob("*/*"))
    client.run("api.create_bucket(sys.argv[1] + '-copy')", bucket)
    client.hf("buckets", "cp", f"hf://buckets/{bucket}/v", f"hf://buckets/{bucket}-copy/")
    assert hub.paths(f"{bucket}-copy") == ["v/0", "v/1", "v/2"]
    assert sorted(path.name for path in xorbs.rglob("*/*")) == before


def test_four_processes_at_once_lose_nothing(
    hub: RunningHub, client: ReleasedClient, bucket: str, tmp_path: Path
) -> None:
    work = """
import hashlib
bucket, me, down = sys.argv[1:]
shared = b"the same everywhere" * 50_000
for turn in range(5):
    mine = os.urandom(400_000)
    api.batch_bucket_files(bucket, add=[(mine, f"{me}/{turn}"), (shared, f"shared/{turn}")])
    api.download_bucket_files(bucket, [(f"{me}/{turn}", down), (f"shared/{turn}", down + ".shared")])
    assert Path(down).read_bytes() == mine and Path(down + ".shared").read_bytes() == shared
"""
    # Each process has a cache of its own, as on machines of their own.
    running = []
    for i in range(4):
        one = ReleasedClient(client.python, client.environment | {"HF_HOME": str(tmp_path / f"home-{i}")})
        running.append(one.start(work, bucket, str(i), str(tmp_path / f"down-{i}")))
    for process in running:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    assert len(hub.paths(bucket)) == 4 * 5 + 5


def test_a_partial_batch_is_not_taken_for_success(client: ReleasedClient, bucket: str, hub: RunningHub) -> None:
    hub.add_fault(kind="fail_operations", operations=2, path=f"*{bucket}/batch")
    code = """
from huggingface_hub.errors import BucketBatchError
try:
    api.batch_bucket_files(sys.argv[1], add=[(b"x", f"f{i}") for i in range(5)])
except BucketBatchError as error:
    print(json.dumps([failure["path"] for failure in error.failures]))
"""
    assert json.loads(client.run(code, bucket).stdout) == ["f0", "f1"]
    assert hub.paths(bucket) == ["f2", "f3", "f4"]


def test_a_recursive_delete_spares_lexical_siblings(hub: RunningHub, client: ReleasedClient, bucket: str) -> None:
    names = ["logs/a", "logs/sub/b", "logs", "logs.json", "logs_old/c"]
    client.run("api.batch_bucket_files(sys.argv[1], add=[(b'x', n) for n in sys.argv[2:]])", bucket, *names)
    lexical = "print(json.dumps([f.path for f in api.list_bucket_tree(sys.argv[1], prefix='logs', recursive=True)]))"
    assert sorted(json.loads(client.run(lexical, bucket).stdout)) == sorted(names)
    client.hf("buckets", "rm", f"{bucket}/logs", "--recursive", "--yes")
    assert hub.paths(bucket) == ["logs.json", "logs_old/c"]


def test_refusals_are_the_client_s_own_exceptions(hub: RunningHub, client: ReleasedClient, bucket: str) -> None:
    code = """
from huggingface_hub.errors import BucketNotFoundError, HfHubHTTPError
bucket, other, reader = sys.argv[1:]
def refusal(call):
    try:
        call()
    except HfHubHTTPError as error:
        return [type(error).__name__, error.response.status_code]
print(json.dumps([
    refusal(lambda: HfApi(token=other).bucket_info(bucket)),
    refusal(lambda: HfApi(token=False).bucket_info(bucket)),
    refusal(lambda: HfApi(token="hf_forged").bucket_info(bucket)),
    refusal(lambda: HfApi(token=reader).batch_bucket_files(bucket, delete=["a"])),
    refusal(lambda: api.create_bucket("other/mine")),
    refusal(lambda: api.create_bucket(bucket)),
]))
"""
    refusals = json.loads(client.run(code, bucket, hub.tokens["other", "write"], hub.read_token).stdout)
    assert refusals == [
        ["BucketNotFoundError", 404],
        ["BucketNotFoundError", 401],
        ["HfHubHTTPError", 401],
        ["HfHubHTTPError", 403],
        ["HfHubHTTPError", 403],
        ["HfHubHTTPError", 409],
    ]


def test_a_read_token_cannot_upload(hub: RunningHub, client: ReleasedClient, bucket: str) -> None:
    reader = ReleasedClient(client.python, client.environment | {"HF_TOKEN": hub.read_token})
    code = "api.batch_bucket_files(sys.argv[1], add=[(b'x', 'a')])"
    assert reader.run(code, bucket, check=False).returncode != 0
    assert hub.paths(bucket) == []


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_again(hub: RunningHub, client: ReleasedClient, bucket: str, status: int) -> None:
    hub.add_fault(kind="status", status=status, retry_after_s=1, times=2, path=f"*{bucket}/batch")
    client.run("api.batch_bucket_files(sys.argv[1], add=[(b'x', 'a')])", bucket)
    assert hub.faults()[-1]["hits"] == 2
    assert hub.paths(bucket) == ["a"]


@pytest.mark.parametrize(
    ("path", "status", "tried_again"),
    [
        ("/cas/*/xorbs/*", 429, True),
        ("/cas/*/shards", 503, True),
        ("*/xet-write-token", 503, True),
        ("/cas/*/xorbs/*", 401, False),
        ("*/xet-write-token", 401, False),
    ],
)
def test_the_xet_client_asks_a_busy_cas_again_and_gives_up_on_a_refusal(
    hub: RunningHub, bucket: str, tmp_path: Path, path: str, status: int, tried_again: bool
) -> None:
    hub.add_fault(kind="status", status=status, path=path)
    upload = "api.batch_bucket_files(sys.argv[1], add=[(os.urandom(1000), 'a')])"
    done = client_of("1", hub, tmp_path / "home").run(upload, bucket, check=False)
    assert (done.returncode == 0) == tried_again, done.stderr
    assert hub.paths(bucket) == (["a"] if tried_again else [])


def test_a_lost_answer_leads_to_the_same_commit_twice(hub: RunningHub, client: ReleasedClient, bucket: str) -> None:
    hub.add_fault(kind="lose_answer", path=f"*{bucket}/batch")
    client.run("api.batch_bucket_files(sys.argv[1], add=[(b'x', 'a')], delete=['b'])", bucket)
    assert hub.paths(bucket) == ["a"]


def test_a_dropped_commit_looks_like_success(hub: RunningHub, client: ReleasedClient, bucket: str) -> None:
    hub.add_fault(kind="drop_commit", path=f"*{bucket}/batch")
    client.run("api.batch_bucket_files(sys.argv[1], add=[(b'x', 'a')])", bucket)
    assert hub.paths(bucket) == []


def test_a_full_disk_fails_the_upload_and_names_nothing(hub: RunningHub, client: ReleasedClient, bucket: str) -> None:
    hub.add_fault(kind="disk_full", path="*/xorbs/*", times=None)
    code = "api.batch_bucket_files(sys.argv[1], add=[(os.urandom(100_000), 'a')])"
    assert impatient(client).run(code, bucket, check=False).returncode != 0
    assert hub.paths(bucket) == []


def test_a_truncated_object_is_not_taken_for_the_file(
    hub: RunningHub, client: ReleasedClient, bucket: str, tmp_path: Path
) -> None:
    client.run("api.batch_bucket_files(sys.argv[1], add=[(os.urandom(500_000), 'a')])", bucket)
    hub.add_fault(kind="truncate", path="/cas/*/xorbs/*", keep_bytes=1000, times=None)
    code = "api.download_bucket_files(sys.argv[1], [('a', sys.argv[2])])"
    assert impatient(client).run(code, bucket, str(tmp_path / "a"), check=False).returncode != 0


def test_slow_reads_take_their_time(hub: RunningHub, client: ReleasedClient, bucket: str, tmp_path: Path) -> None:
    content = os.urandom(300_000)
    (tmp_path / "a").write_bytes(content)
    client.run("api.batch_bucket_files(sys.argv[1], add=[(sys.argv[2], 'a')])", bucket, str(tmp_path / "a"))
    hub.add_fault(kind="slow_read", path="/cas/*/xorbs/*", bytes_per_s=150_000)
    code = """
import time
started = time.monotonic()
api.download_bucket_files(sys.argv[1], [("a", sys.argv[2])])
print(time.monotonic() - started)
"""
    assert float(client.run(code, bucket, str(tmp_path / "b")).stdout) > 1.5
    assert (tmp_path / "b").read_bytes() == content


def test_after_garbage_went_the_same_content_goes_up_again(
    hub: RunningHub, client: ReleasedClient, bucket: str
) -> None:
    content = "content = sys.argv[1].encode() * 20_000\n"
    client.run(content + "api.batch_bucket_files(sys.argv[1], add=[(content, 'a')])", bucket)
    client.run("api.batch_bucket_files(sys.argv[1], delete=['a'])", bucket)
    assert hub.collect_garbage() >= 1
    client.run(content + "api.batch_bucket_files(sys.argv[1], add=[(content, 'b')])", bucket)
    assert hub.paths(bucket) == ["b"]


def test_a_file_system_follows_a_bucket(hub: RunningHub, bucket: str, tmp_path: Path) -> None:
    """Since 2.x the client follows the event feed, so that a cached listing shows a file that another process wrote."""
    code = """
import time
from huggingface_hub import HfFileSystem
bucket = sys.argv[1]
api.batch_bucket_files(bucket, add=[(b"1", "dir/first")])
fs = HfFileSystem(live_follow=True)
folder = f"buckets/{bucket}/dir"
assert [f["name"] for f in fs.ls(folder)] == [f"{folder}/first"]
time.sleep(1)
HfApi().batch_bucket_files(bucket, add=[(b"2", "dir/second")])
give_up = time.monotonic() + 10
while [f["name"] for f in fs.ls(folder)] != [f"{folder}/first", f"{folder}/second"]:
    assert time.monotonic() < give_up, fs.ls(folder)
    time.sleep(0.1)
"""
    client_of("2", hub, tmp_path / "home").run(code, bucket)
