"""Downloads from the Hugging Face hub: a repository's config, tokenizer and safetensors as a local folder, or one of its .gguf
files.

Uses huggingface_hub and its cache, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have their usual meaning. Pickle files are
never downloaded."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from runtime.api import LoadProgress
from runtime.weights.builtin import FetchCancelled, FetchError
from runtime.weights.names import MODULES
from runtime.weights.rules import Report, WeightsError
from runtime.weights.sentence_transformers import files_of_modules

_HASH = re.compile("[0-9a-f]{40}([0-9a-f]{24})?")
_CHUNK = 1 << 20
_ALWAYS = ["*.json", "*.jinja", "tokenizer.model"]
_NEVER = ["*/*", "consolidated*.safetensors"]  # other formats of the same weights
_NOT_THE_MODEL = ["mmproj*", "*/*"]  # image encoders, which a text model's .gguf does not need


def download(
    repo_id: str,
    revision: str | None,
    report: Report,
    cancel: Event,
    *,
    weights: bool = True,
    endpoint: str | None = None,
) -> Path:
    """Download a repository and return its local folder. With `weights` False, download only the files that describe the model.
    Raises FetchError."""
    # Imported here, because it takes a third of a second.
    from huggingface_hub import snapshot_download

    report(LoadProgress("download"))
    bar = _progress_bar(report, cancel)
    with _errors_of(repo_id, revision):
        folder = snapshot_download(
            repo_id, revision=revision, endpoint=endpoint, ignore_patterns=_NEVER,
            allow_patterns=[*_ALWAYS, "*.safetensors"] if weights else _ALWAYS, tqdm_class=bar,
        )  # fmt: skip
        if below := _below(Path(folder), weights=weights):
            snapshot_download(repo_id, revision=revision, endpoint=endpoint, allow_patterns=below, tqdm_class=bar)
    return Path(folder)


def download_gguf(
    repo_id: str, quantization: str, revision: str | None, report: Report, cancel: Event, *, endpoint: str | None = None
) -> Path:
    """Download the repository's .gguf file whose name ends with `quantization`, such as Q4_K_M, ignoring case. Return its path.
    Raises FetchError, also if there is no such file, or if it is split into several."""
    from huggingface_hub import snapshot_download

    report(LoadProgress("download"))
    endings = sorted({quantization, quantization.lower(), quantization.upper()})
    with _errors_of(repo_id, revision):
        folder = snapshot_download(
            repo_id, revision=revision, endpoint=endpoint, allow_patterns=[f"*[-.]{ending}*.gguf" for ending in endings],
            ignore_patterns=_NOT_THE_MODEL, tqdm_class=_progress_bar(report, cancel),
        )  # fmt: skip
    found = sorted(path for ending in endings for path in Path(folder).glob(f"*[-.]{ending}*.gguf"))
    found = [path for path in found if not path.name.startswith("mmproj")]
    if len(found) != 1:
        several = f"{len(found)} files, and one is served" if found else "no file"
        raise FetchError(f"{repo_id} has {several} of the type {quantization}: download a .gguf file and give its path")
    return found[0]


def verify(path: Path, report: Report, cancel: Event) -> None:
    """Compare the files of a downloaded repository, or one of its files, with the hub's hashes.

    huggingface_hub stores each file under its hash: SHA-256 for weights, git's SHA-1 for others. A file with another hash is
    deleted. Raises FetchError, and FetchCancelled if `cancel` is set."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    blobs = [(file, file.resolve()) for file in files if _HASH.fullmatch(file.resolve().name)]
    total, done = sum(blob.stat().st_size for _, blob in blobs), 0
    for file, blob in blobs:
        sha256 = len(blob.name) == hashlib.sha256().digest_size * 2
        digest = hashlib.sha256() if sha256 else hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
        with blob.open("rb") as source:
            while chunk := source.read(_CHUNK):
                if cancel.is_set():
                    raise FetchCancelled
                digest.update(chunk)
                done += len(chunk)
                report(LoadProgress("verify", done, total, "B"))
        if digest.hexdigest() != blob.name:
            file.unlink()
            blob.unlink()
            raise FetchError(
                f"{file.name} is not the file that the hub lists (its hash differs); it was deleted: pull again"
            )


@contextmanager
def _errors_of(repo_id: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except (FetchCancelled, WeightsError):
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise FetchError(_why(repo_id, revision, error)) from error
    except Exception as error:
        # Errors of httpx and xet are not OSErrors.
        raise FetchError(f"{repo_id} could not be downloaded: {type(error).__name__}: {error}") from error


def _below(folder: Path, *, weights: bool) -> list[str]:
    if not (folder / MODULES).exists():
        return []
    return [name for name in files_of_modules(folder) if weights or not name.endswith(".safetensors")]


def _why(repo_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"{repo_id} is gated: request access at https://huggingface.co/{repo_id} and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo_id} is not on the Hugging Face hub, or it is private and HF_TOKEN is not set"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return f"{repo_id} is not completely in the local cache, and HF_HUB_OFFLINE is set: unset it to download"
        return f"{repo_id} is not in the local cache, and the hub cannot be reached: {error.__cause__ or error}"
    return f"{repo_id} could not be downloaded: {error}"


def _progress_bar(report: Report, cancel: Event) -> type[Any]:
    """Return a tqdm class that reports bytes, draws nothing, and raises after a cancellation. Used on the hub's threads."""
    from tqdm import tqdm

    counted: dict[int, tuple[int, int]] = {}

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # tqdm's monitor thread would outlive the download

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            options |= {"file": open(os.devnull, "w"), "disable": False, "mininterval": 0.1}  # noqa: SIM115
            super().__init__(*args, **options)

        def display(self, *_: object, **__: object) -> None:
            if self.unit == "B":
                # The hub shows received and written bytes in two bars, whose totals grow over time.
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
