"""Files of models on Hugging Face: from its local cache, and over the network where that is asked for.

``huggingface_hub`` knows where the cache is; without it nothing is found there. Weights are never fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from capture_planner.errors import CapturePlannerError

_FETCHES: ContextVar[bool] = ContextVar("fetches", default=False)


@contextmanager
def fetching() -> Iterator[None]:
    """Let ``find`` fetch what the cache lacks, inside this block."""
    token = _FETCHES.set(True)
    try:
        yield
    finally:
        _FETCHES.reset(token)


def is_name(text: str) -> bool:
    """Whether a text has the form of a model's name, ``owner/model``."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text, re.ASCII) is not None


def find(name: str, file: str) -> Path | None:
    """Return a file of a model in the cache, or None where it is not there.

    :param name: ``owner/model``; a text of another form is in no cache.
    :param file: such as ``config.json``.

    Raises ``CapturePlannerError`` inside ``fetching`` where the model cannot be reached; a model that lacks the
    file is no error.
    """
    # The library raises for other forms.
    if not is_name(name):
        return None
    try:
        from huggingface_hub import constants
    except ImportError:
        if _FETCHES.get():
            raise CapturePlannerError("--download needs huggingface_hub; install it") from None
        return None
    # The rest of the library takes most of a second to import.
    if not _FETCHES.get() and not (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        return None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cached = try_to_load_from_cache(name, file)
    if isinstance(cached, str):
        return Path(cached)
    # Not None: the cache remembers that the model lacks the file.
    if cached is not None or not _FETCHES.get():
        return None
    try:
        return Path(hf_hub_download(name, file))
    except Exception as error:
        # The model lacks the file. LocalEntryNotFoundError is a subclass, and means that the network failed.
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CapturePlannerError(
            f"--download: {file} of {name} cannot be fetched: {reason}; name a folder with the model's config.json, or "
            "leave --download out"
        ) from error
