"""What goes into the jobs and what comes out: the wheel, the user's files, checkpoints, logs."""

import base64
import hashlib
import io
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bucket_grpo.bucket_sync.current import claim
from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.jobs.at_home import keep_logs
from bucket_grpo.jobs.checkpoint_carrier import SETTLED_S, CheckpointCarrier, bring_back
from bucket_grpo.jobs.log_copy import LogCopy
from bucket_grpo.jobs.plan import Plan
from bucket_grpo.jobs.travel import local_files, pack, read_plan, unpack
from bucket_grpo.jobs.wheel import build_wheel, wheel_name


def test_the_wheel_is_this_code_and_every_file_in_it_is_recorded() -> None:
    data = build_wheel()
    assert data == build_wheel()
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        names = wheel.namelist()
        here = Path(__file__).parents[2] / "jobs" / "inside.py"
        assert wheel.read("bucket_grpo/jobs/inside.py") == here.read_bytes()
        assert "bucket_grpo/trainer/trl_fields.json" in names
        assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]
        record = wheel.read(next(name for name in names if name.endswith("RECORD"))).decode()
        for line in record.splitlines():
            name, digest, size = line.rsplit(",", 2)
            if digest:
                content = wheel.read(name)
                expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                assert (digest, int(size)) == (f"sha256={expected}", len(content))
        assert {line.split(",")[0] for line in record.splitlines()} == set(names)


def test_the_users_files_are_where_the_run_file_says_once_they_are_in_the_job(plan: Plan, tmp_path: Path) -> None:
    home, bucket = tmp_path / "home", tmp_path / "bucket"
    home.mkdir()
    bucket.mkdir()
    (home / "mine.py").write_text("def brevity(completions, **_): return [0.0]")
    (home / "data.jsonl").write_text('{"prompt": "x"}')
    run = {"run_name": "r1", "dataset_name": "data.jsonl", "reward_funcs": ["a.b:c", "./mine.py:brevity"]}
    files = local_files(run["reward_funcs"], "data.jsonl", home)  # type: ignore[arg-type]
    plan = replace(plan, files={name: path.name for name, path in files.items()})
    store = open_store(bucket)
    for key, data in pack(plan, yaml.safe_dump(run), files).items():
        store.write_once(key, data)

    seen = read_plan(store, plan.run, plan.incarnation)
    assert seen == plan
    moved = yaml.safe_load(unpack(store, seen, tmp_path / "scratch").read_text())
    reward, function = moved["reward_funcs"][1].split(":")
    assert moved["reward_funcs"][0] == "a.b:c"
    assert function == "brevity"
    assert Path(reward).read_text() == (home / "mine.py").read_text()
    assert Path(moved["dataset_name"]).read_text() == '{"prompt": "x"}'
    assert (bucket / plan.launch_folder / "wheels" / wheel_name()).exists()


@pytest.fixture
def carrier(plan: Plan, tmp_path: Path) -> CheckpointCarrier:
    (tmp_path / "bucket").mkdir()
    store = open_store(tmp_path / "bucket")
    claim(store, plan.run, plan.incarnation)
    return CheckpointCarrier(store, plan.run, plan.incarnation, tmp_path / "run" / "trl")


def write_checkpoint(tmp_path: Path, step: int, *, complete: bool = True, age_s: float = 2 * SETTLED_S) -> None:
    folder = tmp_path / "run" / "trl" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights of %d" % step)
    if complete:
        (folder / "trainer_state.json").write_text("{}")
    for path in folder.iterdir():
        written = path.stat().st_mtime - age_s
        os.utime(path, (written, written))


def test_only_checkpoints_that_nobody_writes_any_more_are_taken(carrier: CheckpointCarrier, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 20, complete=False)
    write_checkpoint(tmp_path, 30, age_s=0)
    carrier.look()
    assert carrier.close() == [10]


def test_when_training_is_over_the_newest_complete_one_is_taken(
    carrier: CheckpointCarrier, plan: Plan, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 30, age_s=0)
    write_checkpoint(tmp_path, 40, complete=False, age_s=0)
    carrier.look(ended=True)
    assert carrier.close() == [30]
    back = bring_back(open_store(tmp_path / "bucket"), plan.run, tmp_path / "back")
    assert back is not None
    assert (back / "adapter_model.safetensors").read_bytes() == b"weights of 30"


def test_a_run_without_checkpoints_starts_anew(plan: Plan, tmp_path: Path) -> None:
    assert bring_back(open_store(tmp_path), plan.run, tmp_path / "back") is None


def test_a_log_is_copied_line_by_whole_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, copy = tmp_path / "a.log", LogCopy()
    copy.copy([path])
    path.write_text("one\ntw")
    copy.copy([path])
    assert capsys.readouterr().out == "one\n"
    with path.open("a") as file:
        file.write("o\n")
    copy.copy([path])
    assert capsys.readouterr().out == "two\n"


def test_of_a_local_hub_the_jobs_logs_stay_and_its_tokens_go(tmp_path: Path) -> None:
    for job, part in (("a", "vllm-0"), ("b", "vllm-0"), ("c", "trainer")):
        folder = tmp_path / "hub" / "jobs" / job
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps({"spec": {"labels": {"part": part}}}))
        (folder / "log.txt").write_text(f"{job}\n")
    (tmp_path / "hub" / "tokens.json").write_text("{}")
    keep_logs(tmp_path / "hub", tmp_path / "logs")
    kept = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert kept == {"job-vllm-0.log": "a\nb\n", "job-trainer.log": "c\n"}
    assert not (tmp_path / "hub").exists()
