"""The naive loop: one sequence at a time, the whole model for each, no cache, no padding."""

import torch

PROMPT_WIDTH, RESPONSE_WIDTH = 9, 12
# (prompt, response) tokens. Rows 0 and 1 have the same prompt.
LENGTHS = [(9, 12), (9, 7), (3, 12), (5, 1), (9, 10), (1, 12)]
END_TOKENS = tuple(range(60, 75))


def make_batch(vocabulary):
    """Left-padded prompts, then right-padded responses; one response token is no target."""
    random = torch.Generator().manual_seed(1)
    ids = torch.zeros(len(LENGTHS), PROMPT_WIDTH + RESPONSE_WIDTH, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    targets = torch.zeros(len(LENGTHS), RESPONSE_WIDTH, dtype=torch.int64)
    for row, (prompt, response) in enumerate(LENGTHS):
        tokens = slice(PROMPT_WIDTH - prompt, PROMPT_WIDTH + response)
        ids[row, tokens] = torch.randint(5, vocabulary, (prompt + response,), generator=random)
        attention[row, tokens] = 1
        targets[row, :response] = 1
    ids[1, :PROMPT_WIDTH] = ids[0, :PROMPT_WIDTH]
    targets[0, 3] = 0
    return {"input_ids": ids, "attention_mask": attention, "response_mask": targets}


def of_responses(batch, compute):
    """What `compute` gives for the tokens [1, n] of each row, where the row's response is chosen.

    Returns:
        One [R, …] tensor a row; entries behind the row's last token are 0.
    """
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        prompt = int(mask[:PROMPT_WIDTH].sum())
        own = compute(ids[mask.bool()][None])[0].float()[prompt - 1 : -1]
        rows.append(torch.cat([own, own.new_zeros(RESPONSE_WIDTH - len(own), own.shape[1])]))
    return rows


def response_log_probs(model, batch):
    """For each row, log-probabilities [R, V] over the vocabulary where its tokens are chosen."""
    return of_responses(batch, lambda ids: model(input_ids=ids).logits.float().log_softmax(-1))


def target_log_probs(model, batch):
    """The log-probabilities [B, R] of the targets."""
    labels = batch["input_ids"][:, PROMPT_WIDTH:, None]
    chosen = torch.stack(response_log_probs(model, batch)).gather(-1, labels)[..., 0]
    return chosen * batch["response_mask"]


def hidden_states(model, batch):
    """The hidden states [B, R, D] of the backbone from which the targets are computed."""
    rows = of_responses(batch, lambda ids: model.base_model(input_ids=ids).last_hidden_state)
    return torch.stack(rows)
