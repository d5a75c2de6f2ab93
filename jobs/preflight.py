"""Everything that a run rests on, tried for a cent before GPUs are paid for: what works, and what does not."""

import json
import os
import secrets as random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from bucket_grpo.bucket_sync.store_contract import Store, StoreError
from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.bucket_sync.vocabulary import mint_incarnation
from bucket_grpo.jobs.actions import DEFAULT_BUCKET, own_namespace
from bucket_grpo.jobs.hub import HubProblem, JobsHub, stage
from bucket_grpo.jobs.labels import CHECK, JobName
from bucket_grpo.jobs.plan import BUCKET_URL, MOUNT, PORT, parse_bucket
from bucket_grpo.jobs.request import BucketVolume, JobRequest

IMAGE = "python:3.12"
FLAVOR = "cpu-basic"
RUN = "preflight"
WAIT_S = 150.0

# Runs in a stock image: shows what the mount reads, writes one file there, serves one answer.
SCRIPT = """
import http.server, json, os, pathlib, sys
mount, folder, port = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
seen = (mount / folder / "from-launcher.txt").read_text()
(mount / folder / "from-job.txt").write_text(seen[::-1])
answer = json.dumps({"seen": seen, "secret": os.environ.get("PREFLIGHT_SECRET", "")}).encode()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
print("preflight job is serving", flush=True)
http.server.HTTPServer(("0.0.0.0", port), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Result:
    """One check. `fix` says what to do about a failure."""

    name: str
    ok: bool
    found: str
    fix: str | None = None


class Preflight:
    """The checks, in the order in which each builds on the one before."""

    def __init__(self, hub: JobsHub, store: Store, bucket: str, timeout: str, say: Callable[[str], None]) -> None:
        self.hub = hub
        self.store = store
        self.bucket = bucket
        self.timeout = timeout
        self.say = say
        self.results: list[Result] = []
        self.incarnation = mint_incarnation()
        self.folder = f"{RUN}/{self.incarnation}"
        self.word = random.token_hex(8)

    def run(self) -> list[Result]:
        """Every check until one fails on which the rest depends. The job is ended in any case."""
        try:
            if self._bucket() and (url := self._job()):
                self._port(url)
                self._written_by_job()
        finally:
            self._clean_up()
        return self.results

    def _bucket(self) -> bool:
        try:
            self.hub.create_bucket("/".join(parse_bucket(self.bucket)))
            self.store.write_once(f"{self.folder}/from-launcher.txt", self.word.encode())
            back = self.store.read(f"{self.folder}/from-launcher.txt").decode()
        except (HubProblem, StoreError) as error:
            return self._note("bucket: write and read back", False, str(error), "use a token with the role 'write'")
        return self._note("bucket: write and read back", back == self.word, self.bucket)

    def _job(self) -> str | None:
        request = JobRequest(
            self.hub.namespace,
            JobName(RUN, self.incarnation, CHECK, "check"),
            IMAGE,
            ["python3", "-c", SCRIPT, MOUNT, self.folder, str(PORT)],
            FLAVOR,
            self.timeout,
            secret_names=("PREFLIGHT_SECRET",),
            volumes=(BucketVolume("/".join(parse_bucket(self.bucket)), MOUNT, read_only=False),),
            expose=(PORT,),
        )
        try:
            job = self.hub.post(request, {"PREFLIGHT_SECRET": self.word})
            self.say(f"job {job.id} on {FLAVOR}; this takes up to {WAIT_S:.0f} s")
            deadline = time.monotonic() + WAIT_S
            while stage(job) == "SCHEDULING" and time.monotonic() < deadline:
                time.sleep(1.0)
                job = self.hub.inspect(job.id)
        except HubProblem as error:
            self._note("job: start", False, str(error), "check https://huggingface.co/settings/billing and the token")
            return None
        running = stage(job) == "RUNNING"
        message = job.status.message or stage(job)
        self._note("job: start, image, volume, secrets", running, message, "see `hf jobs logs " + job.id + "`")
        urls = job.status.expose_urls or []
        if running and not urls:
            self._note("exposed port", False, "the job has no URL", "try `network: private`")
        return urls[0] if running and urls else None

    def _port(self, url: str) -> None:
        answer = self._answer(url)
        try:
            said = json.loads(answer.text) if answer is not None and answer.status_code == 200 else {}
        except ValueError:
            said = {}
        found = "no answer" if answer is None else f"HTTP {answer.status_code}"
        self._note(
            "exposed port: answers with a token", bool(said), found, "the gateway refuses this token: see its role"
        )
        self._note("mount: the job reads the bucket", said.get("seen") == self.word, str(said.get("seen")))
        self._note(
            "secrets reach the job", said.get("secret") == self.word, "as set" if said.get("secret") else "missing"
        )
        open_to_all = httpx.get(url, timeout=10).status_code
        self._note("exposed port: refuses without a token", open_to_all in (401, 403), f"HTTP {open_to_all}")

    def _answer(self, url: str) -> httpx.Response | None:
        headers = {"Authorization": f"Bearer {self.hub.token}"}
        answer = None
        for _ in range(40):
            try:
                answer = httpx.get(url, headers=headers, timeout=10)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == 200:
                return answer
            time.sleep(0.5)
        return answer

    def _written_by_job(self) -> None:
        started = time.monotonic()
        key, expected = f"{self.folder}/from-job.txt", self.word[::-1]
        while self.store.committed_size(key) is None and time.monotonic() < started + 45:
            time.sleep(0.5)
        waited_s = time.monotonic() - started
        try:
            ok = self.store.read(key).decode() == expected
        except StoreError as error:
            self._note(
                "mount: the job's writes arrive", False, str(error), "the mount does not commit: try again later"
            )
            return
        self._note("mount: the job's writes arrive", ok, f"seen after {waited_s:.1f} s")

    def _note(self, name: str, ok: bool, found: str, fix: str | None = None) -> bool:
        self.results.append(Result(name, ok, found, None if ok else fix))
        return ok

    def _clean_up(self) -> None:
        for job in self.hub.active(run=RUN, incarnation=self.incarnation):
            self.hub.cancel(job.id)
        try:
            self.store.delete([entry.key for entry in self.store.list(f"{self.folder}/")])
        except StoreError as error:
            self.say(f"could not remove {self.folder}: {error}")


def run_preflight(
    run_file: Path | None, *, bucket: str | None, namespace: str | None, timeout: str, say: Callable[[str], None]
) -> list[Result]:
    """Check the account, and the run's own needs if a run file is given. Raises only for what is not a check."""
    results: list[Result] = []
    model = None
    if run_file is not None:
        from bucket_grpo.trainer.run_file import RunFile

        run = RunFile.load(run_file)
        bucket, model = bucket or run.bucket, run.model_name_or_path
    owner = namespace or (parse_bucket(bucket)[0] if bucket else own_namespace())
    where = bucket or f"{BUCKET_URL}{owner}/{DEFAULT_BUCKET}"
    hub = JobsHub(owner)
    results.append(Result("token", True, f"for {owner} at {os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}"))
    if model is not None:
        results.append(check_model(hub, model))
    return results + Preflight(hub, open_store(where), where, timeout, say).run()


def check_model(hub: JobsHub, model: str) -> Result:
    """Whether this token may read the model."""
    if model.startswith(("builtin:", "/", ".")):
        return Result("model access", True, f"{model} needs none")
    try:
        hub.api.model_info(model, timeout=20)
    except httpx.HTTPError as error:
        return Result("model access", False, f"{model}: {error}".splitlines()[0], "accept its terms on its page")
    return Result("model access", True, model)
