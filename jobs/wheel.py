"""This package as a wheel, made from wherever it is installed: the jobs run the very code that launched them."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import zipfile
from pathlib import Path

DISTRIBUTION = "bucket-grpo"
PACKAGE = "bucket_grpo"
PARTS = ("bucket_sync", "cli", "emulator", "experiments", "inference", "jobs", "proxy", "report", "runtime", "trainer")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def version() -> str:
    return importlib.metadata.version(DISTRIBUTION)


def wheel_name() -> str:
    return f"{PACKAGE}-{version()}-py3-none-any.whl"


def build_wheel() -> bytes:
    """The wheel's bytes; the same code gives the same bytes."""
    metadata = importlib.metadata.distribution(DISTRIBUTION).read_text("METADATA")
    if metadata is None:
        raise RuntimeError(f"{DISTRIBUTION} is not installed properly: it has no METADATA; install it with pip")
    info = f"{PACKAGE}-{version()}.dist-info"
    files = dict(_code())
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: bucket-grpo\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{DISTRIBUTION} = {PACKAGE}.cli.main:main\n".encode()
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def _code() -> list[tuple[str, bytes]]:
    found = []
    for part in PARTS:
        spec = importlib.util.find_spec(f"{PACKAGE}.{part}")
        if spec is None or not spec.submodule_search_locations:
            continue
        folder = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found.append((f"{PACKAGE}/{part}/{path.relative_to(folder).as_posix()}", path.read_bytes()))
    return found


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
