"""The tests of `HubStore` once more, with huggingface_hub 2.x: it can't share an environment with transformers 5.17."""

import pickle
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from tests.emulator.hub_clients import hub2_python
from tests.emulator.hubs import RunningHub

REPOSITORY = Path(__file__).parents[2]

# Its own huggingface_hub comes first; pytest, numpy, pydantic and the rest are borrowed from this environment.
PROGRAM = """
import sys
sys.path.append(sys.argv[1])
import huggingface_hub
assert huggingface_hub.__version__.startswith("2."), huggingface_hub.__version__
import pytest
sys.exit(pytest.main([*sys.argv[2:], "-q", "-p", "no:cacheprovider"]))
"""


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_store_keeps_its_contract_with_the_next_client(hub: RunningHub, tmp_path: Path) -> None:
    (tmp_path / "bucket_grpo").mkdir()
    (tmp_path / "bucket_grpo" / "bucket_sync").symlink_to(REPOSITORY / "bucket_sync")
    served = pickle.dumps(replace(hub, process=None)).hex()  # type: ignore[arg-type]
    tests = [str(REPOSITORY / "tests" / "bucket_sync" / name) for name in ("test_hub_store.py", "test_watcher.py")]
    done = subprocess.run(
        [hub2_python(), "-c", PROGRAM, sysconfig.get_path("purelib"), *tests],
        env={**hub.environment(tmp_path / "home"), "BUCKET_GRPO_TEST_HUB": served, "PYTHONPATH": str(tmp_path)},
        cwd=REPOSITORY, text=True, capture_output=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
