"""`quadriga train` in this process. Prints its peak memory in bytes as the last line, as JSON.

python benchmarks/grpo/measured_train.py cpu SETTING=VALUE …
"""

from __future__ import annotations

import json
import sys

from trl_peer import peak_memory

from quadriga.cli.main import main

if __name__ == "__main__":
    status = main(["train", *sys.argv[2:]])
    print(json.dumps({"peak_memory": peak_memory(sys.argv[1])}))
    sys.exit(status)
