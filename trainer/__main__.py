"""`python -m bucket_grpo.trainer --config trainer.json`: one trainer job (proxy and training process)."""

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from bucket_grpo.trainer.job import TrainerJob
from bucket_grpo.trainer.supervisor import Supervisor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bucket_grpo.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    path = parser.parse_args().config
    try:
        job = TrainerJob.read(path)
    except (OSError, ValidationError) as error:
        print(f"cannot read the trainer's config {path}: {error}", file=sys.stderr)
        return 2
    return Supervisor(job, path).run()


if __name__ == "__main__":
    sys.exit(main())
