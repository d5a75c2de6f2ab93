"""The canary tells a right answer from a wrong one, the probe tells a working LoRA from none; both say numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
from replicas import write_adapter
from safetensors.numpy import load_file

from bucket_grpo.bucket_sync.version_file import Canary
from bucket_grpo.inference.canary import judge_canary, judge_probe, tolerance
from bucket_grpo.inference.probe import write_probe

CANARY = Canary(prompt=[1, 2, 3], logprobs=[-1.0, -2.0], dtype="float32")


def test_an_equal_answer_passes() -> None:
    assert judge_canary(CANARY, [-1.0000005, -2.0], 1e-3).ok


def test_another_answer_fails_with_the_numbers() -> None:
    verdict = judge_canary(CANARY, [-1.0, -2.5], 1e-3)
    assert not verdict.ok
    for number in ("up to 0.5", "allowed 0.001", "token 2", "-2.5000", "-2.0000"):
        assert number in (verdict.reason or "")


@pytest.mark.parametrize("served", [[-1.0], [-1.0, float("nan")], [-1.0, float("-inf")], []])
def test_an_answer_that_is_no_answer_fails(served: list[float]) -> None:
    assert not judge_canary(CANARY, served, 1e9).ok


def test_the_tolerance_is_that_of_the_coarser_side() -> None:
    exact = tolerance("float32", "float32", "cpu")
    assert exact < tolerance("float32", "bfloat16", "cpu") == tolerance("bfloat16", "float32", "cpu")
    assert exact < tolerance("float32", "float32", "cuda")
    assert tolerance("float32", "bfloat16", "cuda", override=0.5) == 0.5


def test_a_probe_that_changes_nothing_fails() -> None:
    verdict = judge_probe([-1.0, -2.0], [-1.0, -2.0], "float32")
    assert "LoRA has no effect" in (verdict.reason or "")
    assert judge_probe([-1.0, -2.0], [-1.5, -2.0], "float32").ok


def test_a_probe_that_breaks_the_engine_fails() -> None:
    assert "not finite" in (judge_probe([-1.0], [float("nan")], "bfloat16").reason or "")


def test_the_probe_has_the_shape_of_the_version_and_large_random_weights(tmp_path: Path) -> None:
    version = write_adapter(tmp_path / "version")
    probe = write_probe(version, tmp_path / "probe")
    given = load_file(version / "adapter_model.safetensors")
    made = load_file(probe / "adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in made.items()} == {n: t.shape for n, t in given.items()}
    for name, tensor in made.items():
        assert np.isfinite(tensor).all()
        size = np.linalg.norm(tensor) / np.sqrt(tensor.size)
        fan_in = tensor.shape[1]
        assert size == pytest.approx(1 / np.sqrt(fan_in) if ".lora_A." in name else 1.0, rel=0.8)
    config = json.loads((probe / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] == 1
