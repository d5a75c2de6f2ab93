"""The CPU's attention equals a dense one, for every cut into segments, with shared heads and with a sliding window."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_grpo.trainer.tree_attention import flash_attn_varlen_func

segments = st.lists(
    st.tuples(st.integers(1, 7), st.integers(0, 9)).map(lambda lengths: (lengths[0], lengths[0] + lengths[1])),
    min_size=1,
    max_size=8,
)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """One segment, straight from the definition: `(queries, heads, dim)` against `(keys, kv_heads, dim)`."""
    queries, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    for i in range(queries):
        at = i + len(k) - queries
        for j in range(len(k)):
            if j > at or (window is not None and j < at - window + 1):
                scores[:, i, j] = -torch.inf
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@settings(max_examples=60, deadline=None)
@given(segments, st.sampled_from([(4, 4), (4, 2), (6, 1)]), st.sampled_from([None, 1, 3]), st.integers(0, 2**31))
def test_it_equals_dense_attention_and_so_do_its_gradients(
    lengths: list[tuple[int, int]], heads: tuple[int, int], window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total_q, total_k = (sum(column) for column in zip(*lengths, strict=True))
    shapes = [(total_q, heads[0], 8), (total_k, heads[1], 8), (total_k, heads[1], 8)]
    tensors = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator)
    cuts_q, cuts_k = (torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lengths, strict=True))

    packed = flash_attn_varlen_func(
        *tensors,
        cuts_q,
        cuts_k,
        max(q for q, _ in lengths),
        max(k for _, k in lengths),
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
    )
    reference = torch.cat(
        [
            dense(*(t[a:b] for t, (a, b) in zip(tensors, [cut_q, cut_k, cut_k], strict=True)), window)
            for cut_q, cut_k in zip(cuts_q.unfold(0, 2, 1).tolist(), cuts_k.unfold(0, 2, 1).tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(packed, reference, atol=1e-5, rtol=0)
    for ours, theirs in zip(
        torch.autograd.grad((packed * weight).sum(), tensors),
        torch.autograd.grad((reference * weight).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_softcap_is_refused_not_ignored() -> None:
    x, cuts = torch.zeros(1, 1, 8), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="softcap"):
        flash_attn_varlen_func(x, x, x, cuts, cuts, 1, 1, softcap=30.0)


@pytest.mark.parametrize("window", [None, 4])
def test_a_packed_tree_gives_each_sample_the_logprobs_that_it_has_alone(window: int | None) -> None:
    import numpy as np
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, register_tree_attention

    from bucket_grpo.trainer.tree_attention import install_where_needed

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=window is not None, sliding_window=window, max_window_layers=0,
    )  # fmt: skip
    install_where_needed()
    register_tree_attention()
    alone = Qwen2ForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    packed = Qwen2ForCausalLM._from_config(config, attn_implementation=TREE_ATTENTION).eval()
    packed.load_state_dict(alone.state_dict())
    prompt = [5, 6, 7, 8, 9, 10]
    samples = [[*prompt, 11, 12, 13], [*prompt, 11, 14], [*prompt, 20, 21, 22, 23], [30, 31, 32, 33]]
    row = TreeRow()
    for group, ids in enumerate(samples):
        mask = [0] * 2 + [1] * (len(ids) - 2)
        row.add({"input_ids": np.array(ids), "completion_mask": np.array(mask), "old_log_probs": np.zeros(len(ids)),
                 "advantage": 1.0, "group_id": group})  # fmt: skip
    batch = row.pack()
    max_q, max_k = batch["tree_max_seqlens"].tolist()
    with torch.no_grad():
        logits = packed(
            input_ids=batch["input_ids"][None],
            position_ids=batch["position_ids"][None],
            use_cache=False,
            tree_kv_index=batch["tree_kv_index"],
            tree_cu_seqlens_q=batch["tree_cu_seqlens_q"],
            tree_cu_seqlens_k=batch["tree_cu_seqlens_k"],
            tree_max_seqlen_q=max_q,
            tree_max_seqlen_k=max_k,
        ).logits[0].log_softmax(-1)  # fmt: skip
        expected, positions = [], []
        for ids in samples:
            own = alone(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
            expected += [own[i - 1, ids[i]] for i in range(2, len(ids))]
            positions += ids[2:]
    ours = logits[batch["token_index"], torch.tensor(positions)]
    torch.testing.assert_close(ours, torch.stack(expected), atol=1e-5, rtol=0)
