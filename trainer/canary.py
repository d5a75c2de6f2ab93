"""Expected logprobs of a fixed token sequence under the adapter that is being published.

A replica that answers the same sequence with other logprobs does not serve this version, whatever it says.
"""

from typing import Any

import torch

from bucket_grpo.bucket_sync.version_file import Canary

MAX_CANARY_TOKENS = 32


def canary_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of the first prompt as the policy sees it, cut to `MAX_CANARY_TOKENS`; never fewer than two."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    if len(ids) < 2:
        raise ValueError(f"the chat template gives {len(ids)} token(s) for the first prompt; a canary needs two")
    return list(ids[:MAX_CANARY_TOKENS])


@torch.no_grad()
def expected_logprobs(model: Any, prompt: list[int], dtype: str) -> Canary:
    """Run `model` (TRL's, with its tree attention) on `prompt`; one logprob for each token but the first.

    Every rank must call it: with sharded parameters the forward is a collective.
    """
    device = next(model.parameters()).device
    tokens_T = torch.tensor(prompt, device=device)
    length = len(prompt)
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
    was_training = model.training
    model.eval()
    try:
        logits_TV = model(
            input_ids=tokens_T.unsqueeze(0),
            position_ids=torch.arange(length, device=device).unsqueeze(0),
            use_cache=False,
            tree_kv_index=torch.arange(length, device=device),
            tree_cu_seqlens_q=bounds,
            tree_cu_seqlens_k=bounds,
            tree_max_seqlen_q=length,
            tree_max_seqlen_k=length,
        ).logits[0]
    finally:
        model.train(was_training)
    logprobs_TV = torch.log_softmax(logits_TV[:-1].float(), dim=-1)
    chosen_T = logprobs_TV.gather(1, tokens_T[1:, None])[:, 0]
    return Canary(prompt=prompt, logprobs=chosen_T.tolist(), dtype=dtype)
