"""Files and repositories of the Hugging Face hub, through huggingface_hub.

    data_file("hf://datasets/owner/name/train.parquet")   a data file, in the cache of the hub
    check_repository("owner/name")                        whether a run may push its model there
    push("owner/name", folder)                            the files of a folder, in one commit

The token is HF_TOKEN, or the one that `hf auth login` has saved; `HF_ENDPOINT` names another hub.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from quadriga.config.secrets import mask_secrets
from quadriga.errors import StoreError, first_line

HUB_PREFIX = "hf://"
_DATA_FILE = re.compile(
    r"hf://datasets/(?P<repo>[^/@\s]+/[^/@\s]+)(@(?P<at>refs/(convert|pr)/[^/]+|[^/]+))?(/(?P<file>.+))?"
)
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_SHOWN = 5  # files of a repository in a message
_WAITS_S = (1.0, 5.0)  # between the attempts of a push; those of one request are the hub client's
_STALE = ["*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"]


def data_file(url: str) -> Path:
    """Return a file of a data set in the cache of the hub; download it if it has changed.

    Raises:
        StoreError: the url names no file of a data set, or it cannot be downloaded.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RemoteEntryNotFoundError

    found = _DATA_FILE.fullmatch(url)
    if found is None:
        text = f"{url} is no data file of the hub; write hf://datasets/owner/name/file.parquet"
        raise StoreError(text, path=url)
    repo, file, at = found["repo"], found["file"], found["at"] and unquote(found["at"])
    with hub_errors(f"cannot read {url}"):
        api = HfApi()
        if file:
            try:
                return Path(api.hf_hub_download(repo, file, repo_type="dataset", revision=at))
            except RemoteEntryNotFoundError:
                pass
        names = api.list_repo_files(repo, repo_type="dataset", revision=at)
    files = [name for name in names if name.endswith((".parquet", ".jsonl", ".json"))]
    shown = ", ".join(files[:_SHOWN]) + (", …" if files[_SHOWN:] else "")
    what = "the data set has no such file" if file else "it names a data set; add one of its files"
    raise StoreError(f"cannot read {url}: {what}; it has {shown or 'no data files'}", path=url)


def check_repository(repo: str) -> None:
    """Check that the token may write to a repository of models, or make it.

    Raises:
        StoreError: says what is wrong with the name, the token or the hub.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if not _REPOSITORY.fullmatch(repo):
        raise StoreError(f"cannot push to {repo}: expected owner/name", path=repo)
    api = HfApi()
    with hub_errors(f"cannot push to {repo}"):
        user = api.whoami()
        try:
            api.auth_check(repo, write=True)
            return
        except RepositoryNotFoundError as error:
            if isinstance(error, GatedRepoError):
                raise
    names = [str(one.get("name")) for one in (user, *user.get("orgs", ()))]
    if repo.split("/")[0] not in names:
        may = f"it may write to {', '.join(f'{name}/…' for name in names)}"
        raise StoreError(f"cannot push to {repo}: HF_TOKEN is of {names[0]}; {may}", path=repo)
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        text = f"cannot push to {repo}: HF_TOKEN may only read; make a token that may write"
        raise StoreError(text, path=repo)


def push(repo: str, folder: Path) -> str:
    """Write the files of a folder to a repository of models, which is made, private, if there is
    none. Weights that it has and the folder lacks are deleted. Return the address of the commit.

    Raises:
        StoreError: the hub refuses it, or does not answer. The repository is as it was.
    """
    from huggingface_hub import HfApi

    api, text = HfApi(), "Model of a Quadriga run"
    for wait_s in (*_WAITS_S, None):
        try:
            with hub_errors(f"cannot push to {repo}"):
                api.create_repo(repo, private=True, exist_ok=True)
                return api.upload_folder(
                    repo_id=repo, folder_path=folder, commit_message=text, delete_patterns=_STALE
                ).commit_url
        except StoreError:
            if wait_s is None:
                raise
            time.sleep(wait_s)
    raise AssertionError


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Raise each error of the hub as `StoreError`: `what`, and the reason in one line."""
    try:
        yield
    except Exception as error:  # it passes on those of its HTTP client and of threads
        text = mask_secrets(f"{what}: {hub_reason(error)}")
        raise StoreError(text, path=what.split()[-1]) from error


def hub_reason(error: BaseException) -> str:
    """Return in one line why the hub has not done what it was asked, and what to do."""
    from huggingface_hub import HfApi, errors

    reasons: dict[type[Exception], str] = {
        errors.GatedRepoError: "its owner must let you in: ask on its page, then set HF_TOKEN",
        errors.RepositoryNotFoundError: "the hub has no such repository, or it "
        "is private: check the name, or set HF_TOKEN to a token that may read it",
        errors.RevisionNotFoundError: "the repository has no such revision",
        errors.LocalTokenNotFoundError: "there is no token; set HF_TOKEN, or call `hf auth login`",
        errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set",
    }
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for one in chain:
        if reason := next((text for kind, text in reasons.items() if isinstance(one, kind)), None):
            return reason
    for one in chain:
        if isinstance(one, errors.HfHubHTTPError):
            status = one.response.status_code
            said = one.server_message or one.response.reason_phrase
            remedy = "; set HF_TOKEN to a token that may" if status in (401, 403) else ""
            return first_line(ValueError(f"the hub answers {status} {said}")) + remedy
    if isinstance(error, ValueError):  # of a name that cannot be one
        return first_line(error)
    return f"the hub at {HfApi().endpoint} does not answer: {first_line(chain[-1])}"
