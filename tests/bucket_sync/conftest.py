from collections.abc import Callable
from pathlib import Path

import pytest
from peft_folders import write_adapter


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """`adapter(seed=…, r=…, tensors=…)` writes a PEFT folder and returns it."""
    count = iter(range(10**6))
    return lambda **options: write_adapter(tmp_path / f"adapter-{next(count)}", **options)
