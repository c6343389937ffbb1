"""Hugging Face hub: a repository's config, tokenizer and safetensors as a local folder.

huggingface_hub does the work and keeps its own cache, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they
mean everywhere. Pickle files are never asked for."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event
from typing import Any

from runtime.api import LoadProgress
from runtime.weights.builtin import FetchCancelled, FetchError
from runtime.weights.rules import Report, WeightsError
from runtime.weights.sentence_transformers import MODULES, files_of_modules

_ALWAYS = ["*.json", "*.jinja", "tokenizer.model"]
_NEVER = ["*/*", "consolidated*.safetensors"]  # other formats of the same weights


def download(
    repo_id: str,
    revision: str | None,
    report: Report,
    cancel: Event,
    *,
    weights: bool = True,
    endpoint: str | None = None,
) -> Path:
    """The snapshot's folder. Without `weights`, only what describes the model.

    Raises FetchError."""
    # Importing it costs a third of a second that nobody pays who does not use the hub.
    from huggingface_hub import snapshot_download

    report(LoadProgress("download"))
    bar = _progress_bar(report, cancel)
    try:
        folder = snapshot_download(
            repo_id, revision=revision, endpoint=endpoint, ignore_patterns=_NEVER,
            allow_patterns=[*_ALWAYS, "*.safetensors"] if weights else _ALWAYS, tqdm_class=bar,
        )  # fmt: skip
        if below := _below(Path(folder), weights=weights):
            snapshot_download(repo_id, revision=revision, endpoint=endpoint, allow_patterns=below, tqdm_class=bar)
    except (FetchCancelled, WeightsError):
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise FetchError(_why(repo_id, revision, error)) from error
    except Exception as error:
        # httpx and xet raise errors of their own, which are no OSErrors.
        raise FetchError(f"{repo_id} could not be downloaded: {type(error).__name__}: {error}") from error
    return Path(folder)


def _below(folder: Path, *, weights: bool) -> list[str]:
    """Return the files needed in the folders of sentence-transformers' modules."""
    if not (folder / MODULES).exists():
        return []
    return [name for name in files_of_modules(folder) if weights or not name.endswith(".safetensors")]


def _why(repo_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"{repo_id} is gated: ask for access at https://huggingface.co/{repo_id} and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo_id} is not on the Hugging Face hub, or it is private and HF_TOKEN is not set"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return f"{repo_id} is not (completely) in the local cache, and HF_HUB_OFFLINE is set"
        return f"{repo_id} is not in the local cache, and the hub cannot be reached: {error.__cause__ or error}"
    return f"{repo_id} could not be downloaded: {error}"


def _progress_bar(report: Report, cancel: Event) -> type[Any]:
    """A tqdm that draws nothing, reports bytes, and lets a cancelled download stop: the hub updates it from its threads."""
    from tqdm import tqdm

    counted: dict[int, tuple[int, int]] = {}

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # tqdm's watching thread would outlive the download

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            options |= {"file": open(os.devnull, "w"), "disable": False, "mininterval": 0.1}  # noqa: SIM115
            super().__init__(*args, **options)

        def display(self, *_: object, **__: object) -> None:
            if self.unit == "B":
                # The hub shows bytes received and bytes written in two bars, whose totals grow as it goes.
                counted[id(self)] = (int(self.n), int(self.total or 0))
                done, total = (max(column) for column in zip(*counted.values(), strict=True))
                report(LoadProgress("download", min(done, total), total, "B"))

        def update(self, n: float | None = 1) -> bool | None:
            if cancel.is_set():
                raise FetchCancelled
            return super().update(n)

        def close(self) -> None:
            super().close()
            self.fp.close()

    return Bar
