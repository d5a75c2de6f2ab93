"""The run file: TRL's own flat names, and our few blocks beside them. Strict, and readable without torch or TRL.

Precedence: flag > file > default. A key that nobody knows is an error that names file, line and the nearest key.
"""

import difflib
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from bucket_grpo.bucket_sync.vocabulary import check_run_name
from bucket_grpo.trainer.trl_fields import known
from bucket_grpo.trainer.yaml_lines import Lines, RunFileError, read_mapping

__all__ = ["Budget", "Jobs", "Retention", "RunFile", "RunFileError", "TrainerJobBlock", "VllmJobBlock"]

# Set by where the job runs, not by the run file.
PLACED_BY_US = {
    "output_dir": "the run's folder decides it",
    "vllm_server_base_url": "the proxy's address",
    "vllm_server_timeout": "follows from the jobs' time-outs",
}


DATA_SUFFIXES = (".jsonl", ".json", ".parquet")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TrainerJobBlock(Strict):
    """The trainer's job. `timeout` such as `4h` or `30m`; `secrets` names environment variables of the launcher."""

    flavor: str = "h200"
    timeout: str = "4h"
    accelerate: str | None = None
    image: str | None = None
    secrets: list[str] = Field(default_factory=list)
    pip: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)


class VllmJobBlock(Strict):
    """The vLLM jobs. `args` are vLLM's flags without dashes; the ones that bucket-grpo sets are refused."""

    flavor: str = "h200"
    replicas: int = Field(default=2, ge=1)
    timeout: str = "4h"
    image: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)


class Jobs(Strict):
    trainer: TrainerJobBlock = Field(default_factory=TrainerJobBlock)
    vllm: VllmJobBlock = Field(default_factory=VllmJobBlock)
    expected_hours: float | None = Field(default=None, gt=0)
    expected_hours_source: str | None = None


class Budget(Strict):
    max_usd: float | None = Field(default=None, gt=0)
    no_progress: str | None = None


class Retention(Strict):
    """Which versions stay in the bucket. By default all do: an audit needs those that it is asked about."""

    window: int | None = Field(default=None, ge=1)
    """Newest versions that stay; None keeps all."""
    every: int = Field(default=0, ge=0)
    """Beside them, every k-th version; 0: none."""
    dead_after_days: float = Field(default=7.0, gt=0)
    """Age after which an earlier incarnation's versions go."""


class RunFile(Strict):
    """One run. TRL's fields are in `trl`; everything else is a field of its own."""

    run_name: str
    model_name_or_path: str
    dataset_name: str
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    prompt_column: str = "prompt"
    """Text or chat messages."""
    gold_column: str | None = None
    """The answer that rewards compare with; a dot goes into a nested field. Default: the first of the usual names."""
    system_prompt: str | None = None
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Default: what the context (`max-model-len`) leaves beside `max_completion_length`."""
    unusable_rows: Literal["refuse", "drop"] = "refuse"
    """What becomes of rows whose prompt is too long or empty, or whose gold answer is missing or can't be parsed."""
    reward_funcs: list[str] = Field(min_length=1)
    reward_weights: list[float] | None = None
    reward_timeout_s: float = Field(default=60.0, gt=0)
    """For one group. A function that takes longer is stopped, and costs the group its reward."""
    max_failed_reward_frac: float = Field(default=0.1, ge=0, le=1)
    """Fraction of groups whose reward may hang or raise before the run stops."""
    reward_max_calls_per_s: float | None = Field(default=None, gt=0)
    """Rate limit for rewards that ask a service: groups per second, each function for itself."""
    lora_r: int = Field(default=1, ge=1)
    lora_alpha: int = Field(default=2, ge=1)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    lora_target_modules: str | list[str] = "all-linear"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    bucket: str | None = None
    jobs: Jobs = Field(default_factory=Jobs)
    budget: Budget = Field(default_factory=Budget)
    retention: Retention = Field(default_factory=Retention)
    journal_sample_frac: float = Field(default=0.02, ge=0, le=1)
    trl: dict[str, Any] = Field(default_factory=dict)

    @field_validator("run_name")
    @classmethod
    def _run_name(cls, value: str) -> str:
        return check_run_name(value)

    @field_validator("reward_funcs", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _weights_fit(self) -> "RunFile":
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries for {len(self.reward_funcs)} reward_funcs"
            )
        return self

    @classmethod
    def load(cls, path: Path, overrides: dict[str, Any] | None = None) -> "RunFile":
        """Read, check and complete a run file. `overrides` are flags: flat names, as in the file.

        Raises `RunFileError` with file, line and what to do.
        """
        value, lines = read_mapping(path)
        _place_files(value, path.resolve().parent)
        for name in overrides or {}:
            lines.pop((name,), None)
        value |= overrides or {}
        ours = set(cls.model_fields) - {"trl"}
        fields = known()
        inputs: dict[str, Any] = {"trl": {}}
        for name, given in value.items():
            where = _where(path, lines, (name,))
            if name in ours:
                inputs[name] = given
            elif name in PLACED_BY_US:
                raise RunFileError(f"{where}: {name} is not yours to set: {PLACED_BY_US[name]}")
            elif name in fields:
                inputs["trl"][name] = _fit(given, fields[name]["kinds"], f"{where}: {name}")
            else:
                raise RunFileError(f"{where}: unknown key {name!r}{_nearest(name, [*ours, *fields])}")
        try:
            return cls.model_validate(inputs)
        except ValidationError as error:
            raise RunFileError(_explain(path, lines, error)) from error

    @property
    def max_steps(self) -> int:
        return int(self._trl("max_steps"))

    @property
    def max_staleness(self) -> int:
        return int(self._trl("max_staleness"))

    @property
    def max_completion_length(self) -> int:
        return int(self._trl("max_completion_length"))

    @property
    def request_timeout(self) -> float:
        """Seconds after which TRL gives a completion up."""
        return float(self._trl("request_timeout"))

    @property
    def seed(self) -> int:
        return int(self._trl("seed"))

    @property
    def vllm_spec(self) -> dict[str, Any]:
        """The part of a replica's spec that comes from the run file."""
        args = {flag.lstrip("-").replace("_", "-"): value for flag, value in self.jobs.vllm.args.items()}
        spec: dict[str, Any] = {}
        if "max-model-len" in args:
            spec["max_model_len"] = args.pop("max-model-len")
        return {**spec, "extra_args": args}

    def trl_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `AsyncGRPOConfig`."""
        return {"run_name": self.run_name, "dtype": self.dtype, **self.trl}

    def lora_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `peft.LoraConfig`."""
        return {
            "r": self.lora_r,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "target_modules": self.lora_target_modules,
            "task_type": "CAUSAL_LM",
        }

    def dump(self) -> str:
        """The resolved file, as YAML that `load` reads again to the same run."""
        value = self.model_dump(mode="json", exclude={"trl"}) | self.trl
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)

    def _trl(self, name: str) -> Any:
        return self.trl.get(name, known()[name]["default"])


def _place_files(value: dict[str, Any], folder: Path) -> None:
    """Local files are looked for beside the run file, and known by their whole path from then on."""

    def placed(name: Any) -> Any:
        if not isinstance(name, str):
            return name
        file = name.partition(":")[0]
        local = name.startswith(("./", "../")) or file.endswith((".py", *DATA_SUFFIXES))
        return os.path.normpath(folder / Path(name).expanduser()) if local else name

    for key in ("model_name_or_path", "dataset_name"):
        if key in value:
            value[key] = placed(value[key])
    rewards = value.get("reward_funcs")
    if isinstance(rewards, list | str):
        value["reward_funcs"] = [placed(reward) for reward in ([rewards] if isinstance(rewards, str) else rewards)]


def _where(path: Path, lines: Lines, place: tuple[str, ...]) -> str:
    line = lines.get(place)
    return f"{path}:{line}" if line else str(path)


def _nearest(name: str, names: list[str]) -> str:
    found = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]}?" if found else ": neither one of TRL's AsyncGRPOConfig nor of ours"


def _fit(value: Any, kinds: list[str], what: str) -> Any:
    """`value` as one of `kinds`. YAML reads `4e-5` as a string and `1` as an integer: both may be meant as a float."""
    if isinstance(value, str) and "str" not in kinds and "float" in kinds:
        try:
            return float(value)
        except ValueError:
            pass
    kind = "null" if value is None else type(value).__name__
    if kind in kinds:
        return value
    if kind == "int" and "float" in kinds:
        return float(value)
    raise RunFileError(f"{what} is {value!r}, but should be {' or '.join(kinds)}")


def _explain(path: Path, lines: Lines, error: ValidationError) -> str:
    """The first problem in one line. A block's unknown key is named with the nearest one that the block has."""
    problem = error.errors()[0]
    place = tuple(str(part) for part in problem["loc"])
    name = ".".join(place)
    where = _where(path, lines, place)
    if problem["type"] == "missing":
        return f"{path}: {name} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key {name!r}{_nearest(place[-1], _names_in_block(place[:-1]))}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {name}: {message}" if name else f"{path}: {message}"


def _names_in_block(place: tuple[str, ...]) -> list[str]:
    model: type[BaseModel] = RunFile
    for name in place:
        inner = model.model_fields[name].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)
