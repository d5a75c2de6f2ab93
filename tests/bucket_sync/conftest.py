import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peft_folders import write_adapter

sys.path.append(str(Path(__file__).parents[1] / "emulator"))

from hubs import RunningHub, running_hub

count = itertools.count()


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """`adapter(seed=…, r=…, tensors=…)` writes a PEFT folder and returns it."""
    return lambda **options: write_adapter(tmp_path / f"adapter-{next(count)}", **options)


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture
def bucket_id(hub: RunningHub) -> str:
    """A new, empty bucket on the emulated Hub."""
    from huggingface_hub import HfApi

    name = f"me/test-{next(count)}"
    HfApi(endpoint=hub.endpoint, token=hub.token).create_bucket(name)
    return name
