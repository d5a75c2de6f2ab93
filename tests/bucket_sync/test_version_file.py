import json
import struct
from pathlib import Path

import numpy as np
import pytest
from peft_folders import BASE, INCARNATION, RUN

from bucket_grpo.bucket_sync.version_file import Canary, VersionRejected, pack_version, verify_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef

WHO = {"run": RUN, "incarnation": INCARNATION, "number": 14, "step": 52, "base_model": BASE}
PREFIX = "base_model.model.model.layers.0.self_attn"


def refused(reason: str, match: str | None = None) -> pytest.RaisesExc:
    return pytest.RaisesExc(VersionRejected, match=match, check=lambda error: error.reason == reason)


def pair(module: str, rank: int = 1, dtype: str = "F32", width: int = 8) -> dict:
    values = np.random.default_rng(1)
    return {
        f"{PREFIX}.{module}.lora_A.weight": (dtype, values.normal(size=(rank, width))),
        f"{PREFIX}.{module}.lora_B.weight": (dtype, values.normal(size=(width, rank))),
    }


def rewrite_header(data: bytes, change) -> bytes:
    """The file with its JSON header passed through `change`, its length corrected."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def test_a_version_says_what_it_is_and_survives_the_round_trip(adapter):
    canary = Canary(prompt=[1, 2, 3], logprobs=[-0.5, -2.25], dtype="float32")
    data, ref = pack_version(adapter(), canary=canary, **WHO)
    assert ref.key == f"{RUN}/{INCARNATION}/v000014.safetensors"
    version = verify_version(data, expect=ref, base_model=BASE)
    assert (version.ref, version.canary, version.base_model) == (ref, canary, BASE)
    assert version.tensors[f"{PREFIX}.q_proj.lora_A.weight"].shape == (1, 8)


def test_the_same_adapter_packs_to_the_same_bytes(adapter):
    folder = adapter()
    assert pack_version(folder, **WHO) == pack_version(folder, **WHO)
    assert pack_version(folder, **WHO)[0] != pack_version(adapter(seed=1), **WHO)[0]


def test_the_staged_folder_holds_the_tensors_bit_for_bit_and_appears_once(adapter, tmp_path):
    folder = adapter()
    data, _ = pack_version(folder, **WHO)
    version = verify_version(data)
    staged = version.write_peft_folder(tmp_path / "staged" / "v14")
    from safetensors.numpy import load_file

    before, after = load_file(folder / "adapter_model.safetensors"), load_file(staged / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert json.loads((staged / "adapter_config.json").read_text())["base_model_name_or_path"] == BASE
    assert [path.name for path in staged.parent.iterdir()] == ["v14"]
    with pytest.raises(FileExistsError):
        version.write_peft_folder(staged)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("bits", ["nan", "inf", "-inf"])
def test_a_value_that_is_not_finite_is_refused_and_its_tensor_named(adapter, dtype, bits):
    tensors = pair("q_proj", dtype=dtype)
    name = f"{PREFIX}.q_proj.lora_B.weight"
    poisoned = np.array(tensors[name][1], dtype="<f4")
    poisoned[3, 0] = float(bits)
    if dtype == "BF16":
        tensors = {key: (dtype, np.asarray(array, "<f4").view("<u4") >> 16) for key, (_, array) in tensors.items()}
        poisoned = poisoned.view("<u4") >> 16
    pack_version(adapter(tensors=tensors, target_modules=["q_proj"]), **WHO)
    tensors[name] = (dtype, poisoned)
    with refused("not_finite", match="q_proj.lora_B"):
        pack_version(adapter(tensors=tensors, target_modules=["q_proj"]), **WHO)


@pytest.mark.parametrize(
    ("config", "reason", "match"),
    [
        ({"r": 2}, "wrong_shape", "lora_A"),
        ({"r": 0}, "bad_config", "r is 0"),
        ({"lora_alpha": None}, "bad_config", "lora_alpha"),
        ({"peft_type": "IA3"}, "bad_config", "IA3"),
        ({"target_modules": ["q_proj"]}, "unexpected_tensor", "v_proj"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "missing_tensor", "k_proj"),
        ({"target_modules": r".*\.q_proj"}, "unexpected_tensor", "v_proj"),
        ({"target_modules": []}, "bad_config", "target_modules"),
        ({"target_modules": "("}, "bad_config", "regular expression"),
        ({"use_dora": True}, "unsupported_config", "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "unsupported_config", "modules_to_save"),
        ({"bias": "all"}, "unsupported_config", "bias"),
        ({"rank_pattern": {"q_proj": 4}}, "wrong_shape", "q_proj"),
        ({"alpha_pattern": {"q_proj": 16}}, "unsupported_config", "q_proj"),
        ({"base_model_name_or_path": None}, "wrong_base", "names no base"),
        ({"base_model_name_or_path": "other/model"}, "wrong_base", "other/model"),
    ],
)
def test_a_config_that_would_be_served_wrongly_is_refused(adapter, config, reason, match):
    with refused(reason, match):
        pack_version(adapter(**config), **WHO)


def test_patterns_that_keep_one_scaling_are_accepted(adapter):
    tensors = {**pair("q_proj", rank=4), **pair("v_proj", rank=1)}
    data, _ = pack_version(adapter(tensors=tensors, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 8}), **WHO)
    assert verify_version(data).tensors[f"{PREFIX}.q_proj.lora_B.weight"].shape == (8, 4)


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_missing_half_of_a_pair_is_refused(adapter, side):
    tensors = {**pair("q_proj"), **pair("v_proj")}
    del tensors[f"{PREFIX}.v_proj.lora_{side}.weight"]
    with refused("missing_tensor", f"v_proj.lora_{side}"):
        pack_version(adapter(tensors=tensors), **WHO)


def test_a_tensor_that_is_no_lora_weight_is_refused(adapter):
    tensors = {**pair("q_proj"), f"{PREFIX}.q_proj.lora_magnitude_vector": ("F32", np.zeros(8))}
    with refused("unexpected_tensor", "magnitude"):
        pack_version(adapter(tensors=tensors, target_modules=["q_proj"]), **WHO)


def test_a_pickle_is_refused(adapter):
    folder = adapter()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with refused("pickle", "adapter_model.bin"):
        pack_version(folder, **WHO)


def test_a_local_copy_of_the_base_is_published_under_the_runs_name(adapter, tmp_path):
    data, _ = pack_version(adapter(base_model_name_or_path=str(tmp_path)), **WHO)
    assert verify_version(data, base_model=BASE).adapter_config["base_model_name_or_path"] == BASE


def test_a_reader_refuses_another_base(adapter):
    data, ref = pack_version(adapter(), **WHO)
    with refused("wrong_base", "tiny/base"):
        verify_version(data, expect=ref, base_model="tiny/other")


def test_a_reader_refuses_another_version_of_the_same_content(adapter):
    folder = adapter()
    data, ref = pack_version(folder, **WHO)
    for other in ({"run": "other-run"}, {"number": 15}, {"step": 53}, {"incarnation": "20261130t154500z-ffffff"}):
        told = VersionRef(**{**ref.model_dump(), **other})
        with refused("wrong_version"):
            verify_version(data, expect=told)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_refused_with_and_without_knowing_its_size(adapter, keep):
    data, ref = pack_version(adapter(), **WHO)
    with refused("wrong_size"):
        verify_version(data[:keep], expect=ref)
    with refused("malformed"):
        verify_version(data[:keep])


def test_every_flipped_bit_is_noticed_without_knowing_the_hash(adapter):
    data, ref = pack_version(adapter(width=2), canary=Canary(prompt=[1, 2], logprobs=[-1.0]), **WHO)
    for position in range(len(data)):
        corrupt = bytearray(data)
        corrupt[position] ^= 1 << (position % 8)
        with pytest.raises(VersionRejected):
            verify_version(bytes(corrupt))
    with refused("wrong_hash"):
        verify_version(bytes(corrupt), expect=ref)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", "15"), ("step", "0"), ("run", "other"), ("base_model", "other/model"), ("adapter_config", "{}")],
)
def test_metadata_that_lies_is_refused(adapter, field, value):
    data, _ = pack_version(adapter(), **WHO)
    lying = rewrite_header(data, lambda header: header["__metadata__"].update({field: value}))
    with refused("wrong_digest"):
        verify_version(lying)


def resign(data: bytes, change) -> bytes:
    """Change the header and make the digest true again: what a hostile writer would do."""
    from bucket_grpo.bucket_sync.safetensors_file import parse
    from bucket_grpo.bucket_sync.version_file import _digest

    changed = parse(rewrite_header(data, change))
    digest = _digest(changed.metadata, changed.tensors, changed.body)
    return rewrite_header(data, lambda header: (change(header), header["__metadata__"].update(digest=digest)))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("run", "../../etc", "bad_metadata"),
        ("incarnation", "..", "bad_metadata"),
        ("version", "-1", "bad_metadata"),
        ("version", "x", "bad_metadata"),
        ("canary", '{"prompt":[1],"logprobs":[]}', "bad_metadata"),
        ("canary", '{"prompt":[1,2],"logprobs":[1.5]}', "bad_metadata"),
        ("adapter_config", "[]", "bad_metadata"),
        ("adapter_config", "{}", "wrong_base"),
        ("format", "bucket-grpo/2", "wrong_format"),
    ],
)
def test_well_signed_nonsense_is_refused(adapter, field, value, reason):
    data, _ = pack_version(adapter(), **WHO)
    with refused(reason):
        verify_version(resign(data, lambda header: header["__metadata__"].update({field: value})))


def test_a_header_that_claims_the_world_is_refused_before_it_is_read():
    with refused("malformed", "claims"):
        verify_version(struct.pack("<Q", 2**62) + b"{}")


def test_overlapping_and_spare_bytes_are_refused(adapter):
    data, _ = pack_version(adapter(), **WHO)
    with refused("malformed", "padded"):
        verify_version(data + b"\0")
    twice = rewrite_header(data, lambda h: h[f"{PREFIX}.q_proj.lora_A.weight"].update(data_offsets=[32, 64]))
    with refused("malformed", "expected"):
        verify_version(twice)


def test_what_peft_saves_is_published_and_loads_back_equal(tmp_path: Path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    base_dir = tmp_path / "base"
    Qwen2ForCausalLM(config).save_pretrained(base_dir)

    def base() -> Qwen2ForCausalLM:
        return Qwen2ForCausalLM.from_pretrained(base_dir).eval()

    lora = peft.LoraConfig(
        r=1, lora_alpha=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    trained = peft.get_peft_model(base(), lora).eval()
    trained.save_pretrained(tmp_path / "adapter")

    data, ref = pack_version(tmp_path / "adapter", **{**WHO, "base_model": str(base_dir)})
    staged = verify_version(data, expect=ref, base_model=str(base_dir)).write_peft_folder(tmp_path / "staged")
    loaded = peft.PeftModel.from_pretrained(base(), staged).eval()

    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(trained(ids).logits, loaded(ids).logits)
        assert not torch.equal(loaded(ids).logits, base()(ids).logits)
