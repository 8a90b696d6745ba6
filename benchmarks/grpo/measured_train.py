"""`quadriga train` in this process. The last line is JSON: bytes that it used at most, and planned.

python benchmarks/grpo/measured_train.py cpu SETTING=VALUE …
"""

from __future__ import annotations

import json
import sys

from trl_peer import peak_memory

from quadriga.cli.main import main
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.trainer.checks.memory import train_plan

if __name__ == "__main__":
    device, *settings = sys.argv[1:]
    status = main(["train", *settings])
    if status == 0:
        planned = train_plan(load_config(TrainConfig, settings), device).needed
        print(json.dumps({"peak_memory": peak_memory(device), "planned_memory": planned}))
    sys.exit(status)
