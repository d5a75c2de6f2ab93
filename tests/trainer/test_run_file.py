"""A run file means what it says, and a mistake in it is shown where it stands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bucket_grpo.trainer import trl_fields
from bucket_grpo.trainer.run_file import RunFile, RunFileError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))

MINIMAL = """\
run_name: mine
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: me/problems
reward_funcs: bucket_grpo.trainer.rewards:boxed_math
"""


def load(folder: Path, text: str, overrides: dict[str, Any] | None = None) -> RunFile:
    path = folder / "run.yaml"
    path.write_text(text)
    return RunFile.load(path, overrides)


def test_what_is_not_said_has_our_default_or_trls(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL)
    assert (run.lora_r, run.lora_target_modules, run.reward_funcs) == (
        1,
        "all-linear",
        ["bucket_grpo.trainer.rewards:boxed_math"],
    )
    assert (run.max_steps, run.max_staleness, run.max_completion_length, run.seed) == (-1, 4, 2048, 42)
    assert run.trl_arguments() == {"run_name": "mine", "dtype": "bfloat16"}


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL + "max_steps: 100\nmax_staleness: 2\n", {"max_steps": 7, "lora_r": 4})
    assert (run.max_steps, run.max_staleness, run.lora_r) == (7, 2, 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_step: 5", r"run\.yaml:5: unknown key 'max_step'; did you mean max_steps\?"),
        ("weight_sync_step: 5", r"run\.yaml:5: .*weight_sync_steps"),
        ("lora_alpa: 5", r"run\.yaml:5: .*did you mean lora_alpha\?"),
        ("qqqqqqqq: 1", r"run\.yaml:5: unknown key 'qqqqqqqq': neither one of TRL's AsyncGRPOConfig nor of ours"),
        ("jobs:\n  vllm:\n    replica: 2", r"run\.yaml:7: unknown key 'jobs\.vllm\.replica'; did you mean replicas\?"),
        ("jobs:\n  vllm: {replicas: 0}", r"run\.yaml:6: jobs\.vllm\.replicas: .*greater than or equal to 1"),
        ("max_steps: many", r"run\.yaml:5: max_steps is 'many', but should be int"),
        ("max_steps: 1.5", r"run\.yaml:5: max_steps is 1\.5, but should be int"),
        ("bf16: 1", r"run\.yaml:5: bf16 is 1, but should be bool"),
        ("learning_rate: fast", r"run\.yaml:5: learning_rate is 'fast', but should be"),
        ("max_steps: 1\nmax_steps: 2", r"run\.yaml:6: max_steps stands here a second time; first in line 5"),
        ("output_dir: /data", r"run\.yaml:5: output_dir is not yours to set: the run's folder"),
        ("reward_weights: [1, 2]", r"run\.yaml: reward_weights has 2 entries for 1 reward_funcs"),
        ("dtype: float8", r"run\.yaml:5: dtype: "),
        ("max_steps: [1", r"run\.yaml:\d: not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RunFileError, match=says) as error:
        load(tmp_path, MINIMAL + text + "\n")
    assert "\n" not in str(error.value)


def test_a_mistake_in_a_flag_is_not_blamed_on_a_line_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"run\.yaml: max_steps is 'x'"):
        load(tmp_path, MINIMAL + "max_steps: 3\n", {"max_steps": "x"})


@pytest.mark.parametrize("missing", ["run_name", "model_name_or_path", "dataset_name", "reward_funcs"])
def test_what_every_run_needs_is_asked_for(tmp_path: Path, missing: str) -> None:
    lines = [line for line in MINIMAL.splitlines() if not line.startswith(missing)]
    with pytest.raises(RunFileError, match=f"{missing} is missing"):
        load(tmp_path, "\n".join(lines))


def test_a_file_that_is_not_there_or_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"nothing\.yaml: cannot be read: No such file"):
        RunFile.load(tmp_path / "nothing.yaml")
    with pytest.raises(RunFileError, match="a run file is a mapping"):
        load(tmp_path, "- a\n- b\n")


def test_a_run_name_is_one_that_the_bucket_can_hold(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"run\.yaml:1: run_name: .*lower-case"):
        load(tmp_path, MINIMAL.replace("mine", "My Run"))


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    """YAML takes `4e-5` for a string and `1` for an integer."""
    run = load(tmp_path, MINIMAL + "learning_rate: 4e-5\ntemperature: 1\nlora_alpha: 8\n")
    assert run.trl["learning_rate"] == 4e-5
    assert isinstance(run.trl["temperature"], float)


def test_files_are_looked_for_beside_the_run_file(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL.replace("me/problems", "data.jsonl").replace("bucket_grpo.trainer.rewards", "../r.py"))
    assert run.dataset_name == str(tmp_path / "data.jsonl")
    assert run.reward_funcs == [f"{tmp_path.parent / 'r.py'}:boxed_math"]
    assert run.model_name_or_path == "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_resolved_file_reads_back_as_the_same_run(recipe: Path, tmp_path: Path) -> None:
    run = RunFile.load(recipe)
    assert load(tmp_path, run.dump()) == run


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_a_config_that_trl_takes(recipe: Path, tmp_path: Path) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    given = RunFile.load(recipe).trl_arguments()
    on_this_machine = {} if given.get("use_cpu") else {"use_cpu": True, "bf16": False}
    config = AsyncGRPOConfig(**{**given, **on_this_machine}, output_dir=str(tmp_path))
    ours = {name: value for name, value in given.items() if name not in {"report_to", "bf16", "use_cpu"}}
    assert {name: getattr(config, name) for name in ours} == ours


def test_the_demo_trains_in_float32_on_the_cpu_64_samples_a_step() -> None:
    run = RunFile.load(next(path for path in RECIPES if path.stem == "tiny-addition"))
    assert (run.dtype, run.trl["bf16"], run.trl["use_cpu"]) == ("float32", False, True)
    samples = run.trl["per_device_train_batch_size"] * run.trl["gradient_accumulation_steps"]
    assert (run.max_steps, samples, run.trl["num_generations"], run.trl["token_budget"]) == (200, 64, 8, 0)
    assert (run.trl["weight_sync_steps"], run.max_staleness) == (4, 4)


def test_a_run_file_is_read_without_torch() -> None:
    """A laptop that only launches and watches has none."""
    program = (
        "import sys; from pathlib import Path; from bucket_grpo.trainer.run_file import RunFile;"
        f"RunFile.load(Path({str(RECIPES[0])!r}));"
        "print([m for m in ('torch', 'trl', 'transformers', 'datasets', 'peft') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_fields_written_down_are_those_of_the_installed_trl() -> None:
    assert trl_fields.known() == json.loads(json.dumps(trl_fields.of_installed_trl()))
