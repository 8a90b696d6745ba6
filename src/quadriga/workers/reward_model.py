"""The workers of the reward model: scores without gradients, and training on pairs of responses.

Training: if every micro-batch has whole pairs, their loss is computed from its scores. If the two
responses of a pair are in different micro-batches, or adapters drop inputs, a first pass computes
all scores without gradients, and with them the derivative of the loss by each score. A second pass
adds up derivative × score, whose gradient is that of the loss, however the rows are split.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quadriga.algorithms.shaping import add_to_last_token
from quadriga.config.commands import RMConfig
from quadriga.config.schema import ModelConfig, RewardModelConfig
from quadriga.data.chat import NO_ARGUMENTS, TemplateArguments
from quadriga.data.conversations import MARGINS
from quadriga.engines.base import VALUES
from quadriga.errors import LengthError
from quadriga.protocol import DataProto, fields
from quadriga.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from quadriga.workers.method_fields import MODEL_INPUTS
from quadriga.workers.runtime import EngineWorker, RankRuntime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from quadriga.data.chat import EncodedAnswer
    from quadriga.engines.base import Outputs, TrainEngine


class RewardModelWorker(EngineWorker[RewardModelConfig]):
    """The reward model in one rank.

    If its tokenizer and chat template write a conversation as the policy does, it reads the token
    ids of the policy. Otherwise each response is decoded, and the conversation is encoded again
    with the tokenizer and the chat template of the reward model.

    Args:
        config: settings of the reward model.
        policy: settings of the model that generates; None: its tokenizer is that of the reward
            model.
        policy_arguments: of the chat template of the policy; None: those of the reward model.
        runtime: what every rank of the role is told about the run.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        policy: ModelConfig | None = None,
        policy_arguments: TemplateArguments | None = None,
        runtime: RankRuntime | None = None,
    ) -> None:
        super().__init__("reward_model", config, "score", runtime)
        self.policy = policy
        self.policy_arguments = policy_arguments

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the tokenizers, and the model with its head."""
        from quadriga.models.folder import local_folder
        from quadriga.models.limits import context_window
        from quadriga.models.loading import padding_token, read_config, tokenizer_of

        model = self.config.model
        trusted = model.trust_remote_code
        path = local_folder(model.path)
        self.tokenizer = tokenizer_of(model)
        self.policy_tokenizer = self.tokenizer if self.policy is None else tokenizer_of(self.policy)
        arguments = self.config.chat_template_kwargs, self.policy_arguments
        self.same_tokens = same_tokens(self.tokenizer, self.policy_tokenizer, *arguments)
        self.pad = padding_token(model)
        window = context_window(read_config(path, trust_remote_code=trusted))
        self.longest = None if window is None else window.tokens
        super().init_model()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("reward_model"))
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Compute `rm_scores` [B, R] float32: the score at the last response token, 0 elsewhere
        and in a row without a response.

        Reads the fields `COMPUTE_RM_SCORE.reads`.

        Raises:
            LengthError: a conversation is longer than the reward model can compute.
        """
        from quadriga.data.loader import scored_rows

        rows = scored_rows(self._conversations(data), self.pad, self.longest)
        size = self.config.micro_batch_size_per_gpu
        outputs = self._engine().forward(rows, micro_batch_size=size)
        responses = data.batch[fields.RESPONSES]
        # All tokens of the response, whatever the loss does with them.
        tokens = data.batch[fields.ATTENTION_MASK][:, -responses.shape[1] :]
        score_B = outputs[VALUES].sum(-1).float()
        score_BR = add_to_last_token(score_B.new_zeros(tokens.shape), tokens, score_B)
        return DataProto.from_dict(tensors={fields.RM_SCORES: score_BR})

    def _conversations(self, data: DataProto) -> list[EncodedAnswer]:
        """Return the token ids of the reward model for each row."""
        from quadriga.data.chat import encode_conversations, neutraliser

        ids, mask = data.batch[fields.INPUT_IDS], data.batch[fields.ATTENTION_MASK].bool()
        width = ids.shape[1] - data.batch[fields.RESPONSES].shape[1]
        prompts, responses = (
            [row[kept].tolist() for row, kept in zip(ids[:, part], mask[:, part], strict=True)]
            for part in (slice(width), slice(width, None))
        )
        if self.same_tokens:
            return list(zip(prompts, responses, strict=True))
        texts = self.policy_tokenizer.batch_decode(responses, skip_special_tokens=True)
        # The policy has spelled these texts: it must not write control tokens of the reward model.
        written = map(neutraliser(self.tokenizer), texts)
        pairs = zip(data.non_tensor_batch[fields.RAW_PROMPT], written, strict=True)
        chats = [[*prompt, {"role": "assistant", "content": text}] for prompt, text in pairs]
        return encode_conversations(self.tokenizer, chats, self.config.chat_template_kwargs)


def same_tokens(
    one: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    arguments: TemplateArguments = NO_ARGUMENTS,
    other_arguments: TemplateArguments | None = None,
) -> bool:
    """Return whether a conversation of `other` has the tokens that `one` writes for it.

    `arguments`: of the chat template of `one`; `other_arguments`: of the other, None: the same.

    Token ids and chat template must be equal, and the template must write a response as the policy
    generates it: the response, then the end token. Many templates write a line break after it.
    """
    from quadriga.data.chat import Chat, encode_chats

    if other_arguments is not None and dict(other_arguments) != dict(arguments):
        return False
    if one is not other and (
        one.get_vocab() != other.get_vocab() or one.chat_template != other.chat_template
    ):
        return False
    if not one.chat_template:
        return True
    prompt: Chat = [{"role": "user", "content": "1"}]
    chat: Chat = [*prompt, {"role": "assistant", "content": "2"}]
    [whole] = encode_chats(one, [chat], complete=True, arguments=arguments)
    [before] = encode_chats(one, [prompt], arguments=arguments)
    return whole == [*before, *one.encode("2", add_special_tokens=False), one.eos_token_id]


_SLOPES = "slopes"
"""The derivative of the loss by the score of each row, [B]."""
_ROWS = "rows"
"""The number of each row in its batch, [B]: rows 2p and 2p + 1 are pair p."""


_MESH = "reward_model"


class PairTrainingWorker(EngineWorker[RMConfig]):
    """A reward model that is trained, in one rank.

    Args:
        config: settings of `quadriga rm`.
        runtime: what every rank is told about the run.
    """

    def __init__(self, config: RMConfig, runtime: RankRuntime | None = None) -> None:
        super().__init__(_MESH, config, "score", runtime)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(_MESH))
    def update_rm(self, data: DataProto) -> DataProto:
        """Take one optimizer step. See `update_pairs`."""
        size, drops = self.config.data.micro_batch_size_per_gpu, self.config.model.lora.dropout > 0
        forward_rows = self.config.engine.forward_rows(size)
        return update_pairs(self._engine(), data, size, forward_rows=forward_rows, drops=drops)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(_MESH))
    def compute_pair_scores(self, data: DataProto) -> DataProto:
        """Compute `rm_scores` [B, R] float32: the score where `response_mask` is 1, 0 elsewhere."""
        rows = {key: data.batch[key] for key in MODEL_INPUTS}
        size = self.config.engine.forward_rows(self.config.data.micro_batch_size_per_gpu)
        scores = self._engine().forward(rows, micro_batch_size=size)[VALUES]
        return DataProto.from_dict(tensors={fields.RM_SCORES: scores})


def update_pairs(
    engine: TrainEngine,
    data: DataProto,
    micro_batch_size: int | None,
    *,
    forward_rows: int | None,
    drops: bool = False,
) -> DataProto:
    """Take one optimizer step on the mean loss of the pairs of all ranks.

    Args:
        data: rows of `PairDataset.collate`; the two rows of a pair are neighbours.
        micro_batch_size: sequences of a micro-batch; None: split by tokens.
        forward_rows: the same of the pass without gradients, if there is one.
        drops: whether adapters drop inputs in an update. The loss is that of scores without
            dropout, so the pass without gradients is made always.

    Returns:
        `meta_info["metrics"]`: `rm/loss` in nats per pair, `rm/accuracy`, `rm/difference`, and the
        metrics of the engine.

    Raises:
        LengthError: on a rank, a row has no partner.
    """
    import torch

    from quadriga.protocol.dataproto import padding_rows
    from quadriga.workers.updates import rows_of_update

    rows = rows_of_update(data, MODEL_INPUTS)
    plan = engine.micro_batches(rows, micro_batch_size=micro_batch_size)
    added_B = padding_rows(data)
    real_P = ~added_B[0::2]
    # The row that pads an odd batch is no partner of its last row.
    odd = len(data) % 2 or bool((added_B[0::2] != added_B[1::2]).any())
    pairs, without_partner, split = engine.global_counts(
        real_P.sum(), odd, drops or not all(map(_has_whole_pairs, plan))
    )
    if without_partner:  # on all ranks: one alone would leave the others in a collective
        raise LengthError(
            "update_rm: expected whole pairs of neighbouring rows on every rank, but on "
            f"{without_partner:.0f} ranks a row has no partner ({len(data)} rows on this one). "
            "Pass a multiple of two rows for each rank."
        )
    margin_B = data.batch[MARGINS]
    if split:
        scores_B = engine.forward(rows, micro_batch_size=forward_rows)[VALUES].sum(-1)
        slope_P, found = _loss_of_pairs(scores_B, margin_B)
        slope_P = slope_P * real_P / pairs
        rows[_SLOPES] = torch.stack([-slope_P, slope_P], dim=1).flatten()
        metrics = engine.train_step(rows, _weighted_scores, micro_batch_size=micro_batch_size)
        totals = engine.global_counts(*(values_P[real_P].sum() for values_P in found.values()))
        metrics |= {name: total / pairs for name, total in zip(found, totals, strict=True)}
    else:
        rows |= {_ROWS: torch.arange(len(data)), MARGINS: margin_B}
        share = partial(_share_of_loss, pairs=pairs)
        metrics = engine.train_step(rows, share, micro_batch_size=micro_batch_size)
    return DataProto(meta_info={"metrics": {f"rm/{k}": v for k, v in metrics.items()}})


def _has_whole_pairs(micro_batch: Tensor | None) -> bool:
    """Return whether the rows of a micro-batch are pairs; None has none."""
    if micro_batch is None:
        return True
    in_order = micro_batch.sort().values
    first, second = in_order[0::2], in_order[1::2]
    return len(first) == len(second) and bool(((first % 2 == 0) & (second == first + 1)).all())


def _loss_of_pairs(scores_B: Tensor, margin_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the derivative of the loss by the rejected scores, and what is reported, all [P].

    The rows of a pair are neighbours.
    """
    from quadriga.algorithms.value_loss import pairwise_loss

    chosen_P, rejected_P = scores_B[0::2], scores_B[1::2]
    loss = pairwise_loss(chosen_P, rejected_P, margin_B[0::2])
    return loss.slope_P, {
        "loss": loss.loss_P,
        "accuracy": (chosen_P > rejected_P).float(),
        "difference": chosen_P - rejected_P,
    }


def _share_of_loss(
    outputs: Outputs, micro: Mapping[str, Tensor], *, pairs: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of the mean loss that the pairs of a micro-batch have, and of the means."""
    order = micro[_ROWS].argsort()
    _, found = _loss_of_pairs(outputs[VALUES].sum(-1)[order], micro[MARGINS][order])
    shares = {name: values_P.sum() / pairs for name, values_P in found.items()}
    return shares.pop("loss"), {name: share.detach() for name, share in shares.items()}


def _weighted_scores(
    outputs: Outputs, micro: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Return Σ derivative × score, whose gradient is that of the loss."""
    return (outputs[VALUES].sum(-1) * micro[_SLOPES]).sum(), {}
