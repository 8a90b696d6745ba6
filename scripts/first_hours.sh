#!/usr/bin/env bash
# Three first hours: of someone who comes from TRL, from verl, and with a dataflow of their own. Each
# command is one that the pages name; it is shown with its output and its seconds. The output is
# kept in a file for each of the three, without the path of the folder, and a picture of the report.
#
#   scripts/first_hours.sh PYTHON OUTPUT [trl|verl|dataflow …]
#
# PYTHON has the wheel of this checkout and nothing of its sources:
#   pip wheel --no-deps -w dist . ./packages/verl-alias
#   python -m venv first && first/bin/pip install -c constraints.txt dist/*.whl
#
# TRL_PYTHON, if it is set, has TRL and nothing of Quadriga: the same task is trained with it, too.
set -uo pipefail
python=$(realpath -s "$1") output=$(realpath "$2"); shift 2
checkout=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PATH="$(dirname "$python"):$PATH" COLUMNS=100 HF_HUB_OFFLINE=1
unset PYTHONPATH
mkdir -p "$output"

# shown [fails] COMMAND…: print the command, its output and its seconds.
shown() {
  local expected=0 status=0 TIMEFORMAT="[%0R s, %0U s of CPU]"
  if [[ $1 == fails ]]; then expected=1; shift; fi
  echo "\$ ${*/"$1"/"${1##*/}"}"
  { time "$@" 2>&1 || status=$?; } 2>&1
  echo "[exit code $status]"; echo
  [[ $((status != 0)) == "$expected" ]] || failed="$failed $hour: $*;"
}

trl() {
  shown quadriga data make output=data model_output=base sft_size=512 max_number=5 hidden_size=32
  cat >task.py <<'END'
import pyarrow.parquet as pq


def score(completions, answer, **kwargs):  # right, and eight characters long
    texts = [one[0]["content"] for one in completions]
    return [t.strip().endswith(a) - abs(8 - len(t)) / 8 for t, a in zip(texts, answer)]


table = pq.read_table("data/train.parquet").to_pylist()
rows = [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in table]
END
  cat >warm.py <<'END'
import quadriga

quadriga.SFT("base", "data/sft.parquet", steps=40, batch_size=16, lr=5e-3, folder="warm").train()
END
  cat >train.py <<'END'
import quadriga
from task import rows, score

run = quadriga.GRPO("warm/model", score, rows, steps=12, batch_size=8, responses=8, lr=2e-3,
                    max_response_length=24, folder="run").train()
print([round(row["reward/mean"], 2) for row in run.history])
END
  cat >ask.py <<'END'
import quadriga

print(quadriga.generate("run/model", "What is 2 + 3?", max_response_length=24))
END
  cat >peer.py <<'END'
from task import rows, score
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

settings = GRPOConfig(
    "peer", max_steps=12, per_device_train_batch_size=64, num_generations=8, learning_rate=2e-3,
    max_completion_length=24, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
    save_strategy="no", disable_tqdm=True)
trainer = GRPOTrainer("warm/model", score, settings, Dataset.from_list(rows))
trainer.train()
trainer.save_model("peer/model")
print([round(row["reward"], 2) for row in trainer.state.log_history if "reward" in row])
END
  cat >names.py <<'END'
import ast
import sys

for file in sys.argv[1:]:
    nodes = [*ast.walk(ast.parse(open(file).read()))]
    settings = {one.arg for node in nodes if isinstance(node, ast.Call) for one in node.keywords}
    names = {one.name for node in nodes if isinstance(node, ast.ImportFrom)
             if node.module in ("trl", "datasets") for one in node.names}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)
              if ast.unparse(node).startswith(("quadriga.", "run.", "trainer."))}
    print(f"{file}: {len(names)} names {sorted(names)}, {len(settings)} settings {sorted(settings)}")
END
  sed 's/responses=8/num_generations=8/' train.py >typo.py
  shown python warm.py
  shown fails python typo.py
  shown python train.py
  shown python ask.py
  shown quadriga report run
  sed "s|$work/trl/||g" run/report.html >shown.html
  ! command -v chromium >/dev/null || chromium --headless --no-sandbox --disable-gpu \
    --virtual-time-budget=4000 --window-size=1000,800 --user-data-dir="$work/browser" \
    --screenshot="$output/report.png" "file://$PWD/shown.html" >/dev/null 2>&1
  shown ls run run/model
  shown python names.py train.py peer.py
  [[ -z ${TRL_PYTHON:-} ]] || shown "$TRL_PYTHON" peer.py
}

verl() {
  shown quadriga data make output=data model_output=base max_number=5 hidden_size=32
  cat >reward.py <<'END'
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip().endswith(ground_truth))
END
  local words=(
    algorithm.adv_estimator=grpo data.train_files=data/train.parquet data.val_files=data/test.parquet
    data.train_batch_size=8 data.max_prompt_length=128 data.max_response_length=32
    actor_rollout_ref.model.path=base actor_rollout_ref.actor.optim.lr=1e-3
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4
    custom_reward_function.path=reward.py trainer.logger=[console] trainer.n_gpus_per_node=1
    trainer.nnodes=1 trainer.total_training_steps=3 trainer.default_local_dir=run
  )
  # The last one does not exist: it is named among those that are ignored.
  shown python -m verl.trainer.main_ppo "${words[@]}" actor_rollout_ref.rollout.nn=4
  shown quadriga report run
}

dataflow() {
  cp "$checkout"/examples/controller/{two_policies,tree_search}.py .
  sed -n '/^```python/,/^```/{/^```/d;p}' "$checkout/docs/concepts/own_loop.md" >loop.py
  shown python loop.py
  shown python two_policies.py
  shown python two_policies.py ray
  shown python tree_search.py
}

# Without the path of the folder; a row of a table keeps its width.
shorter='BEGIN { $| = 1; binmode $_, ":utf8" for STDIN, STDOUT; $work = $ENV{WORK}; $hour = "$work/[a-z]+" }
  $width = length; s|$hour/||g; s|$hour|.|g; s|$work|\x{2026}|g; s|/[^ "]*/site-packages/||g;
  $left = $width - length; s/(?=\x{2502}$)/" " x $left/e'
export WORK=$work
failed=""
for hour in "${@:-trl verl dataflow}"; do for hour in $hour; do
  mkdir -p "$work/$hour" && cd "$work/$hour" || exit 1
  "$hour" > >(perl -pe "$shorter" | tee "$output/$hour.txt")
done; done
wait
[[ -z $failed ]] || { echo "not as expected:$failed"; exit 1; }
