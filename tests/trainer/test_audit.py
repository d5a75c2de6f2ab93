import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.bucket_sync.version_file import pack_version
from bucket_grpo.bucket_sync.vocabulary import served_name
from bucket_grpo.trainer.audit import AuditResult, audit_folder, audit_run

RUN, INCARNATION = "audited", "20261130t154500z-a1b2c3"
VERSIONS = (1, 2, 3, 5)  # 4 was overtaken, so it was never published
SAMPLES_PER_VERSION = 6


@dataclass(eq=False)
class Fleet:
    """A base, some published versions of it, and what each of them says of a completion."""

    base: Path
    bucket: Path
    adapters: dict[int, Path]

    @cache  # noqa: B019 - lives as long as the module's fixture
    def policy(self, version: int | None) -> torch.nn.Module:
        """A model loaded for this version alone; `None` is the base."""
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()
        return model if version is None else PeftModel.from_pretrained(model, self.adapters[version]).eval()

    def logprobs(self, version: int | None, prompt: list[int], output: list[int]) -> list[float]:
        """One sample at a time, so without padding."""
        with torch.inference_mode():
            logits = self.policy(version)(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Versions that differ little from one to the next, as after a few optimizer steps. The first equals the base."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with so small a model, threads only wait for each other
    root = tmp_path_factory.mktemp("fleet")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(root / "base")
    bucket = root / "bucket"
    bucket.mkdir()
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=1, lora_alpha=8, target_modules="all-linear"))
    adapters = {}
    for number in range(1, max(VERSIONS) + 1):
        adapters[number] = root / f"adapter-{number}"
        model.save_pretrained(adapters[number])
        if number in VERSIONS:
            data, ref = pack_version(
                adapters[number], run=RUN, incarnation=INCARNATION, number=number, step=4 * number,
                base_model=str(root / "base"),
            )  # fmt: skip
            open_store(bucket).write_once(ref.key, data)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter += 0.02 * torch.randn_like(parameter)
    yield Fleet(root / "base", bucket, adapters)
    torch.set_num_threads(threads)


def journal(run_dir: Path, fleet: Fleet, answered_by: Callable[[int], int | None], extra: str = "") -> Path:
    """A run whose journal says that each version answered some prompts, while `answered_by(version)` really did."""
    torch.manual_seed(1)
    lines = []
    for number in VERSIONS:
        for i in range(SAMPLES_PER_VERSION):
            prompt = torch.randint(50, (3 + i,)).tolist()
            output = torch.randint(50, (2 + i % 4,)).tolist()
            logprobs = fleet.logprobs(answered_by(number), prompt, output)
            lines.append(
                {
                    "id": f"{number}-{i}", "t": 0.0, "requested": f"trl-policy-v{number}",
                    "served": served_name(RUN, INCARNATION, number), "number": number, "replica": "vllm-0",
                    "sample": {"prompt": prompt, "output": output, "logprobs": logprobs},
                }
            )  # fmt: skip
            lines.append({"id": f"{number}-{i}-unsampled", "served": "…", "requested": "…"})
    (run_dir / "journal").mkdir(parents=True)
    path = run_dir / "journal" / "journal-1-20261130t154500z.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + extra)
    return run_dir


def audit(run_dir: Path, fleet: Fleet, **options: object) -> AuditResult:
    return audit_run(run_dir, open_store(fleet.bucket), **options)


def test_an_honest_fleet_passes_and_the_audit_shows_that_it_could_have_told(tmp_path: Path, fleet: Fleet) -> None:
    result = audit(journal(tmp_path, fleet, lambda version: version), fleet)

    assert result.audited_samples == len(VERSIONS) * SAMPLES_PER_VERSION
    assert result.wrong_policy_samples == 0
    assert result.max_abs_logprob_diff is not None
    assert result.max_abs_logprob_diff < 1e-5
    assert result.power_frac == 1.0
    assert result.versions == len(VERSIONS)


def test_one_version_behind_is_seen_in_every_sample(tmp_path: Path, fleet: Fleet) -> None:
    stale = {1: 2, 2: 1, 3: 2, 5: 3}
    result = audit(journal(tmp_path, fleet, stale.__getitem__), fleet)

    assert result.wrong_policy_samples == result.audited_samples
    assert result.worst[0].max_abs_logprob_diff == result.max_abs_logprob_diff


def test_the_base_under_a_versions_name_is_seen(tmp_path: Path, fleet: Fleet) -> None:
    result = audit(journal(tmp_path, fleet, lambda version: None), fleet)

    # The first version *is* the base: its adapter starts at zero.
    assert result.wrong_policy_samples == (len(VERSIONS) - 1) * SAMPLES_PER_VERSION


def test_a_tolerance_that_hides_everything_has_no_power(tmp_path: Path, fleet: Fleet) -> None:
    result = audit(journal(tmp_path, fleet, lambda version: None), fleet, tolerance=100.0)

    assert (result.wrong_policy_samples, result.power_frac) == (0, 0.0)


def test_versions_that_are_the_same_policy_are_counted_against_the_power(tmp_path: Path, fleet: Fleet) -> None:
    twins = tmp_path / "bucket"
    twins.mkdir()
    for number in (1, 2):
        data, ref = pack_version(
            fleet.adapters[1], run=RUN, incarnation=INCARNATION, number=number, step=0, base_model=str(fleet.base)
        )
        open_store(twins).write_once(ref.key, data)
    run_dir = journal(tmp_path / "run", fleet, lambda version: 1)
    result = audit_run(run_dir, open_store(twins))

    assert result.same_neighbour_samples == 2 * SAMPLES_PER_VERSION
    assert result.power_frac is not None
    assert result.power_frac <= 0.5


def test_a_version_that_is_not_in_the_bucket_is_wrong(tmp_path: Path, fleet: Fleet) -> None:
    sample, never_published = {"prompt": [1], "output": [2], "logprobs": [-1.0]}, served_name(RUN, INCARNATION, 4)
    lines = [
        {"id": "a", "requested": "trl-policy-v4", "served": never_published, "number": 4, "sample": sample},
        {"id": "b", "requested": "trl-policy-v2", "served": "base", "number": None, "sample": sample},
        {"id": "c", "requested": "base", "served": "base", "number": None, "sample": sample},
    ]  # fmt: skip
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "journal-1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = audit(tmp_path, fleet)

    assert (result.audited_samples, result.wrong_policy_samples) == (2, 2)
    assert result.max_abs_logprob_diff is None
    assert "v000004" in result.unreadable_versions[never_published]
    assert {case.id: case.reason for case in result.worst}["b"] == "'base' is not the name of a version"


def test_a_damaged_version_file_is_wrong_not_ignored(tmp_path: Path, fleet: Fleet) -> None:
    damaged = tmp_path / "bucket" / RUN / INCARNATION
    damaged.mkdir(parents=True)
    for source in (fleet.bucket / RUN / INCARNATION).iterdir():
        data = bytearray(source.read_bytes())
        data[-1] ^= source.name == "v000003.safetensors"
        (damaged / source.name).write_bytes(data)
    result = audit_run(journal(tmp_path / "run", fleet, lambda version: version), open_store(tmp_path / "bucket"))

    assert result.wrong_policy_samples == SAMPLES_PER_VERSION
    assert "wrong_digest" in result.unreadable_versions[served_name(RUN, INCARNATION, 3)]


def test_the_command_leaves_its_result_in_the_run_and_survives_half_a_line(tmp_path: Path, fleet: Fleet) -> None:
    run_dir = journal(tmp_path, fleet, lambda version: version, extra='{"id": "cut of')
    (run_dir / "run.yaml").write_text(f"model_name_or_path: {fleet.base}\nbucket: {fleet.bucket}\n")
    seen: list[tuple[int, int]] = []
    result = audit_folder(run_dir, max_samples=10, on_progress=lambda done, total: seen.append((done, total)))

    assert (result["audited_samples"], result["unreadable_lines"], result["wrong_policy_samples"]) == (10, 1, 0)
    assert json.loads((run_dir / "audit.json").read_text()) == result
    assert seen[-1] == (20, 20)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no run\.yaml"):
        audit_folder(tmp_path)
