"""The machines that the emulated Hub pretends to have, with the Hub's prices. None of them is real here."""

from typing import Any

# name, pretty name, cpu, ram, storage, accelerator (model, count, total vram), US cents an hour
_TABLE: list[tuple[str, str, str, str, str, tuple[str, int, str] | None, int]] = [
    ("cpu-basic", "CPU Basic", "2 vCPU", "16 GB", "20 GB", None, 1),
    ("cpu-upgrade", "CPU Upgrade", "8 vCPU", "32 GB", "50 GB", None, 3),
    ("t4-small", "Nvidia T4 - small", "4 vCPU", "15 GB", "50 GB", ("T4", 1, "16 GB"), 40),
    ("l4x1", "Nvidia L4", "8 vCPU", "30 GB", "400 GB", ("L4", 1, "24 GB"), 80),
    ("a10g-small", "Nvidia A10G - small", "4 vCPU", "15 GB", "110 GB", ("A10G", 1, "24 GB"), 100),
    ("l40sx1", "Nvidia L40S", "8 vCPU", "62 GB", "380 GB", ("L40S", 1, "48 GB"), 180),
    ("a100-large", "Nvidia A100 - large", "12 vCPU", "142 GB", "1000 GB", ("A100", 1, "80 GB"), 250),
    ("rtx-pro-6000", "Nvidia RTX PRO 6000", "22 vCPU", "240 GB", "1000 GB", ("RTX PRO 6000", 1, "96 GB"), 275),
    ("h200", "Nvidia H200", "23 vCPU", "256 GB", "3000 GB", ("H200", 1, "141 GB"), 500),
    ("h200x2", "2x Nvidia H200", "46 vCPU", "512 GB", "6000 GB", ("H200", 2, "282 GB"), 1000),
    ("h200x4", "4x Nvidia H200", "92 vCPU", "1024 GB", "12000 GB", ("H200", 4, "564 GB"), 2000),
    ("h200x8", "8x Nvidia H200", "184 vCPU", "2048 GB", "24000 GB", ("H200", 8, "1128 GB"), 4000),
]
NAMES = [row[0] for row in _TABLE]


def accelerator_of(flavor: str) -> str:
    """What a job finds in `ACCELERATOR`."""
    found = next(row[5] for row in _TABLE if row[0] == flavor)
    return found[0] if found else "none"


def hardware() -> list[dict[str, Any]]:
    """The answer of `GET /api/jobs/hardware`; prices are per minute, as the Hub states them."""
    answer = []
    for name, pretty, cpu, ram, storage, accelerator, cents in _TABLE:
        micro = round(cents * 10_000 / 60)
        item: dict[str, Any] = {
            "name": name,
            "prettyName": pretty,
            "cpu": cpu,
            "ram": ram,
            "ephemeralStorage": storage,
            "accelerator": None,
            "unitCostMicroUSD": micro,
            "unitCostUSD": micro / 1e6,
            "unitLabel": "minute",
        }
        if accelerator:
            model, count, vram = accelerator
            item["accelerator"] = {
                "type": "gpu",
                "model": model,
                "quantity": str(count),
                "vram": vram,
                "manufacturer": "Nvidia",
            }
        answer.append(item)
    return answer
