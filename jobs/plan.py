"""From a run file to the jobs that it needs, their requests, and what they cost. Pure: nothing asks the network."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict

from bucket_grpo.bucket_sync.vocabulary import check_run_name
from bucket_grpo.jobs.hardware import Prices, job_usd_per_hour
from bucket_grpo.jobs.labels import LAUNCHER, TRAINER, VLLM, JobName
from bucket_grpo.jobs.request import BucketVolume, JobRequest
from bucket_grpo.jobs.settings import Budget, JobSettings, seconds
from bucket_grpo.jobs.vram import VramEstimate, replica_vram, shape_of, trainer_vram

if TYPE_CHECKING:
    from bucket_grpo.trainer.run_file import RunFile

MOUNT = "/lora"
PORT = 8000
TOKEN_SECRETS = ("HF_TOKEN", "BUCKET_GRPO_TOKEN")
BUCKET_URL = "hf://buckets/"

# The image's entrypoint is ignored, so the command brings its own start. pip runs only where the image does not hold
# the package already: an image made for this run, or the emulated Hub.
BOOTSTRAP = (
    "set -e; python3 -c 'import bucket_grpo.jobs' 2>/dev/null || "
    'python3 -m pip install -q --no-input --find-links "$BUCKET_GRPO_WHEELS" $BUCKET_GRPO_PIP; '
    'exec python3 -m bucket_grpo.jobs.inside "$@"'
)
LAUNCHER_IMAGE, LAUNCHER_FLAVOR, LAUNCHER_TIMEOUT = "python:3.12", "cpu-basic", "15m"
TRAINER_PINS = ("trl==1.16.0", "peft==0.21.2")


class RunNeeds(BaseModel):
    """The part of a run file that decides about jobs. Made from the run file itself by `needs_of`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_name: str
    bucket: str
    model: str
    dtype: str
    lora_r: int
    max_staleness: int
    max_steps: int | None = None
    tokens_per_microbatch: int = 16384
    gradient_checkpointing: bool = False
    max_model_len: int | None = None
    jobs: JobSettings = JobSettings()
    budget: Budget = Budget()


def needs_of(
    run_file: "RunFile",
    *,
    bucket: str,
    network: str | None = None,
    schedule_timeout: str | None = None,
    alert: str | None = None,
) -> RunNeeds:
    """What a run file says about jobs. `bucket` is where it was decided to put things; the others are flags."""
    trl = run_file.trl_arguments()
    jobs = job_settings(run_file.jobs.model_dump(exclude_none=True), network, schedule_timeout)
    length = jobs.vllm.args.get("max-model-len", jobs.vllm.args.get("max_model_len"))
    return RunNeeds(
        run_name=run_file.run_name,
        bucket=bucket,
        model=run_file.model_name_or_path,
        dtype=run_file.dtype,
        lora_r=run_file.lora_r,
        max_staleness=run_file.max_staleness,
        max_steps=run_file.max_steps,
        tokens_per_microbatch=trl.get("token_budget") or length or 16384,
        gradient_checkpointing=bool(trl.get("gradient_checkpointing")),
        max_model_len=length,
        jobs=jobs,
        budget=Budget.model_validate(run_file.budget.model_dump() | ({"alert": alert} if alert else {})),
    )


def job_settings(block: dict[str, Any], network: str | None, schedule_timeout: str | None) -> JobSettings:
    """The run file's block `jobs`, with its expectation as one thing, and the flags."""
    hours, source = block.pop("expected_hours", None), block.pop("expected_hours_source", None)
    if hours is not None:
        block["expected"] = {"hours": hours, "source": source or "the run file"}
    flags = {"network": network, "schedule_timeout": schedule_timeout}
    return JobSettings.model_validate(block | {name: value for name, value in flags.items() if value is not None})


def parse_bucket(url: str) -> tuple[str, str]:
    """`(namespace, name)` of `hf://buckets/<namespace>/<name>`; `ValueError` for anything else."""
    namespace, slash, name = url.removeprefix(BUCKET_URL).partition("/")
    if not url.startswith(BUCKET_URL) or not namespace or not slash or not name or "/" in name:
        raise ValueError(f"bucket {url!r} is not of the form {BUCKET_URL}<namespace>/<name>")
    return namespace, name


@dataclass(frozen=True)
class Plan:
    """One incarnation of a run: which jobs it has, and what is left in the bucket for them.

    Everything in it goes to the bucket as `<run>/<incarnation>/launch/plan.json`, so that any machine, and the trainer
    job itself, can post a lost job again, add replicas or resume.
    """

    needs: RunNeeds
    incarnation: str
    namespace: str
    package_version: str
    replicas: int
    script: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    """What the run file calls a local file → its name under `launch/files/`."""
    resumes: str | None = None
    """The incarnation whose newest checkpoint this one goes on from."""

    @classmethod
    def of(cls, needs: RunNeeds, incarnation: str, package_version: str, **more: Any) -> Self:
        if "." in check_run_name(needs.run_name):
            raise ValueError(f"run name {needs.run_name!r} cannot be a job's label: use '-' or '_' instead of '.'")
        namespace, _ = parse_bucket(needs.bucket)
        more.setdefault("replicas", needs.jobs.vllm.replicas)
        return cls(needs, incarnation, more.pop("namespace", None) or namespace, package_version, **more)

    @property
    def run(self) -> str:
        return self.needs.run_name

    @property
    def bucket_id(self) -> str:
        return "/".join(parse_bucket(self.needs.bucket))

    @property
    def launch_folder(self) -> str:
        return f"{self.run}/{self.incarnation}/launch/"

    def dump(self) -> bytes:
        state = {name: getattr(self, name) for name in ("incarnation", "namespace", "package_version", "replicas")}
        state |= {
            "script": self.script,
            "files": self.files,
            "resumes": self.resumes,
            "needs": self.needs.model_dump(mode="json"),
        }
        return json.dumps(state, indent=1).encode()

    @classmethod
    def load(cls, data: bytes) -> Self:
        state = json.loads(data)
        return cls(RunNeeds.model_validate(state.pop("needs")), **state)

    def requests(self) -> list[JobRequest]:
        """Every job, in the order in which they are posted: replicas take longest to start, and come first."""
        return [*(self.replica(index) for index in range(self.replicas)), self.trainer()]

    def replica(self, index: int) -> JobRequest:
        settings = self.needs.jobs.vllm
        part = f"vllm-{index}"
        private = self.needs.jobs.network == "private"
        return JobRequest(
            self.namespace,
            JobName(self.run, self.incarnation, VLLM, part),
            settings.image,
            self._command("replica", part),
            settings.flavor,
            settings.timeout,
            env={**settings.env, **self._environment(f"bucket-grpo[inference]=={self.package_version}", settings.pip)},
            secret_names=TOKEN_SECRETS,
            volumes=(BucketVolume(self.bucket_id, MOUNT, read_only=True),),
            expose=() if private else (PORT,),
            network_group=self._network_group,
            network_aliases=(part,) if private else (),
        )

    def trainer(self) -> JobRequest:
        settings = self.needs.jobs.trainer
        pip = [*TRAINER_PINS, *settings.pip]
        return JobRequest(
            self.namespace,
            JobName(self.run, self.incarnation, TRAINER, TRAINER),
            settings.image,
            self._command("trainer", TRAINER),
            settings.flavor,
            settings.timeout,
            env={**settings.env, **self._environment(f"bucket-grpo[trainer]=={self.package_version}", pip)},
            secret_names=(*TOKEN_SECRETS, *settings.secrets),
            volumes=(BucketVolume(self.bucket_id, MOUNT, read_only=False),),
            network_group=self._network_group,
        )

    def launcher(self) -> JobRequest:
        """A small job that starts this plan anew, as a new incarnation: what a schedule repeats."""
        return JobRequest(
            self.namespace,
            JobName(self.run, self.incarnation, LAUNCHER, LAUNCHER),
            LAUNCHER_IMAGE,
            self._command("launcher", LAUNCHER),
            LAUNCHER_FLAVOR,
            LAUNCHER_TIMEOUT,
            env=self._environment(f"bucket-grpo=={self.package_version}", []),
            secret_names=("HF_TOKEN", *self.needs.jobs.trainer.secrets),
            volumes=(BucketVolume(self.bucket_id, MOUNT, read_only=True),),
        )

    @property
    def _network_group(self) -> str | None:
        return f"bg-{self.incarnation}" if self.needs.jobs.network == "private" else None

    def _command(self, role: str, part: str) -> list[str]:
        arguments = ["--mount", MOUNT, "--port", str(PORT), "--run", self.run, "--incarnation", self.incarnation]
        return ["bash", "-c", BOOTSTRAP, "bucket-grpo", role, *arguments, "--part", part]

    def _environment(self, package: str, pip: list[str]) -> dict[str, str]:
        return {
            "BUCKET_GRPO_WHEELS": f"{MOUNT}/{self.launch_folder}wheels",
            "BUCKET_GRPO_PIP": " ".join([package, *pip]),
            "BUCKET_GRPO_BUCKET": self.needs.bucket,
            "PYTHONUNBUFFERED": "1",
        }

    def agent_spec(self, part: str, mount: Path, port: int, scratch: Path, *, gpu: bool) -> dict[str, Any]:
        """The agent's configuration inside its job, where the bucket is mounted at `mount`."""
        args = {key.replace("_", "-"): value for key, value in self.needs.jobs.vllm.args.items()}
        spec: dict[str, Any] = {
            "replica": part,
            "host": "0.0.0.0",
            "port": port,
            "model": self.needs.model,
            "served_model_name": self.needs.model,
            "dtype": self.needs.dtype,
            "device": "cuda" if gpu else "cpu",
            "run": self.run,
            "bucket": str(mount),
            "bucket_fallback": self.needs.bucket,
            # A trainer that is still waiting for its machine has no heartbeat yet.
            "run_dead_after_s": seconds(self.needs.jobs.schedule_timeout) + 300,
            "staging_dir": str(scratch / "staging"),
            "log_dir": str(scratch / "logs"),
            "max_lora_rank": self.needs.lora_r,
            "max_loras": self.needs.max_staleness + 2,
            "max_model_len": args.pop("max-model-len", None),
            "extra_args": args,
        }
        return {key: value for key, value in spec.items() if value is not None}


@dataclass(frozen=True)
class Cost:
    """What a plan costs while it runs, and in all where the run file says how long it takes."""

    usd_per_hour: float
    usd: float | None
    source: str

    @classmethod
    def of(cls, plan: Plan, prices: Prices) -> Self:
        """Raises `UnknownFlavor`."""
        per_hour = sum(
            job_usd_per_hour(prices.flavor(request.flavor), bool(request.expose)) for request in plan.requests()
        )
        expected = plan.needs.jobs.expected
        if expected is None:
            return cls(round(per_hour, 2), None, f"prices: {prices.source}; the run file states no jobs.expected.hours")
        usd = round(per_hour * expected.hours, 2)
        source = f"{expected.hours:g} h ({expected.source}) at ${per_hour:.2f}/h ({prices.source})"
        return cls(round(per_hour, 2), usd, source)


def vram(plan: Plan, prices: Prices) -> dict[str, VramEstimate | None]:
    """The estimate for each role; None on a CPU flavor or for a model whose shape is not known by name."""
    needs = plan.needs
    shape = shape_of(needs.model)
    replica, trainer = prices.flavor(needs.jobs.vllm.flavor), prices.flavor(needs.jobs.trainer.flavor)
    if shape is None:
        return {VLLM: None, TRAINER: None}
    return {
        VLLM: replica_vram(shape, replica, needs.dtype, needs.max_model_len or 4096) if replica.gpus else None,
        TRAINER: trainer_vram(shape, trainer, needs.dtype, needs.tokens_per_microbatch, needs.gradient_checkpointing)
        if trainer.gpus
        else None,
    }


def dry_run(plan: Plan, prices: Prices) -> dict[str, Any]:
    """What `launch --dry-run --json` prints."""
    cost = Cost.of(plan, prices)
    return {
        "run": plan.run,
        "incarnation": plan.incarnation,
        "bucket": plan.needs.bucket,
        "requests": [request.shown() for request in plan.requests()],
        "cost_usd_per_hour": cost.usd_per_hour,
        "cost_usd": cost.usd,
        "cost_source": cost.source,
        "vram": {role: estimate and estimate.as_json() for role, estimate in vram(plan, prices).items()},
        "longest_s": max(request.timeout_s for request in plan.requests()),
        "most_usd": round(
            sum(
                job_usd_per_hour(prices.flavor(r.flavor), bool(r.expose)) * r.timeout_s / 3600 for r in plan.requests()
            ),
            2,
        ),
    }
