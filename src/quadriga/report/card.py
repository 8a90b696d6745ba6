"""The card of a trained model: `model/README.md` of a run folder, as the hub shows it.

It says from which model, with which data and settings the model was trained, what the metrics were,
and with which versions. It is made for others to read: of the paths of this machine it has the last
part, and no command line, host or folder of the run.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download

from quadriga import __version__
from quadriga.config.hub import HUB_PREFIX
from quadriga.config.schema import RunConfig
from quadriga.config.secrets import mask_secrets
from quadriga.files import replacing
from quadriga.models.folder import local_folder
from quadriga.observability.metrics import describe_metric
from quadriga.observability.run_folder import RunFolder
from quadriga.report.collect import collect_runs

_METRICS = (
    "reward/mean", "val/accuracy", "val/score", "val/loss", "sft/loss", "rm/loss", "rm/accuracy",
    "actor/kl_loss", "response_length/mean",
)  # fmt: skip
_VERSIONS = ("Python", "torch", "transformers", "ray", "vllm", "sglang", "peft")
_LICENSE = ("license", "license_name", "license_link")
_PRIVATE = {f"trainer.{name}" for name in (*RunConfig.PATHS, "push_to_hub")}
_DATA = f"{HUB_PREFIX}datasets/"


def write_card(folder: Path) -> None:
    """Write the card of the model of a run, with the learning curve beside it."""
    files = RunFolder(folder)
    text = mask_secrets(card(collect_runs([folder])["runs"][0], curve=files.plot.is_file()))
    if files.plot.is_file():
        shutil.copyfile(files.plot, files.model / files.plot.name)
    with replacing(files.model / "README.md") as fresh:
        fresh.write_text(text, encoding="utf-8")


def card(run: Mapping[str, Any], *, curve: bool) -> str:
    """Return the card of a run as `collect_runs` returns it. `curve`: show the learning curve."""
    settings, kind = run["settings"], run["kind"]
    section = "actor_rollout_ref.model" if kind == "train" else "model"
    base = settings[f"{section}.path"]
    data = list(map(str, json.loads(settings.get("data.train_files", "[]"))))
    method = {"sft": "supervised fine-tuning", "rm": "a loss on pairs of responses"}.get(
        kind, f"{settings.get('algorithm.adv_estimator')} (reinforcement learning)"
    )
    sets = {"/".join(f.removeprefix(_DATA).split("/")[:2]) for f in data if f.startswith(_DATA)}
    head = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-classification" if kind == "rm" else "text-generation",
        base_model=base.removeprefix(HUB_PREFIX) if base.startswith(HUB_PREFIX) else None,
        datasets=sorted(sets) or None,
        tags=["quadriga", settings.get("algorithm.adv_estimator", kind)],
        **base_license(base),
    )
    environment = (run["environments"] or [{}])[-1]
    versions = [f"{name} {environment[name]}" for name in _VERSIONS if name in environment]
    changed = [f"{k}={_public(settings[k])}" for k in run["changed"] if k not in _PRIVATE]
    parts = [
        f"---\n{head.to_yaml()}\n---\n\n# {settings['trainer.experiment_name']}",
        f"`{_public(base)}` was trained with {method} on "
        f"{', '.join(f'`{_public(file)}`' for file in data) or 'data of a program'}.",
        _metrics(run),
        *(["![Reward and validation score over the steps](learning_curve.png)"] if curve else []),
        "## Settings\n\nThose that are not the defaults:",
        "\n".join(f"    {' '.join(line.split())}" for line in changed),
        f"Trained with {', '.join((f'Quadriga {__version__}', *versions))}.",
    ]
    return "\n\n".join(parts) + "\n"


def _metrics(run: Mapping[str, Any]) -> str:
    """Return a table of the first, last, least and greatest values of some metrics."""
    lines = ["| metric | first | last | least | greatest | |", "|---|---|---|---|---|---|"]
    for name in _METRICS:
        if found := [value for value in run["metrics"].get(name, ()) if value is not None]:
            info = describe_metric(name)
            meaning = "" if info is None else info.meaning.replace("|", "\\|")
            numbers = (found[0], found[-1], min(found), max(found))
            lines.append(f"| {name} | {' | '.join(f'{n:.4g}' for n in numbers)} | {meaning} |")
    steps = run["steps"][-1] if run["steps"] else 0
    return "\n".join([f"{steps} steps.\n", *lines])


def base_license(model: str) -> dict[str, Any]:
    """Return what the card of a model says about its license, for the card of one trained from it;
    nothing, if it has no card or it cannot be read."""
    try:
        if model.startswith(HUB_PREFIX):
            path = hf_hub_download(model.removeprefix(HUB_PREFIX), "README.md")
        else:
            path = str(local_folder(model) / "README.md")
        found = ModelCard(Path(path).read_text("utf-8"), ignore_metadata_errors=True).data
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {key: found.get(key) for key in _LICENSE if found.get(key)}


def _public(text: str) -> str:
    """Return a setting without the folders of this machine that are in it."""
    if text.startswith("[") and "/" in text:
        return f"[{', '.join(_public(str(one)) for one in json.loads(text))}]"
    near = "/" in text and "://" not in text
    return PurePath(text).name if near and text.startswith(("/", "~", ".")) else text
