import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bucket_grpo.cli import reading

sys.path.append(str(Path(__file__).parent.parent / "report"))
from run_folders import metrics_rows, write_lines, write_run


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    reading.register(app)
    return app


def last_line(output: str) -> dict:
    return json.loads(output.strip().splitlines()[-1])


def test_runs_are_compared_side_by_side_without_what_none_of_them_knows(app: typer.Typer, tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, steps=steps)) for name, steps in (("a", 100), ("b", 40))]
    result = CliRunner().invoke(app, ["report", *runs])

    assert result.exit_code == 0
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()}
    assert lines["steps"] == ["100", "40"]
    assert lines["routing.affinity"] == ["700", "700"]
    assert "cost_usd" not in lines


def test_a_report_as_json_is_one_object_on_the_last_line(app: typer.Typer, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    one = last_line(CliRunner().invoke(app, ["report", str(run), "--json"]).stdout)
    two = last_line(CliRunner().invoke(app, ["report", str(run), str(run), "--json"]).stdout)

    assert one["steps"] == 100
    assert two == {"runs": [one, one]}


def test_the_doctor_says_what_why_and_which_key(app: typer.Typer, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "run.yaml").write_text("queue_maxsize: 800\nweight_sync_steps: 4\n")
    text = CliRunner().invoke(app, ["doctor", str(run)]).stdout
    figures = last_line(CliRunner().invoke(app, ["doctor", str(run), "--json"]).stdout)

    assert text.startswith("generation-bound\n  because training waits for samples 0.05 of a step's 0.40 s")
    assert "the queue is empty: 100 of 800 samples" in text
    assert "change jobs.vllm.replicas to 3 → about" in text
    assert figures["verdict"] == "generation-bound"
    assert figures["findings"][0]["changes"][0]["key"] == "jobs.vllm.replicas"


def test_completions_are_shown_with_their_version_and_step_and_rewards_where_kept(
    app: typer.Typer, tmp_path: Path
) -> None:
    from bucket_grpo.report.completions import rollout_key

    write_lines(tmp_path / "metrics.jsonl", metrics_rows(4))  # step n was logged at 1000 + n
    samples = [([1, 2], [3], 1000.5, 1), ([1, 2], [4, 5], 1002.5, 1), ([7], [8], 1003.0, 2), ([7], [9], 1009.0, 2)]
    (tmp_path / "journal").mkdir()
    write_lines(
        tmp_path / "journal" / "journal-1.jsonl",
        [
            {
                "id": f"r{i}", "t": t, "requested": f"trl-policy-v{version}", "served": "…", "number": version,
                "replica": "vllm-0", "finish_reason": "stop",
                "sample": {"prompt": prompt, "output": output, "logprobs": [-0.5] * len(output)},
            }
            for i, (prompt, output, t, version) in enumerate(samples)
        ],
    )  # fmt: skip
    rewards = {0: 0.0, 1: 1.0, 2: 0.5}
    write_lines(
        tmp_path / "rollouts.jsonl",
        [{"key": rollout_key(*samples[i][:2]), "reward": reward} for i, reward in rewards.items()],
    )

    def ids(*options: str) -> list[str]:
        result = CliRunner().invoke(app, ["completions", str(tmp_path), "--json", *options])
        return [c["id"] for c in last_line(result.stdout)["completions"]]

    assert ids() == ["r0", "r1", "r2", "r3"]
    assert ids("--sort", "reward") == ["r1", "r2", "r0", "r3"]
    assert ids("--sort", "length", "--limit", "1") == ["r1"]
    assert ids("--version", "2") == ["r2", "r3"]
    assert ids("--step", "3") == ["r1", "r2"]
    assert ids("--step", "5") == []
    text = CliRunner().invoke(app, ["completions", str(tmp_path)]).stdout
    assert "version 1 · vllm-0 · step 3 · reward 1 · 2 tokens · stop\n1 2\n4 5\n" in text
    assert "4 of 4 sampled completions" in text
    assert "rewards are unknown" not in text


def test_the_same_answer_to_another_prompt_is_another_completion() -> None:
    from bucket_grpo.report.completions import rollout_key

    assert rollout_key([1, 2], [3]) == rollout_key((1, 2), (3,))
    assert len({rollout_key(*key) for key in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3], []], [[2, 1], [3]])}) == 4
