"""How long a mounted bucket makes a file wait: every delay and cache lifetime of hf-mount, as one value.

All times are seconds. `scaled` shortens or stretches them together, so that a test can keep their proportions and
still be quick. Figures come from hf-mount 0.9 (`--advanced-writes`, as HF Jobs mount buckets) and, for the two that
are not in its code (`request_s`, `upload_s`), from what users measured: a small file is visible through the API
2.5 s after `close()`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class MountProfile:
    flush_debounce_s: float = 2.0  # a batch goes out when no further file was closed for this long …
    flush_window_s: float = 30.0  # … or this long after its first file
    kernel_ttl_s: float = 10.0  # how long the kernel keeps a found name and its attributes; it keeps no misses
    revalidate_s: float = 10.0  # a lookup asks the bucket again at most this often
    poll_s: float = 30.0  # a directory's listing is trusted until a poll finds it changed; 0: never trusted
    negative_ttl_s: float = 1.0  # a name that was missing stays missing for this long
    request_s: float = 0.1  # one HEAD or one listing
    upload_s: float = 0.4  # upload and commit of a small batch
    upload_bandwidth: float | None = None  # bytes per second; None: not a bottleneck
    shutdown_flush_s: float = 45.0  # SIGTERM flushes for at most this long

    def scaled(self, factor: float) -> "MountProfile":
        """The same profile with every delay multiplied by `factor` (so bandwidth is divided by it)."""
        if factor <= 0:
            raise ValueError(f"time scale {factor} is not positive; use the profile 'local' for no delays")
        seconds = [f.name for f in fields(self) if f.name.endswith("_s") and f.name != "shutdown_flush_s"]
        changes = {name: getattr(self, name) * factor for name in seconds}
        if self.upload_bandwidth is not None:
            changes["upload_bandwidth"] = self.upload_bandwidth / factor
        return replace(self, **changes)

    def with_overrides(self, settings: Iterable[str]) -> "MountProfile":
        """Apply `name=seconds` settings; `ValueError` names the unknown field or the bad number."""
        known = {f.name for f in fields(self)}
        changes = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in known:
                raise ValueError(f"unknown profile field {name!r}; known: {', '.join(sorted(known))}")
            try:
                changes[name] = float(value)
            except ValueError:
                raise ValueError(f"{setting!r}: {value!r} is not a number") from None
        return replace(self, **changes)


PROFILES = {
    "hf-mount-2026-09": MountProfile(),
    "hf-mount-2026-08": MountProfile(negative_ttl_s=30.0),
    "local": MountProfile(0, 0, 0, 0, 0, 0, 0, 0),
}


def profile_named(name: str) -> MountProfile:
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}") from None
