"""What makes a PEFT adapter one that vLLM serves exactly as the trainer computes it.

vLLM answers 200 to much that it then serves wrongly (NaN weights, another base) and ignores config fields that change
what PEFT computes (`rank_pattern`, `alpha_pattern`, aLoRA's tokens): whatever it would not honour is refused here.
"""

import math
import re
from collections.abc import Mapping

from bucket_grpo.bucket_sync.safetensors_file import TensorInfo, all_finite

TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight\Z")

# Fields of PEFT's LoraConfig that change the computation in ways that vLLM does not follow; all must be unset.
UNSUPPORTED = (
    "use_dora", "modules_to_save", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens",
    "layer_replication", "trainable_token_indices", "target_parameters", "arrow_config", "kasa_config",
    "monteclora_config", "velora_config",
)  # fmt: skip


class VersionRejected(Exception):
    """A version was refused. `reason` is a short code for counting; the message names the tensor or field at fault."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{message} [{reason}]")
        self.reason = reason
        self.message = message


def check_adapter(config: Mapping, tensors: Mapping[str, TensorInfo], body: memoryview) -> None:
    """Raise `VersionRejected` unless this is one complete, finite LoRA that vLLM computes as PEFT does."""
    rank, alpha = check_config(config)
    modules = _pairs_by_module(tensors)
    for module, (a_name, b_name) in modules.items():
        module_rank = _pattern_value(config.get("rank_pattern"), module, rank)
        _check_shape(a_name, tensors[a_name].shape, axis=0, rank=module_rank)
        _check_shape(b_name, tensors[b_name].shape, axis=1, rank=module_rank)
        module_alpha = _pattern_value(config.get("alpha_pattern"), module, alpha)
        rslora = bool(config.get("use_rslora"))
        if not math.isclose(_scaling(module_alpha, module_rank, rslora), _scaling(alpha, rank, rslora)):
            raise VersionRejected(
                "unsupported_config",
                f"{a_name}: rank_pattern/alpha_pattern scale this module by another factor than lora_alpha and r do; "
                "vLLM scales every module alike",
            )
    _check_targets(config["target_modules"], modules)
    for name, info in tensors.items():
        if not all_finite(info, body):
            raise VersionRejected("not_finite", f"tensor {name} holds NaN or infinite values")


def check_config(config: Mapping) -> tuple[int, float]:
    """`(r, lora_alpha)` of a plain LoRA config; raises `VersionRejected` naming the field otherwise."""
    if config.get("peft_type") != "LORA":
        raise VersionRejected("bad_config", f"adapter_config: peft_type is {config.get('peft_type')!r}, not 'LORA'")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if not _is_positive(rank) or not isinstance(rank, int):
        raise VersionRejected("bad_config", f"adapter_config: r is {rank!r}, not a positive whole number")
    if not _is_positive(alpha) or not isinstance(alpha, int | float):
        raise VersionRejected("bad_config", f"adapter_config: lora_alpha is {alpha!r}, not a positive number")
    named = isinstance(targets, str) or (isinstance(targets, list) and all(isinstance(item, str) for item in targets))
    if not targets or not named:
        raise VersionRejected("bad_config", f"adapter_config: target_modules is {targets!r}, not names of modules")
    for field in UNSUPPORTED:
        if config.get(field):
            raise VersionRejected("unsupported_config", f"adapter_config: {field}={config[field]!r}: vLLM ignores it")
    if config.get("bias", "none") != "none":
        raise VersionRejected("unsupported_config", f"adapter_config: bias={config['bias']!r}: vLLM loads only 'none'")
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(field) or {}
        if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
            raise VersionRejected(
                "bad_config", f"adapter_config: {field} is {pattern!r}, not a map to positive numbers"
            )
    return rank, float(alpha)


def _pairs_by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[str, str]]:
    sides: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = TENSOR_NAME.match(name)
        if not match:
            raise VersionRejected("unexpected_tensor", f"tensor {name} is not the lora_A or lora_B weight of a module")
        sides.setdefault(match["module"], {})[match["side"]] = name
    if not sides:
        raise VersionRejected("missing_tensor", "the adapter holds no tensors")
    for module, found in sides.items():
        for side in "AB":
            if side not in found:
                raise VersionRejected(
                    "missing_tensor", f"tensor base_model.model.{module}.lora_{side}.weight is missing"
                )
    return {module: (found["A"], found["B"]) for module, found in sides.items()}


def _check_shape(name: str, shape: tuple[int, ...], *, axis: int, rank: float) -> None:
    if len(shape) != 2 or 0 in shape or shape[axis] != rank:
        wanted = f"[{rank}, in]" if axis == 0 else f"[out, {rank}]"
        raise VersionRejected("wrong_shape", f"tensor {name} has shape {list(shape)}, expected {wanted}")


def _check_targets(targets: str | list[str], modules: Mapping[str, object]) -> None:
    """Every tensor belongs to a target and every target has a tensor, by PEFT's own matching rules."""
    if targets == "all-linear":
        return
    if isinstance(targets, str):
        strays = [module for module in modules if not _matches(targets, module)]
        missing: list[str] = []
    else:
        found = {module: [t for t in targets if module == t or module.endswith(f".{t}")] for module in modules}
        strays = [module for module, matched in found.items() if not matched]
        missing = sorted(set(targets).difference(*found.values()))
    if strays:
        raise VersionRejected("unexpected_tensor", f"tensors of {strays[0]}: the module is not among target_modules")
    if missing:
        raise VersionRejected("missing_tensor", f"target module {missing[0]} has no tensors in the adapter")


def _pattern_value(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    for key, value in (pattern or {}).items():
        if _matches(rf"(.*\.)?({key})", module):
            return value
    return default


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise VersionRejected(
            "bad_config", f"adapter_config: {pattern!r} is not a regular expression: {error}"
        ) from error


def _scaling(alpha: float, rank: float, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
