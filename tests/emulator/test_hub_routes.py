"""The Hub's answers, call by call, without a client in between."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from bucket_grpo.emulator.hub import Hub, create_app
from tests.emulator.xet_bytes import pack_file

BUCKET = "/api/buckets/me/b"


class Caller:
    """A user of the Hub in one process with it."""

    def __init__(self, client: TestClient, hub: Hub, user: str = "me", role: Any = "write") -> None:
        found = hub.tokens.user(user)
        assert found is not None
        self.client = client
        self.headers = {"Authorization": f"Bearer {found.tokens[role]}"}

    def __call__(self, method: str, path: str, **options: Any) -> Any:
        headers = self.headers | options.pop("headers", {})
        return self.client.request(method, path, headers=headers, follow_redirects=False, **options)

    def upload(self, content: bytes, bucket: str = BUCKET) -> str:
        """Bring content to the CAS; its hash, which no bucket names yet."""
        name, (xorb, data), shard = pack_file([content])
        access = self("GET", f"{bucket}/xet-write-token").json()
        cas = {"Authorization": f"Bearer {access['accessToken']}"}
        base = access["casUrl"]
        for path, body in ((f"/v1/xorbs/default/{xorb}", data), ("/v2/shards", shard)):
            answer = self.client.post(base + path, content=body, headers=cas)
            assert answer.status_code == 200, answer.text
        return name

    def batch(self, *operations: dict[str, Any], bucket: str = BUCKET) -> Any:
        return self("POST", f"{bucket}/batch", content="\n".join(json.dumps(operation) for operation in operations))

    def add(self, *paths: str, content: bytes = b"hello", bucket: str = BUCKET) -> Any:
        name = self.upload(content, bucket)
        return self.batch(*({"type": "addFile", "path": path, "xetHash": name} for path in paths), bucket=bucket)

    def paths(self, query: str = "") -> list[str]:
        return [entry["path"] for entry in self("GET", f"{BUCKET}/tree{query}").json()]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tmp_path / "hub", users=("me", "other"), orgs=("lab",))
    yield hub
    hub.close()


@pytest.fixture
def client(hub: Hub) -> Iterator[TestClient]:
    with TestClient(create_app(hub), base_url="http://hub.test", client=("127.0.0.1", 50000)) as client:
        yield client


@pytest.fixture
def me(client: TestClient, hub: Hub) -> Caller:
    me = Caller(client, hub)
    assert me("POST", BUCKET, json={"private": True}).status_code == 200
    return me


def admin(hub: Hub) -> dict[str, str]:
    return {"Authorization": f"Bearer {hub.tokens.admin}"}


def test_whoami_names_the_user_and_the_role(client: TestClient, hub: Hub) -> None:
    who = Caller(client, hub, role="read")("GET", "/api/whoami-v2").json()
    assert (who["name"], who["orgs"][0]["name"], who["auth"]["accessToken"]["role"]) == ("me", "lab", "read")
    assert client.get("/api/whoami-v2").status_code == 401


def test_a_bucket_is_created_once(me: Caller) -> None:
    again = me("POST", "/api/buckets/me/b")
    assert again.status_code == 409
    assert again.json()["url"] == "http://hub.test/buckets/me/b"
    info = me("GET", BUCKET).json()
    assert (info["id"], info["private"], info["size"], info["totalFiles"]) == ("me/b", True, 0, 0)


def test_visibility_may_be_said_in_either_client_s_words(me: Caller) -> None:
    me("POST", "/api/buckets/me/c", json={"visibility": "private"})
    me("POST", "/api/buckets/me/d", json={})
    assert me("GET", "/api/buckets/me/c").json()["private"] is True
    assert me("GET", "/api/buckets/me/d").json()["private"] is False
    me("PUT", "/api/buckets/me/c/settings", json={"private": False})
    assert me("GET", "/api/buckets/me/c").json()["private"] is False


def test_buckets_are_listed_by_namespace_and_search(me: Caller, hub: Hub) -> None:
    me("POST", "/api/buckets/lab/public")
    assert [bucket["id"] for bucket in me("GET", "/api/buckets/me").json()] == ["me/b"]
    assert me("GET", "/api/buckets/me?search=zzz").json() == []
    assert [bucket["id"] for bucket in me.client.get("/api/buckets/lab").json()] == ["lab/public"]
    assert me("GET", "/api/buckets/nobody").status_code == 404


def test_a_bucket_can_move_and_go(me: Caller) -> None:
    me.add("a")
    assert me("POST", "/api/repos/move", json={"fromRepo": "me/b", "toRepo": "lab/c", "type": "bucket"}).is_success
    assert me("GET", "/api/buckets/lab/c").json()["totalFiles"] == 1
    assert me("GET", BUCKET).status_code == 404
    assert me("DELETE", "/api/buckets/lab/c").is_success
    assert me("GET", "/api/buckets/lab/c").headers["X-Error-Code"] == "RepoNotFound"


@pytest.mark.parametrize(
    ("who", "status", "code"),
    [("other", 404, "RepoNotFound"), ("nobody", 401, "RepoNotFound"), ("forged", 401, None)],
)
def test_a_private_bucket_looks_missing_to_others(
    me: Caller, hub: Hub, client: TestClient, who: str, status: int, code: str | None
) -> None:
    headers = {
        "other": Caller(client, hub, "other").headers,
        "nobody": {},
        "forged": {"Authorization": "Bearer hf_forged"},
    }[who]
    for path in (BUCKET, f"{BUCKET}/tree", f"{BUCKET}/xet-read-token", f"{BUCKET}/events", "/buckets/me/b/resolve/a"):
        answer = client.get(path, headers=headers)
        assert (answer.status_code, answer.headers.get("X-Error-Code")) == (status, code), path


def test_a_read_token_reads_and_changes_nothing(me: Caller, hub: Hub, client: TestClient) -> None:
    me.add("a")
    reader = Caller(client, hub, role="read")
    assert reader.paths() == ["a"]
    assert reader("GET", f"{BUCKET}/xet-read-token").status_code == 200
    refused = [
        reader.batch({"type": "deleteFile", "path": "a"}),
        reader("GET", f"{BUCKET}/xet-write-token"),
        reader("DELETE", BUCKET),
        reader("POST", "/api/buckets/me/new"),
    ]
    assert [answer.status_code for answer in refused] == [403] * 4
    assert all("write" in answer.headers["X-Error-Message"] for answer in refused)


def test_somebody_else_s_public_bucket_can_be_read_not_written(me: Caller, hub: Hub, client: TestClient) -> None:
    me("POST", "/api/buckets/me/open")
    other = Caller(client, hub, "other")
    assert other("GET", "/api/buckets/me/open").status_code == 200
    assert other.batch({"type": "deleteFile", "path": "a"}, bucket="/api/buckets/me/open").status_code == 403


def test_a_cas_token_is_bound_to_its_scope_and_its_time(me: Caller, hub: Hub, client: TestClient) -> None:
    read = me("GET", f"{BUCKET}/xet-read-token").json()
    assert client.post(f"{read['casUrl']}/v1/shards").status_code == 401
    headers = {"Authorization": f"Bearer {read['accessToken']}"}
    assert client.post(f"{read['casUrl']}/v1/shards", headers=headers).status_code == 403
    hub.cas_token_lifetime_s = -1
    old = me("GET", f"{BUCKET}/xet-write-token").json()
    headers = {"Authorization": f"Bearer {old['accessToken']}"}
    assert client.post(f"{old['casUrl']}/v1/shards", headers=headers).status_code == 401


def test_a_prefix_matches_lexically(me: Caller) -> None:
    me.add("logs", "logs/a", "logs/sub/b", "logs.json", "logs_old/c", "other")
    assert me.paths("/logs") == ["logs", "logs.json", "logs/a", "logs/sub/b", "logs_old/c"]
    assert me.paths("/logs%2F") == ["logs/a", "logs/sub/b"]


def test_a_tree_is_recursive_unless_told_otherwise(me: Caller) -> None:
    me.add("top", "dir/a", "dir/sub/b", "dir.txt")
    everything = me("GET", f"{BUCKET}/tree").json()
    assert [entry["path"] for entry in everything] == ["dir.txt", "dir/a", "dir/sub/b", "top"]
    assert {entry["type"] for entry in everything} == {"file"}
    level = me("GET", f"{BUCKET}/tree?recursive=false").json()
    assert [(entry["path"], entry["type"]) for entry in level] == [
        ("dir", "directory"),
        ("dir.txt", "file"),
        ("top", "file"),
    ]
    assert me.paths("/dir?recursive=false") == ["dir.txt", "dir/a", "dir/sub"]


@pytest.mark.parametrize("recursive", ["true", "false"])
def test_a_long_tree_comes_in_pages(me: Caller, recursive: str) -> None:
    paths = [f"d é{i}/f#{i}" if recursive == "true" else f"f#{i} é" for i in range(25)]
    me.add(*paths)
    found, url, pages = [], f"{BUCKET}/tree?limit=10&recursive={recursive}", 0
    while url:
        answer = me("GET", url)
        found += [entry["path"] for entry in answer.json()]
        pages += 1
        url = answer.links.get("next", {}).get("url")
    assert sorted(found) == sorted(paths)
    assert pages == 3


def test_paths_info_leaves_out_what_is_not_there(me: Caller) -> None:
    me.add("dir/a", content=b"12345")
    (info,) = me("POST", f"{BUCKET}/paths-info", json={"paths": ["dir/a", "missing", "dir"]}).json()
    assert (info["type"], info["path"], info["size"], len(info["xetHash"])) == ("file", "dir/a", 5, 64)


def test_a_batch_can_fail_in_part_and_says_so_with_200(me: Caller) -> None:
    good = me.upload(b"good")
    answer = me.batch(
        {"type": "addFile", "path": "good", "xetHash": good, "mtime": 1727276531346, "contentType": "text/plain"},
        {"type": "addFile", "path": "bad", "xetHash": "0" * 63 + "1"},
    )
    report = answer.json()
    assert answer.status_code == 200
    assert (report["success"], report["processed"], report["succeeded"]) == (False, 2, 1)
    assert [failure["path"] for failure in report["failed"]] == ["bad"]
    assert me.paths() == ["good"]
    assert me("GET", f"{BUCKET}/tree").json()[0]["mtime"] == "2024-09-25T15:02:11.346Z"


def test_a_batch_that_fails_as_a_whole_is_422(me: Caller) -> None:
    answer = me.batch({"type": "addFile", "path": "bad", "xetHash": "1" * 64})
    assert answer.status_code == 422
    assert answer.json()["succeeded"] == 0


@pytest.mark.parametrize("path", ["", "/abs", "a//b", "../up", "a/../b", "a/.", "nul\0", "new\nline", "x" * 1025])
def test_a_path_that_is_no_key_is_refused(me: Caller, path: str) -> None:
    assert me.add(path).json()["failed"][0]["path"] == path


@pytest.mark.parametrize("body", ["", "{}", "not json", '{"type":"rename","path":"a"}'])
def test_a_batch_that_cannot_be_read_is_400(me: Caller, body: str) -> None:
    assert me("POST", f"{BUCKET}/batch", content=body).status_code == 400


def test_deleting_is_exact_and_deleting_again_is_no_error(me: Caller) -> None:
    me.add("v1", "v1.bak", "v10")
    for _ in range(2):
        assert me.batch({"type": "deleteFile", "path": "v1"}).json()["success"]
    assert me.paths() == ["v1.bak", "v10"]


def test_a_copy_needs_content_that_its_source_shows_the_caller(me: Caller, hub: Hub, client: TestClient) -> None:
    me.add("a", content=b"secret")
    name = me("GET", f"{BUCKET}/tree").json()[0]["xetHash"]
    copy = {"type": "copyFile", "path": "copied", "xetHash": name, "sourceRepoType": "bucket", "sourceRepoId": "me/b"}
    assert me.batch(copy).json()["success"]
    assert me.batch(copy | {"sourceRepoType": "model"}).status_code == 422
    assert me.batch(copy | {"xetHash": "0" * 64}).status_code == 422
    other = Caller(client, hub, "other")
    other("POST", "/api/buckets/other/mine")
    stolen = other.batch(copy, bucket="/api/buckets/other/mine")
    assert "Repository not found" in stolen.json()["failed"][0]["error"]


def test_resolve_gives_metadata_to_a_head_and_a_signed_url_to_a_get(me: Caller, client: TestClient) -> None:
    me.add("dir/a b#1", content=b"0123456789")
    path = "/buckets/me/b/resolve/dir%2Fa%20b%231"
    head = me("HEAD", path)
    assert (head.status_code, head.headers["X-Linked-Size"]) == (200, "10")
    assert head.headers["X-Xet-Hash"] in head.headers["ETag"]
    assert head.links["xet-auth"]["url"] == "http://hub.test/api/buckets/me/b/xet-read-token"
    found = me("GET", path)
    assert found.status_code == 302
    bridge = client.head(found.headers["Location"])
    assert (bridge.status_code, bridge.headers["Content-Length"]) == (200, "10")
    # The signature is all that the redirect's target asks for: a client must not carry its token there.
    assert client.get(found.headers["Location"]).content == b"0123456789"
    assert client.get(found.headers["Location"] + "0").status_code == 403
    missing = me("GET", "/buckets/me/b/resolve/missing é…")
    assert (missing.status_code, missing.headers["X-Error-Code"]) == (404, "EntryNotFound")


@pytest.mark.parametrize(
    ("asked", "status", "content"),
    [
        ("bytes=0-3", 206, b"0123"),
        ("bytes=4-", 206, b"456789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=8-99", 206, b"89"),
        ("bytes=10-", 416, None),
        ("bytes=3-1", 416, None),
        ("lines=1-2", 416, None),
    ],
)
def test_a_file_can_be_read_in_ranges(
    me: Caller, client: TestClient, asked: str, status: int, content: bytes | None
) -> None:
    me.add("a", content=b"0123456789")
    url = me("GET", "/buckets/me/b/resolve/a").headers["Location"]
    answer = client.get(url, headers={"Range": asked})
    assert answer.status_code == status
    assert content is None or answer.content == content
    assert "10" in answer.headers["Content-Range"]


def test_a_reconstruction_honours_ranges_and_says_416_past_the_end(me: Caller, client: TestClient) -> None:
    contents = [b"first", b"second", b"third"]
    name, (xorb, data), shard = pack_file(contents)
    access = me("GET", f"{BUCKET}/xet-write-token").json()
    base, headers = access["casUrl"], {"Authorization": f"Bearer {access['accessToken']}"}
    assert client.post(f"{base}/v1/shards", content=shard, headers=headers).status_code == 400, "its xorb is unknown"
    assert client.head(f"{base}/v1/xorbs/default/{xorb}", headers=headers).status_code == 404
    assert client.post(f"{base}/v1/xorbs/default/{'0' * 64}", content=data, headers=headers).status_code == 400
    put = [client.post(f"{base}/v1/xorbs/default/{xorb}", content=data, headers=headers) for _ in range(2)]
    assert [answer.json()["was_inserted"] for answer in put] == [True, False]
    assert client.post(f"{base}/v1/shards", content=shard, headers=headers).json() == {"result": 1}
    assert client.get(f"{base}/v1/chunks/default-merkledb/{'0' * 64}", headers=headers).status_code == 404

    whole = client.get(f"{base}/v2/reconstructions/{name}", headers=headers).json()
    assert (whole["offset_into_first_range"], whole["terms"][0]["unpacked_length"]) == (0, 16)
    fetch = whole["xorbs"][xorb][0]
    span = fetch["ranges"][0]["bytes"]
    part = client.get(fetch["url"], headers={"Range": f"bytes={span['start']}-{span['end']}"})
    assert (part.status_code, part.content) == (206, data)
    assert client.get(fetch["url"].replace("signature=", "signature=0")).status_code == 403

    cut = client.get(f"{base}/v1/reconstructions/{name}", headers=headers | {"Range": "bytes=7-9"}).json()
    assert cut["offset_into_first_range"] == 7
    assert cut["fetch_info"][xorb][0]["url_range"] == span
    past = client.get(f"{base}/v2/reconstructions/{name}", headers=headers | {"Range": "bytes=16-20"})
    assert past.status_code == 416
    assert client.get(f"{base}/v2/reconstructions/{'1' * 64}", headers=headers).status_code == 404


def test_models_and_unknown_routes_are_404(me: Caller) -> None:
    assert me("GET", "/api/models/gpt2").headers["X-Error-Code"] == "RepoNotFound"
    assert me("DELETE", "/api/buckets/b").status_code == 404
    assert me("GET", "/api/nothing").status_code == 404


def test_the_emulator_is_controlled_with_the_admin_token_on_loopback(me: Caller, hub: Hub) -> None:
    fault = {"kind": "status", "status": 429}
    assert me("POST", "/_emulator/faults", json=fault).status_code == 401
    assert me.client.post("/_emulator/faults", json={"kind": "earthquake"}, headers=admin(hub)).status_code == 400
    assert me.client.post("/_emulator/faults", json=fault, headers=admin(hub)).json()[0]["hits"] == 0
    assert me.client.delete("/_emulator/faults", headers=admin(hub)).json() == []
    far = TestClient(create_app(hub), client=("192.0.2.7", 50000))
    assert far.get("/_emulator/faults", headers=admin(hub)).status_code == 403
    assert far.get("/_emulator/health").status_code == 200


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_a_status_fault_hits_the_next_n_matching_requests(me: Caller, hub: Hub, status: int) -> None:
    fault = {"kind": "status", "status": status, "path": "*/tree", "times": 2, "retry_after_s": 3}
    me.client.post("/_emulator/faults", json=fault, headers=admin(hub))
    assert me("GET", BUCKET).status_code == 200
    answers = [me("GET", f"{BUCKET}/tree") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [status, status, 200]
    assert answers[0].headers["Retry-After"] == "3"
    assert answers[0].headers["RateLimit"] == '"api";r=0;t=3'
    assert me.client.get("/_emulator/faults", headers=admin(hub)).json()[0]["hits"] == 2


def test_n_of_m_operations_can_be_made_to_fail(me: Caller, hub: Hub) -> None:
    fault = {"kind": "fail_operations", "operations": 2, "operation_path": "*.bin"}
    me.client.post("/_emulator/faults", json=fault, headers=admin(hub))
    report = me.add("a.txt", "b.bin", "c.bin", "d.bin").json()
    assert [failure["path"] for failure in report["failed"]] == ["b.bin", "c.bin"]
    assert me.paths() == ["a.txt", "d.bin"]


def test_a_dropped_commit_answers_success_and_a_lost_answer_hides_one(me: Caller, hub: Hub) -> None:
    me.client.post("/_emulator/faults", json={"kind": "drop_commit"}, headers=admin(hub))
    assert me.add("dropped").json()["success"] is True
    me.client.post("/_emulator/faults", json={"kind": "lose_answer", "path": "*/batch"}, headers=admin(hub))
    assert me.add("done").status_code == 502
    assert me.paths() == ["done"]


def test_content_can_be_cut_off_as_if_it_were_all(me: Caller, hub: Hub, client: TestClient) -> None:
    me.add("a", content=b"0123456789")
    client.post(
        "/_emulator/faults", json={"kind": "truncate", "path": "/cas-bridge/*", "keep_bytes": 4}, headers=admin(hub)
    )
    url = me("GET", "/buckets/me/b/resolve/a").headers["Location"]
    assert [client.get(url).content for _ in range(2)] == [b"0123", b"0123456789"]


def test_an_upload_can_meet_a_full_disk(me: Caller, hub: Hub) -> None:
    me.client.post("/_emulator/faults", json={"kind": "disk_full", "path": "*/xorbs/*"}, headers=admin(hub))
    with pytest.raises(AssertionError, match="No space left"):
        me.upload(b"too much")


def test_what_is_hidden_shows_when_its_time_has_come(me: Caller, hub: Hub) -> None:
    me.add("a", content=b"old")
    fault = {"kind": "hide", "operation_path": "[ab]", "delay_s": 0.6}
    me.client.post("/_emulator/faults", json=fault, headers=admin(hub))
    assert me.add("a", "b", "c", content=b"newer").json()["success"] is True
    assert me.paths() == ["a", "c"]
    assert me("HEAD", "/buckets/me/b/resolve/a").headers["X-Linked-Size"] == "3"
    give_up = time.monotonic() + 10
    while me.paths() != ["a", "b", "c"]:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert me("HEAD", "/buckets/me/b/resolve/a").headers["X-Linked-Size"] == "5"
