"""`python -m bucket_grpo.inference` as a launcher sees it: one line and an exit status for whatever is wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
from replicas import Bucket, fake_command, replica_process, spec_for


def run(config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bucket_grpo.inference", "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_what_is_wrong_before_vllm_starts_is_one_line_and_status_2(tmp_path: Path) -> None:
    config = tmp_path / "agent.json"
    for change, words in (
        ({"model": str(tmp_path / "nowhere")}, "holds no config.json"),
        ({"model": "a/model", "host": "0.0.0.0"}, "set BUCKET_GRPO_TOKEN"),
        ({"model": "a/model", "max_lorass": 1}, "max_lorass"),
    ):
        config.write_text(json.dumps(spec_for(tmp_path, tmp_path, 8000, **change)))
        result = run(config)
        assert result.returncode == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_one_line_and_status_3(tmp_path: Path) -> None:
    config = tmp_path / "agent.json"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(json.dumps(spec_for(tmp_path, tmp_path, port, model="a/model")))
        result = run(config)
    assert result.returncode == 3
    assert f"127.0.0.1:{port}" in result.stderr


def test_sigterm_ends_it_with_status_0_and_everything_below_it(tmp_path: Path, bucket: Bucket, script: Path) -> None:
    with replica_process(tmp_path, bucket.root, model="a/model", vllm_command=fake_command(script)) as replica:
        replica.wait_for(lambda s: s["engine"] == "ready")
        below = psutil.Process(replica.pid).children(recursive=True)
        replica.terminate()
        assert replica.ended() == 0
    assert not [process for process in below if process.is_running()]


def test_a_killed_agent_takes_vllm_with_it(tmp_path: Path, bucket: Bucket, script: Path) -> None:
    with replica_process(tmp_path, bucket.root, model="a/model", vllm_command=fake_command(script)) as replica:
        replica.wait_for(lambda s: s["engine"] == "ready")
        vllm = psutil.Process(int((script / "pid").read_text()))
        os.kill(replica.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while vllm.is_running() and vllm.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "vLLM outlived its agent"
            time.sleep(0.1)
