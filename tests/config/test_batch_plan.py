"""`batch_plan` against numbers computed by hand."""

from quadriga.config.loading import load_config
from quadriga.config.plan import batch_plan
from quadriga.config.schema import TrainConfig

OVERRIDES = (
    "data.train_batch_size=32", "data.max_prompt_length=100", "data.max_response_length=28",
    "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_epochs=3",
    "trainer.n_gpus_per_node=2", "trainer.nnodes=2", "trainer.total_epochs=2",
)  # fmt: skip


def plan(*more, **options):
    return batch_plan(load_config(TrainConfig, [*OVERRIDES, *more]), **options)


def test_numbers_from_prompts_to_optimizer_steps():
    numbers = plan("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5")
    assert (numbers.sequences, numbers.ranks, numbers.sequences_per_rank) == (32 * 8, 4, 64)
    actor = numbers.actor
    assert (actor.mini_batch_sequences, actor.mini_batch_per_rank) == (8 * 8, 16)
    assert (actor.mini_batches, actor.optimizer_steps) == (32 / 8, 4 * 3)
    assert (actor.micro_batch, actor.micro_batches) == (5, 4)  # 5 + 5 + 5 + 1


def test_both_limits_of_a_micro_batch_hold():
    """A rank has 16 sequences of 128 tokens."""
    actor = "actor_rollout_ref.actor"
    tokens = f"{actor}.engine.max_tokens_per_micro_batch=300"
    for size, micro_batches in ((5, 8), (1, 16)):  # two sequences fit 300 tokens
        numbers = plan(f"{actor}.ppo_micro_batch_size_per_gpu={size}", tokens).actor
        assert (numbers.micro_batch, numbers.max_tokens) == (size, 300)
        assert numbers.micro_batches == micro_batches
    text = plan(f"{actor}.ppo_micro_batch_size_per_gpu=5", tokens).text()
    assert "at most 8, of up to 5 sequences and 300 tokens each" in text
    text = plan(f"{actor}.ppo_micro_batch_size_per_gpu=5", f"{actor}.engine.use_dynamic_bsz=false")
    assert "4, of up to 5 sequences each" in text.text()


def test_critic_uses_the_batch_sizes_of_the_actor_by_default():
    assert plan().critic.optimizer_steps == 12
    own = plan("critic.ppo_mini_batch_size=16", "critic.ppo_epochs=1")
    assert own.critic.optimizer_steps == 2


def test_without_a_mini_batch_size_a_step_is_one_mini_batch():
    numbers = plan("actor_rollout_ref.actor.ppo_mini_batch_size=null", "data.train_batch_size=8")
    assert (numbers.actor.mini_batch_prompts, numbers.actor.mini_batches) == (8, 1)
    assert numbers.critic.mini_batches == 1


def test_each_role_counts_its_own_optimizer_steps():
    numbers = plan("critic.ppo_mini_batch_size=16", "critic.ppo_epochs=1", "critic.warmup_steps=4")
    # Actor: (10 − 4) steps × 4 mini-batches × 3 epochs. Critic: 10 steps × 2 mini-batches.
    assert numbers.optimizer_steps(10) == (72, 20)
    assert numbers.optimizer_steps(3) == (0, 6)


def test_total_steps_from_settings_or_data_size():
    assert plan().total_steps is None
    assert plan(train_rows=100).total_steps == 6  # 2 epochs × (100 // 32)
    assert plan("trainer.total_training_steps=5", train_rows=100).total_steps == 5


def test_text_shows_the_arithmetic():
    text = plan("trainer.total_training_steps=10").text()
    for words in (
        "256 = 32 prompts × 8 responses", "64 = 256 / 4 ranks", "\ncritic\n",
        "8 prompts = 64 sequences = 16 on each rank",
        "12 per step = 32 / 8 mini-batches × 3 epochs",
        "10 steps, 120 optimizer steps of the actor and 120 of the critic",
    ):  # fmt: skip
        assert words in text
    assert "\ncritic\n" not in plan().text(with_critic=False)
