"""What machines there are and what they cost: asked of the Hub, with the documented prices where it can't be asked."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

EXPOSED_USD_PER_HOUR = 0.01
"""Added by the Hub for each job with an exposed port."""
DOCUMENTED = "documented prices of September 2026"
LISTED = "list_jobs_hardware()"


class UnknownFlavor(ValueError):
    """A flavor that the Hub does not offer; the message lists those it does."""


@dataclass(frozen=True)
class Flavor:
    """One kind of machine. `vram_gib` is that of one GPU."""

    name: str
    usd_per_hour: float
    gpus: int = 0
    vram_gib: float = 0.0


DOCUMENTED_FLAVORS = (
    Flavor("cpu-basic", 0.01),
    Flavor("cpu-upgrade", 0.03),
    Flavor("t4-small", 0.40, 1, 16),
    Flavor("l4x1", 0.80, 1, 24),
    Flavor("a10g-small", 1.00, 1, 24),
    Flavor("l40sx1", 1.80, 1, 48),
    Flavor("a100-large", 2.50, 1, 80),
    Flavor("rtx-pro-6000", 2.75, 1, 96),
    Flavor("h200", 5.0, 1, 141),
    Flavor("h200x2", 10.0, 2, 141),
    Flavor("h200x4", 20.0, 4, 141),
    Flavor("h200x8", 40.0, 8, 141),
)


@dataclass(frozen=True)
class Prices:
    """The machines on offer, and where that is known from."""

    flavors: Sequence[Flavor]
    source: str

    def flavor(self, name: str) -> Flavor:
        for flavor in self.flavors:
            if flavor.name == name:
                return flavor
        names = [flavor.name for flavor in self.flavors]
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownFlavor(f"there is no flavor {name!r}.{hint} Flavors: {', '.join(names)} ({self.source})")


def documented_prices() -> Prices:
    return Prices(DOCUMENTED_FLAVORS, DOCUMENTED)


def prices_from(hardware: Iterable[Any]) -> Prices:
    """Prices from the answer of `list_jobs_hardware()`."""
    return Prices([_flavor(item) for item in hardware], LISTED)


_HOURS = {"second": 3600, "minute": 60, "hour": 1}


def _flavor(item: Any) -> Flavor:
    per_hour = _HOURS.get(item.unit_label)
    if per_hour is None:
        raise ValueError(f"flavor {item.name} is priced per {item.unit_label!r}: expected one of {', '.join(_HOURS)}")
    # The micro-dollar figure is exact; the other one is rounded for display.
    usd = round(item.unit_cost_micro_usd * per_hour / 1e6, 2)
    if item.accelerator is None:
        return Flavor(item.name, usd)
    gpus = max(1, int(item.accelerator.quantity))
    total = re.match(r"[\d.]+", item.accelerator.vram)
    return Flavor(item.name, usd, gpus, float(total[0]) / gpus if total else 0.0)


def job_usd_per_hour(flavor: Flavor, exposed: bool) -> float:
    return flavor.usd_per_hour + (EXPOSED_USD_PER_HOUR if exposed else 0.0)
