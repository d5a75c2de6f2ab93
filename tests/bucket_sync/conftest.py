import itertools
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from peft_folders import write_adapter

sys.path.append(str(Path(__file__).parents[2]))  # for `tests.…`, also where pytest is not started as a module

from tests.emulator.hubs import RunningHub, running_hub

OUTER_HUB = "BUCKET_GRPO_TEST_HUB"
count = itertools.count()

settings.register_profile("no deadline", deadline=None)  # two shared cores may stop anything for a moment
settings.load_profile("no deadline")


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """`adapter(seed=…, r=…, tensors=…)` writes a PEFT folder and returns it."""
    return lambda **options: write_adapter(tmp_path / f"adapter-{next(count)}", **options)


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """An emulated Hub of this session; an outer test that runs these with another client brings its own."""
    if served := os.environ.get(OUTER_HUB):
        yield pickle.loads(bytes.fromhex(served))
        return
    with running_hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture
def bucket_id(hub: RunningHub) -> str:
    """A new, empty bucket on the emulated Hub."""
    return hub.create_bucket(f"me/test-{os.getpid()}-{next(count)}")
