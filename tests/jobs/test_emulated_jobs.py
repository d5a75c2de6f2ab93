"""The emulated Hub runs jobs as the Hub does, seen through the released client and the `hf` command."""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from tests.jobs.emulated import NAMESPACES, Cluster, cluster, eventually, running_with

SERVER = "exec python3 -m http.server 8000"
HF = str(Path(sys.executable).with_name("hf"))


@pytest.fixture(scope="module", params=["namespaces", pytest.param("plain", marks=pytest.mark.e2e)])
def hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if request.param == "namespaces" and not NAMESPACES:
        pytest.skip("network namespaces need root")
    with cluster(tmp_path_factory.mktemp("hub"), namespaces=request.param == "namespaces") as running:
        yield running


def test_a_job_runs_to_its_end_and_its_log_can_be_read(hub: Cluster) -> None:
    job = hub.run("echo one; echo two >&2; echo $WORD-$SECRET-$JOB_ID", env={"WORD": "w"}, secrets={"SECRET": "s"})
    assert job.status.stage == "SCHEDULING"
    done = hub.wait(job)
    assert done.status.stage == "COMPLETED"
    assert sorted(path.name for path in (hub.hub.root / "jobs" / job.id).iterdir() if path.is_dir()) == []
    assert done.durations is not None
    assert done.started_at is not None
    assert done.finished_at is not None
    assert hub.log(job) == ["one", "two", f"w-s-{job.id}"]
    assert "s" not in json.dumps(done.secrets).replace("SECRET", "")


def test_a_log_can_be_followed_while_the_job_runs(hub: Cluster) -> None:
    job = hub.run("for i in 1 2 3; do echo $i; sleep 0.2; done")
    hub.wait(job, "RUNNING")
    assert list(hub.api.fetch_job_logs(job_id=job.id, namespace="me", follow=True)) == ["1", "2", "3"]
    assert list(hub.api.fetch_job_logs(job_id=job.id, namespace="me", tail=1)) == ["3"]


def test_a_failed_job_says_its_exit_code(hub: Cluster) -> None:
    done = hub.wait(hub.run("exit 7"))
    assert (done.status.stage, done.status.message) == ("ERROR", "Job failed with exit code: 7")


def test_a_command_that_is_not_there_is_an_error(hub: Cluster) -> None:
    done = hub.wait(hub.run("", command=["no-such-command"]))
    assert done.status.stage == "ERROR"
    assert "no-such-command" in (done.status.message or "")


def test_a_job_ends_at_its_timeout(hub: Cluster) -> None:
    done = hub.wait(hub.run("sleep 60", timeout=1))
    assert (done.status.stage, done.status.message) == ("ERROR", "Job timeout")


def test_a_cancelled_job_gets_sigterm_and_leaves_no_process_behind(hub: Cluster) -> None:
    mark = uuid.uuid4().hex
    job = hub.run(
        f"trap 'echo bye; exit 0' TERM; (setsid sleep 300 {mark} || setsid sh -c 'sleep 300; : {mark}') & "
        f"sh -c 'sleep 300; : {mark}' & echo up; wait"
    )
    hub.wait(job, "RUNNING")
    assert eventually(lambda: bool(running_with(mark)))
    hub.api.cancel_job(job_id=job.id, namespace="me")
    assert hub.wait(job).status.stage == "CANCELED"
    assert "bye" in hub.log(job)
    assert eventually(lambda: not running_with(mark))


def test_a_jobs_bucket_is_mounted_where_it_was_asked_for(hub: Cluster) -> None:
    volume = hub.volume("data", read_only=False)
    hub.api.batch_bucket_files("me/data", add=[(b"from outside", "in/a.txt")])
    done = hub.wait(
        hub.run(
            "", command=["bash", "-c", 'cat "$0/in/a.txt"; echo from inside > "$0/out.txt"', "/lora"], volumes=[volume]
        )
    )
    assert done.status.stage == "COMPLETED", done.status.message
    assert hub.log(done) == ["from outside"]
    found = {entry.path: entry.size for entry in hub.api.list_bucket_tree("me/data", recursive=True)}
    assert found["out.txt"] == len("from inside\n")


def test_a_read_only_volume_cannot_be_written(hub: Cluster) -> None:
    done = hub.wait(
        hub.run("", command=["bash", "-c", 'echo x > "$0/x"', "/lora"], volumes=[hub.volume("fixed", read_only=True)])
    )
    assert done.status.stage == "ERROR"


def test_two_jobs_have_a_port_8000_each_behind_a_gateway_that_wants_a_token(hub: Cluster) -> None:
    script = 'mkdir -p "$TMPDIR/w" && cd "$TMPDIR/w" && echo $JOB_ID > id && exec python3 -m http.server "$0"'
    jobs = [hub.run("", command=["bash", "-c", script, "8000"], expose=[8000]) for _ in range(2)]
    for job in jobs:
        assert hub.get(job, hub.hub.token, "/id").text.strip() == job.id
        assert hub.get(job, hub.hub.read_token).status_code == 200
        assert hub.get(job).status_code == 401
        assert hub.get(job, hub.hub.tokens["other", "write"]).status_code == 403
        hub.api.cancel_job(job_id=job.id, namespace="me")


def test_jobs_are_found_by_their_labels_page_by_page(hub: Cluster) -> None:
    run = uuid.uuid4().hex
    made = [hub.run("true", labels={"run": run, "n": str(i % 2)}).id for i in range(4)]
    assert {job.id for job in hub.api.list_jobs(labels={"run": run}, namespace="me")} == set(made)
    assert {job.id for job in hub.api.list_jobs(labels={"run": run, "n": "1"}, namespace="me")} == set(made[1::2])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"flavor": "h900"}, "h900.*cpu-basic"),
        ({"labels": {"run": "a.b"}}, "alphanumerics"),
        ({"namespace": "other"}, "rights"),
    ],
)
def test_what_the_hub_refuses_is_refused(hub: Cluster, more: dict[str, object], says: str) -> None:
    with pytest.raises(HfHubHTTPError) as caught:
        hub.run("true", **more)
    import re

    assert re.search(says, str(caught.value))


def test_a_read_token_sees_jobs_and_starts_none(hub: Cluster) -> None:
    api = HfApi(endpoint=hub.hub.endpoint, token=hub.hub.read_token)
    list(api.list_jobs(namespace="me"))
    with pytest.raises(HfHubHTTPError, match="role 'write'"):
        api.run_job(image="x", command=["true"], namespace="me")


def test_a_lost_job_is_an_error_and_a_forgotten_one_is_not_there(hub: Cluster) -> None:
    mark = uuid.uuid4().hex
    jobs = [hub.run(f"sh -c 'sleep 300; : {mark}'") for _ in range(2)]
    for job in jobs:
        hub.wait(job, "RUNNING")
    hub.lose(jobs[0])
    hub.lose(jobs[1], forget=True)
    assert "lost" in (hub.wait(jobs[0]).status.message or "")

    def forgotten() -> bool:
        try:
            hub.inspect(jobs[1])
        except HfHubHTTPError as error:
            return error.response.status_code == 404
        return False

    assert eventually(forgotten)
    assert eventually(lambda: not running_with(mark))


def test_a_job_can_wait_for_its_machine_for_ever_and_still_be_cancelled(hub: Cluster) -> None:
    hub.faults(schedule_forever=1, match="stuck")
    job, other = hub.run("true", labels={"part": "stuck"}), hub.run("true", labels={"part": "free"})
    assert hub.wait(other).status.stage == "COMPLETED"
    assert hub.inspect(job).status.stage == "SCHEDULING"
    hub.api.cancel_job(job_id=job.id, namespace="me")
    assert hub.wait(job).status.stage == "CANCELED"


def test_the_gateway_can_cut_long_requests(hub: Cluster) -> None:
    code = (
        "import http.server, sys, time\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        if self.path == '/slow': time.sleep(5)\n"
        "        self.send_response(200); self.send_header('Content-Length', '0'); self.end_headers()\n"
        "http.server.ThreadingHTTPServer(('0.0.0.0', int(sys.argv[1])), H).serve_forever()\n"
    )
    job = hub.run("", command=["python3", "-c", code, "8000"], expose=[8000])
    assert hub.get(job, hub.hub.token).status_code == 200
    hub.faults(gateway_cut_after_s=0.3)
    try:
        with pytest.raises(httpx.TransportError):
            hub.get(job, hub.hub.token, "/slow")
        assert hub.get(job, hub.hub.token).status_code == 200
    finally:
        hub.faults(gateway_cut_after_s=None)
        hub.api.cancel_job(job_id=job.id, namespace="me")


def test_metrics_show_that_the_job_works(hub: Cluster) -> None:
    job = hub.run("exec python3 -c 'while True: pass'")
    hub.wait(job, "RUNNING")
    samples = hub.api.fetch_job_metrics(job_id=job.id, namespace="me")
    first = next(iter(samples))
    assert first["cpu_usage_pct"] > 5
    assert first["memory_used_bytes"] > 1e6
    hub.api.cancel_job(job_id=job.id, namespace="me")


def test_the_hf_command_sees_the_same_jobs(hub: Cluster, tmp_path: Path) -> None:
    def hf(*arguments: str) -> str:
        env = hub.hub.environment(tmp_path)
        done = subprocess.run(
            [HF, "jobs", *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    job = hub.run("echo hello; sleep 60", name="visible")
    hub.wait(job, "RUNNING")
    assert job.id in hf("ps", "-q")
    assert job.id in hf("inspect", job.id, "--format", "json")
    hf("cancel", job.id)
    assert hub.wait(job).status.stage == "CANCELED"
    assert "hello" in hf("logs", job.id)


def test_a_failed_job_is_tried_again_as_often_as_was_asked(hub: Cluster) -> None:
    body = {
        "command": [
            "bash",
            "-c",
            'echo try; test "$(ls "$TMPDIR" | grep -c again-)" = 2 || { mktemp "$TMPDIR/again-XXX"; exit 1; }',
        ],
        "flavor": "cpu-basic",
        "attempts": 3,
    }
    headers = {"Authorization": f"Bearer {hub.hub.token}"}
    answer = httpx.post(f"{hub.hub.endpoint}/api/jobs/me", json=body, headers=headers)
    job = hub.api.inspect_job(job_id=answer.json()["id"], namespace="me")
    assert hub.wait(job).status.stage == "COMPLETED"
    assert hub.log(job).count("try") == 3
