"""A rollout engine in a file of `algorithm.user_files`: a forward pass for each token."""

import random
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from quadriga.rollout import Rollout, register_rollout
from quadriga.rollout.base import RolloutEngine, RolloutOutput, check_weight


class Third(Rollout):
    """`rollout.name=third`. It draws from the whole vocabulary only."""

    sampling_settings = frozenset({"temperature", "ignore_eos", "stop_token_ids"})

    def abilities(self, vocabulary, window):
        return replace(super().abilities(vocabulary, window), log_probs=frozenset({"policy"}))

    def build(self, model, device, *, releasable, copies):
        return ThirdRollout(self, model)


register_rollout("third", Third)


class ThirdRollout(RolloutEngine):
    name = "third"

    def __init__(self, rollout, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
        config = self.model.config
        self.abilities = rollout.abilities(config.vocab_size, config.max_position_embeddings)

    def generate(self, prompt_ids, attention_mask, sampling, sample_seeds):
        self._check_generates("generate")
        self.check_request(prompt_ids, attention_mask, sampling, sample_seeds)
        shape = len(prompt_ids), sampling.max_new_tokens
        ids, mask = torch.full(shape, sampling.pad_token_id), torch.zeros(shape).long()
        log_probs, reasons = torch.zeros(shape), []
        for row, seed in enumerate(sample_seeds.tolist()):
            tokens = prompt_ids[row, attention_mask[row].bool()].tolist()
            numbers = random.Random(str(seed))  # all 64 bits of the seed count
            reasons.append("length")
            for t in range(sampling.max_new_tokens):
                scaled = (self.logits(tokens)[-1] / (sampling.temperature or 1.0)).log_softmax(0)
                token = numbers.choices(range(len(scaled)), scaled.exp().tolist())[0]
                token = int(scaled.argmax()) if sampling.greedy else token
                tokens.append(token)
                ids[row, t], mask[row, t], log_probs[row, t] = token, 1, scaled[token]
                if token in sampling.end_token_ids:
                    reasons[-1] = "stop"
                    break
        versions = torch.full((len(ids),), self.version)
        return RolloutOutput(ids, mask, log_probs, tuple(reasons), versions)

    def logits(self, tokens):
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0]

    def score(self, ids, attention_mask):
        self._check_generates("score")
        self.check_sequences(ids, attention_mask)
        scores = torch.zeros(ids.shape)
        for row, valid in enumerate(attention_mask.bool()):
            tokens = ids[row, valid]
            log_p = self.logits(tokens.tolist())[:-1].log_softmax(-1)
            found = log_p.gather(-1, tokens[1:, None])[:, 0]
            scores[row, valid] = torch.cat([torch.zeros(1), found])
        return scores

    def update_weights(self, stream, version):
        self._check("update_weights", "ready", "released")
        own = dict(self.weights())
        shapes = {name: tensor.shape for name, tensor in own.items()}
        with self._writing(stream, version, lambda: own) as weights:
            for name, tensor in weights:
                check_weight(name, tensor, shapes)
                own[name].copy_(tensor)

    def weights(self):
        return self.model.state_dict().items()
