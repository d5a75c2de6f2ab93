"""`builtin:tiny`, a model small enough to train on a laptop; and where a model's name is turned into a location.

    python -m bucket_grpo.trainer.tiny_model build --out DIR

makes the shipped files again from nothing, bit for bit (see `tiny_recipe`). No torch is imported until a build starts.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

BUILTIN = "builtin:"

# What keeps two CPUs from rounding differently: no vector units in torch's own kernels, in MKL or in libm, one thread.
# All of it is read when the libraries load, so a build runs in a process of its own.
REPRODUCIBLE_ENV = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def path() -> Path:
    """The shipped model folder, for transformers and vLLM. Weights are bfloat16: name the dtype to serve it in."""
    return Path(__file__).resolve().parent / "assets" / "tiny"


def resolve_model(name: str) -> str:
    """What to hand to transformers and vLLM for a run file's `model_name_or_path`.

    Args:
        name: `builtin:tiny`, a local folder, or a Hub id.

    Returns:
        An absolute path for the first two, a Hub id unchanged.

    Raises:
        ValueError: an unknown builtin, or something that looks like a path and is not a model folder.
    """
    if name.startswith(BUILTIN):
        if name == "builtin:tiny":
            return str(path())
        raise ValueError(f"unknown built-in model {name!r}; there is builtin:tiny")
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is not a model folder: it has no config.json")
        return str(folder.resolve())
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(
            f"there is no model folder {folder}; name a folder with a config.json, or a Hub id (owner/name)"
        )
    return name


def build(out: Path) -> None:
    """Make the model from nothing into `out`, in a process of its own: a few minutes on one core."""
    command = [sys.executable, "-m", "bucket_grpo.trainer.tiny_recipe", str(out)]
    subprocess.run(command, env={**os.environ, **REPRODUCIBLE_ENV}, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bucket_grpo.trainer.tiny_model")
    command = parser.add_subparsers(required=True).add_parser("build", help="make builtin:tiny again, bit for bit")
    command.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    out = parser.parse_args().out
    build(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
