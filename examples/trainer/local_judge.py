"""A file of a user: a generative judge as a role, for `algorithm.user_files`.

Settings: `judge.model_path`, `judge.policy_path` (whose tokenizer reads the responses),
`judge.prompt`, `judge.max_tokens`, and `placement.judge` for its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from quadriga.algorithms.shaping import add_to_last_token
from quadriga.protocol import DataProto, fields
from quadriga.rewards.judges import filled, last_number
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer.roles import RoleStage, register_role
from quadriga.trainer.roles.registry import Role
from quadriga.workers.runtime import RankRuntime, prepare_rank

READS = (fields.RESPONSES, fields.RESPONSE_MASK, fields.RAW_PROMPT)


@dataclass(frozen=True)
class JudgeConfig:
    """The section `judge` of the settings."""

    model_path: str = ""
    policy_path: str = ""
    prompt: str = "Question: {question}\nAnswer: {response}\nRate the answer from 0 to 10."
    max_tokens: int = 64  # of a verdict


class JudgeWorker(Worker):
    """Lets a model write a verdict on each response."""

    def __init__(self, config: JudgeConfig, runtime: RankRuntime) -> None:
        super().__init__()
        self.config = config
        self.device = prepare_rank(runtime)  # threads, seed, process group
        self.model: PreTrainedModel | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and the tokenizers."""
        path = self.config.model_path
        self.model = AutoModelForCausalLM.from_pretrained(path).to(self.device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.policy_tokenizer = AutoTokenizer.from_pretrained(self.config.policy_path)

    def verdicts(self, questions: list[str], responses: list[str]) -> list[float | None]:
        """Return the verdict on each response; None: none can be read."""
        assert self.model is not None, "init_model comes first"
        chats = [
            [
                {
                    "role": "user",
                    "content": filled(self.config.prompt, {"question": q, "response": r}),
                }
            ]
            for q, r in zip(questions, responses, strict=True)
        ]
        given = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(self.device)
        most = self.config.max_tokens
        written = self.model.generate(**given, max_new_tokens=most, do_sample=False)
        new = written[:, given["input_ids"].shape[1] :]
        return [last_number(t) for t in self.tokenizer.batch_decode(new, skip_special_tokens=True)]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @torch.no_grad()
    def compute_score(self, data: DataProto) -> DataProto:
        """Return `token_level_scores` [B, R] float32; a response without a verdict scores 0."""
        mask = data.batch[fields.RESPONSE_MASK]
        ids = [
            row[kept.bool()] for row, kept in zip(data.batch[fields.RESPONSES], mask, strict=True)
        ]
        questions = [chat[-1]["content"] for chat in data.non_tensor_batch[fields.RAW_PROMPT]]
        responses = self.policy_tokenizer.batch_decode(ids, skip_special_tokens=True)
        found = self.verdicts(questions, responses)
        scores_B = torch.tensor([verdict or 0.0 for verdict in found])
        unread = sum(verdict is None for verdict in found) / len(found)
        return DataProto.from_dict(
            tensors={
                fields.TOKEN_LEVEL_SCORES: add_to_last_token(
                    torch.zeros(mask.shape), mask, scores_B
                )
            },
            meta_info={"metrics": {"score": float(scores_B.mean()), "unread": unread}},
        )


register_role(
    Role.add("Judge"),
    worker=JudgeWorker,
    settings=JudgeConfig,
    stages=[
        # It writes the scores before `score_responses`, which then calls no rule function.
        RoleStage("compute_score", reads=READS, writes=(fields.TOKEN_LEVEL_SCORES,),
                  before="score_responses", in_validation=True)
    ],
)  # fmt: skip
