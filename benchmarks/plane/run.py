"""Run one case of one system: `run.py SYSTEM CASE MEGABYTES RANKS TIMES`. Prints one JSON line."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

MARK = "RESULT "


def main() -> None:
    system, case, *numbers = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    found = importlib.import_module(f"plane.{system}").CASES[case](*map(int, numbers))
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    main()
