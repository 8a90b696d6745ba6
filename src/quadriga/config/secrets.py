"""Find and mask secrets in settings and in text, by their names, values and forms.

Three things make a text a secret:

    its name     a setting or a variable called `hub_token`, `apiKey`, `DB_PASSWORD`, …
    its value    the value of an environment variable, or of a setting, with such a name; it is
                 masked wherever it occurs, also as text in quotes
    its form     a user and password in a URL, or a key with the prefix of a known service
"""

import functools
import json
import logging
import os
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from quadriga.errors import printable

MASK = "***"
MIN_LENGTH = 6  # a shorter value ("1", "true", "root") occurs in ordinary text

# The last words of a name: `hub_token`, but not `max_tokens_per_micro_batch`.
_NAME = re.compile(
    r"(^|_)(token|passwords?|passwd|pwd|pass|passphrase|passcode|pin_code|secret|secrets|"
    r"credential|credentials|creds|auth|authorization|bearer|cookie|jwt|dsn|pat|webhook|webhook_url|"
    r"connection_string|conn_str|signature|salt|"
    r"(api|access|secret|private|encryption|signing|license|account|storage|service|master|"
    r"shared|auth|ssh|session|webhook|deploy|client)_?keys?|apikeys?|"
    r"(token|password|secret|key)_(value|id|string|base64|b64))(_?\d+)?$"
)
# The word before a capital: `apiKey` → `api_Key`, `HFToken` → `HF_Token`.
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_FORMS = re.compile(
    r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]{1,20}://)[^\s/@:'\"]{0,200}:[^\s/'\"]{1,500}@"
    r"|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\b(gh[pousr]_|github_pat_)[A-Za-z0-9_]{20,}"
    r"|\bglpat-[A-Za-z0-9_-]{16,}|\bxox[a-z]-[A-Za-z0-9-]{10,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b"
    # The search for a token of three parts begins at the first character of a part only, and does
    # not give characters back: its time is proportional to the length of the text.
    r"|\bAIza[A-Za-z0-9_-]{30,}"
    r"|(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{13,}+\.eyJ[A-Za-z0-9_-]{10,}+\.[A-Za-z0-9_-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_FORM_MARKS = ("://", "hf_", "sk-", "gh", "glpat-", "xox", "AKIA", "ASIA", "AIza", "eyJ", "-----B")

_NAME_OF_FILE = re.compile(r"(?i)cred")
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\x21-\x7e]{16,}")

_values_of_settings: set[str] = set()


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a setting, a variable or a key of a dict has the name of a secret."""
    snake = re.sub(r"[^a-z0-9]+", "_", _WORD.sub("_", name).lower()).strip("_")
    return bool(_NAME.search(snake))


def remember_secret(value: str) -> None:
    """Mask a value in every text from now on; a value below `MIN_LENGTH` characters is not."""
    if len(value) >= MIN_LENGTH:
        _values_of_settings.add(value)


def mask_secrets(text: str) -> str:
    """Return a text without the values of secrets and without keys of known forms."""
    return masker()(text)


def masker() -> Callable[[str], str]:
    """Return `mask_secrets` for many texts: the values of secrets are looked up once."""
    # The values to mask, longest first: one may be a part of another.
    values = _values_to_mask(tuple(os.environ.items()), frozenset(_values_of_settings))
    return functools.partial(_masked, values)


def _masked(values: tuple[str, ...], text: str) -> str:
    for value in values:
        if value in text:
            text = text.replace(value, MASK)
    if any(mark in text for mark in _FORM_MARKS):
        text = _FORMS.sub(lambda m: f"{m['scheme']}{MASK}@" if m["scheme"] else MASK, text)
    return text


def shown(text: str) -> str:
    """Return a text as it is printed: secrets are masked, and what would control a terminal is
    escaped. All texts of data, models, files and programs pass through it."""
    return printable(mask_secrets(text))


def mask_values(value: Any, name: str = "") -> Any:
    """Return plain values with every secret masked: texts in dicts and lists, by name and value."""
    return _masked_values(value, name, masker())


def _masked_values(value: Any, name: str, masked: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _masked_values(item, f"{key}", masked) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_masked_values(item, name, masked) for item in value])
    if isinstance(value, str):
        return MASK if value and is_secret_name(name) else masked(value)
    is_number = isinstance(value, int | float) and len(str(value)) >= MIN_LENGTH
    return MASK if is_number and is_secret_name(name) else value


def mask_logs() -> None:
    """Write the log records that this process creates from now on as `shown` does."""
    create = logging.getLogRecordFactory()
    if getattr(create, "masks_secrets", False):
        return

    def create_masked(*args: object, **kwargs: object) -> logging.LogRecord:
        return _mask_record(create(*args, **kwargs))

    create_masked.masks_secrets = True  # type: ignore[attr-defined]  # a mark on the function
    logging.setLogRecordFactory(create_masked)


def _mask_record(record: logging.LogRecord) -> logging.LogRecord:
    try:
        message = record.getMessage()
    except Exception:  # the arguments do not fit the message; `logging` reports that
        return record
    masked = shown(message)
    if masked != message:
        record.msg, record.args = masked, None
    if record.exc_info and record.exc_info[0] is not None:
        # A formatter writes this text instead of formatting the exception again.
        trace = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        masked = shown(trace)
        if masked != trace:
            record.exc_text = masked
    return record


@functools.lru_cache(maxsize=1)
def _values_to_mask(
    environment: tuple[tuple[str, str], ...], of_settings: frozenset[str]
) -> tuple[str, ...]:
    found = {value for name, value in environment if _is_secret_variable(name, value)}
    found |= of_settings
    # As they are written in errors and in JSON, where "a\n" has a backslash.
    found |= {
        written[1:-1]
        for value in found
        if not (value.isascii() and value.isalnum())
        for written in (repr(value), ascii(value), json.dumps(value))
    }
    return tuple(sorted(found, key=len, reverse=True))


def _is_secret_variable(name: str, value: str) -> bool:
    # PWD is the working directory.
    if name in ("PWD", "OLDPWD") or len(value) < MIN_LENGTH:
        return False
    if value.startswith("/") and (_NAME_OF_FILE.search(name) or os.path.exists(value)):
        return False  # a path, such as that of a file with credentials
    return is_secret_name(name) or bool(name.endswith("_KEY") and _RANDOM.fullmatch(value))
