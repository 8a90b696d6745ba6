"""The worker of the reward model: one score for each response, without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.config.schema import ModelConfig, RewardModelConfig
from quadriga.data.chat import NO_ARGUMENTS, TemplateArguments
from quadriga.engines.base import VALUES
from quadriga.errors import WorkerError
from quadriga.protocol import DataProto, fields
from quadriga.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from quadriga.workers.runtime import RankRuntime, prepare_rank, register_engine_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data.chat import Conversation
    from quadriga.engines.base import TrainEngine


class RewardModelWorker(Worker):
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
        super().__init__()
        self.config = config
        self.policy = policy
        self.policy_arguments = policy_arguments
        self.runtime = runtime or RankRuntime()
        self.device = prepare_rank(self.runtime)
        self.engine: TrainEngine | None = None
        register_engine_ranks(self, "reward_model", config.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the tokenizers, and the model with its head."""
        from quadriga.engines import build_engine
        from quadriga.models.context_window import context_window
        from quadriga.models.folder import local_folder
        from quadriga.models.loading import read_config
        from quadriga.models.score_head import padding_token

        model = self.config.model
        trusted = model.trust_remote_code
        path = local_folder(model.path)
        self.tokenizer = tokenizer_of(model)
        self.policy_tokenizer = self.tokenizer if self.policy is None else tokenizer_of(self.policy)
        self.same_tokens = reads_tokens_of(
            self.tokenizer, self.policy_tokenizer, self.config, self.policy_arguments
        )
        self.pad = padding_token(path, model.tokenizer_path or path, trust_remote_code=trusted)
        window = context_window(read_config(path, trust_remote_code=trusted))
        self.longest = None if window is None else window.tokens
        self.engine = build_engine(
            model, self.config.engine, None, head="score", device=self.device
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("reward_model"))
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Compute `rm_scores` [B, R] float32: the score at the last response token, 0 elsewhere.

        Reads the fields `COMPUTE_RM_SCORE.reads`.

        Raises:
            LengthError: a conversation is longer than the reward model can compute.
        """
        from quadriga.data.collate import at_last_token, scored_rows

        rows = scored_rows(self._conversations(data), self.pad, self.longest)
        outputs = self._engine().forward(
            rows, micro_batch_size=self.config.micro_batch_size_per_gpu
        )
        responses = data.batch[fields.RESPONSES]
        tokens = data.batch[fields.ATTENTION_MASK][:, -responses.shape[1] :]
        scores = at_last_token(outputs[VALUES].sum(-1), tokens)
        return DataProto.from_dict(tensors={fields.RM_SCORES: scores})

    def _conversations(self, data: DataProto) -> list[Conversation]:
        """Return the token ids of the reward model for each row."""
        from quadriga.data.chat import encode_conversations

        ids, mask = data.batch[fields.INPUT_IDS], data.batch[fields.ATTENTION_MASK].bool()
        width = ids.shape[1] - data.batch[fields.RESPONSES].shape[1]
        prompts = [
            row[kept].tolist() for row, kept in zip(ids[:, :width], mask[:, :width], strict=True)
        ]
        responses = [
            row[kept].tolist() for row, kept in zip(ids[:, width:], mask[:, width:], strict=True)
        ]
        if self.same_tokens:
            return list(zip(prompts, responses, strict=True))
        texts = self.policy_tokenizer.batch_decode(responses, skip_special_tokens=True)
        chats = list(data.non_tensor_batch[fields.RAW_PROMPT])
        return encode_conversations(self.tokenizer, chats, texts, self.config.chat_template_kwargs)

    def _engine(self) -> TrainEngine:
        if self.engine is None:
            raise WorkerError(
                f"rank {self.rank} with role 'reward_model' has no engine: call init_model first",
                role="reward_model",
                rank=self.rank,
            )
        return self.engine


def tokenizer_of(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the settings of a model name."""
    from quadriga.models.loading import load_tokenizer

    path = model.tokenizer_path or model.path
    return load_tokenizer(path, trust_remote_code=model.trust_remote_code)


def reads_tokens_of(
    own: PreTrainedTokenizerBase,
    policy: PreTrainedTokenizerBase,
    config: RewardModelConfig,
    policy_arguments: TemplateArguments | None,
) -> bool:
    """Return whether a reward model reads the token ids of the policy.

    `policy_arguments`: of the chat template of the policy; None: those of the reward model.
    """
    arguments = config.chat_template_kwargs
    equal = policy_arguments is None or dict(policy_arguments) == dict(arguments)
    return equal and same_tokens(own, policy, arguments)


def same_tokens(
    one: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    arguments: TemplateArguments = NO_ARGUMENTS,
) -> bool:
    """Return whether a conversation of `other` has the tokens that `one` writes for it.

    `arguments`: of the chat templates of both.

    Token ids and chat template must be equal, and the template must write a response as the policy
    generates it: the response, then the end token. Many templates write a line break after it.
    """
    from quadriga.data.chat import Chat, encode_chats

    if one is not other and (
        one.get_vocab() != other.get_vocab() or one.chat_template != other.chat_template
    ):
        return False
    if not one.chat_template:
        return True
    prompt: Chat = [{"role": "user", "content": "1"}]
    chat: Chat = [*prompt, {"role": "assistant", "content": "2"}]
    whole = encode_chats(one, [chat], complete=True, arguments=arguments)
    answer = one.encode("2", add_special_tokens=False)
    return whole[0] == [
        *encode_chats(one, [prompt], arguments=arguments)[0],
        *answer,
        one.eos_token_id,
    ]
