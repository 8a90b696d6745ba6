"""`python -m verl.trainer.main_ppo key=value …`: `quadriga train --verl FILE key=value …`.

FILE is `ppo_trainer.yaml` beside this file, or what `--config-path` and `--config-name` say. A path
is relative to the current folder; `config` is the folder of this file, as that of verl's own files.
"""

import argparse
import sys
from pathlib import Path

from quadriga.cli.main import main

OWN = Path(__file__).parent

parser = argparse.ArgumentParser("verl.trainer.main_ppo", add_help=False, allow_abbrev=False)
parser.add_argument("--config-path", "-cp", type=Path, default=OWN)
parser.add_argument("--config-name", "-cn", default="ppo_trainer")
parser.add_argument("--cfg", "-c", choices=["job"])
options, rest = parser.parse_known_args()
folder = OWN if options.config_path in (Path("config"), OWN) else options.config_path
file = folder / f"{options.config_name.removesuffix('.yaml')}.yaml"
shown = ["--print-config"] if options.cfg else []
sys.exit(main(["train", "--verl", str(file), *shown, *rest]))
