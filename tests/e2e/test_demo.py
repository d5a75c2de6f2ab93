"""The main job for real, in small: TRL, two vLLM replicas, a FUSE mount each, the proxy, and the audit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leftovers import assert_nothing_left

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

DEMO = [sys.executable, "-m", "bucket_grpo.cli.main", "demo"]


def start_demo(run_dir: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DEMO, "--run-dir", str(run_dir), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until(path: Path, text: str, seconds: float = 180) -> None:
    """Until the file at `path` holds `text`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.3)
    pytest.fail(f"{path} did not show {text!r} within {seconds:.0f} s")


def test_a_run_trains_through_the_bucket_and_every_sampled_answer_is_from_the_version_it_names(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    demo = start_demo(run_dir, "--steps", "40", "--json")
    out, err = demo.communicate(timeout=400)
    assert demo.returncode == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report["steps"] == 40
    assert report["exit_reason"] == "finished"
    assert report["publishes"] >= 8
    assert report["load_failures"] == 0
    assert report["routing"]["failed"] == 0
    assert report["wrong_policy_samples"] == 0
    assert report["audited_samples"] >= 40
    assert report["reward_last20"] > report["reward_first20"]
    assert report["dropped_stale_frac"] <= 0.05
    assert {replica["engine"] for replica in json.loads((run_dir / "proxy_status.json").read_text())["replicas"]} == {
        "ready"
    }
    for name in ("report.json", "report.html", "reward.png", "metrics.jsonl", "run.yaml"):
        assert (run_dir / name).stat().st_size > 0
    assert_nothing_left(run_dir)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_in_the_middle_leaves_nothing_running_or_mounted(tmp_path: Path, how: int) -> None:
    run_dir = tmp_path / "run"
    demo = start_demo(run_dir, "--steps", "400", "--replicas", "1")
    try:
        wait_until(run_dir / "metrics.jsonl", '"step": 2,')
        demo.send_signal(how)
        demo.communicate(timeout=60)
        assert demo.returncode == (130 if how == signal.SIGINT else -how)
        assert_nothing_left(run_dir, within_s=60)
    finally:
        demo.kill()


@pytest.mark.parametrize(
    ("lied_about", "said"),
    [
        (".", "LoRA has no effect"),  # of the probe already
        (r"-v\d+$", "canary"),  # only of versions: v1 equals the base, so v2 shows it
    ],
)
def test_a_fleet_that_serves_the_base_model_under_a_versions_name_stops_the_run(
    tmp_path: Path, lied_about: str, said: str
) -> None:
    run_dir = tmp_path / "run"
    program = (
        "import sys; from pathlib import Path; from bucket_grpo.cli.demo import DemoOptions, run_demo\n"
        "sys.exit(run_demo(DemoOptions(run_dir=Path(sys.argv[1]), replicas=1, overrides={'max_steps': 60},"
        " vllm_command=[sys.executable, sys.argv[2]])))\n"
    )
    liar = Path(__file__).parents[1] / "inference" / "base_liar.py"
    (tmp_path / "names").write_text(lied_about)
    result = subprocess.run(
        [sys.executable, "-c", program, str(run_dir), str(liar)],
        env={**os.environ, "BASE_LIAR": str(tmp_path / "names")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1
    last = result.stdout.strip().splitlines()[-1]
    assert "failed on every replica" in last
    assert said in last
    assert_nothing_left(run_dir)
