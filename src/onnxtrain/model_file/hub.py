"""Read models from the Hugging Face Hub by addresses such as ``hf://org/name/model.onnx``."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from onnxtrain.errors import ModelError, OnnxTrainError
from onnxtrain.errors._internal import import_optional
from onnxtrain.model_file.saving import data_files_of

_logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r"hf:/{1,2}(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")


def is_on_hub(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an address on the Hub; a Path has one slash after ``hf:``."""
    return os.fspath(path).startswith("hf:/")


def repository_of(path: Path) -> str | None:
    """Return the repository that a file of the Hub's cache comes from; ``None`` for any other file."""
    found = _CACHED.search(path.as_posix())
    return None if found is None else f"{found[1]}/{found[2]}"


def download(address: str | os.PathLike[str]) -> Path:
    """Return the local copy of a model on the Hub with its data files; files in the Hub's cache are not read again."""
    text = os.fspath(address)
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise ModelError(
            f"{text!r} is no address of a model on the Hub: give hf://ORG/NAME/FILE, such as "
            "hf://org/name/model.onnx, or hf://ORG/NAME@REVISION/FILE."
        )
    hub = client(f"The model {text!r} is on the Hugging Face Hub, which needs huggingface_hub")
    repo, revision, file = found["repo"], found["revision"], found["file"]
    with explained(f"The model {text!r} cannot be had from the Hub"):
        model = Path(hub.hf_hub_download(repo, file, revision=revision))
        locations = sorted(data_files_of(model) or ())
        if locations:  # the Hub's cache has links; data files must be real ones beside their model
            commit = model.parents[file.count("/")].name
            folder = Path(hub.constants.HF_HOME, "onnxtrain", f"models--{repo.replace('/', '--')}", "snapshots", commit)
            for location in locations:
                if ".." in Path(location).parts or Path(location).is_absolute():
                    raise ModelError(f"The model {text!r} has data in {location!r}, outside its folder.").about(
                        text, got=location
                    )
            for name in (file, *((Path(file).parent / location).as_posix() for location in locations)):
                hub.hf_hub_download(repo, name, revision=commit, local_dir=folder)
            model = folder / file
        _download_beside(hub, repo, file, revision, model)
    return model


_BESIDE = ("{stem}.labels.json", "preprocessor_config.json", "config.json")
"""Files beside a model that say what its inputs and classes are."""


_SECONDS = 10
"""Seconds that the Hub has to say whether there is such a file."""


def places_of_settings(folder: Path) -> list[Path]:
    """Return the folders of a model's settings: its own, and the one above a folder ``onnx``, as on the Hub."""
    return [folder, folder.parent] if folder.name == "onnx" else [folder]


def _download_beside(hub: Any, repo: str, file: str, revision: str | None, model: Path) -> None:
    """Fetch the files that tell names, labels and normalization into the folder of a model, where there are any.

    Each is asked for once, since the client repeats a failed request for half a minute. Then the cache decides.
    """
    from huggingface_hub.errors import EntryNotFoundError

    cached = False
    for form in _BESIDE:
        for place in places_of_settings(Path(file).parent):
            name = (place / form.format(stem=model.stem)).as_posix()
            with suppress(EntryNotFoundError):  # LocalEntryNotFoundError, too
                try:
                    if not cached:
                        hub.get_hf_file_metadata(hub.hf_hub_url(repo, name, revision=revision), timeout=_SECONDS)
                except EntryNotFoundError:
                    raise
                except Exception as error:
                    cached = True
                    if getattr(error, "response", None) is not None:
                        _logger.warning("The Hub did not say whether %s has a file %r: %s", repo, name, error)
                found = Path(hub.hf_hub_download(repo, name, revision=revision, local_files_only=cached))
                if found.parent not in (model.parent, model.parent.parent):
                    shutil.copyfile(found, model.parent / found.name)
                break


def client(needs: str) -> Any:
    """Import huggingface_hub."""
    return import_optional("huggingface_hub", needs=needs, packages="huggingface_hub")


_MEANINGS = {
    401: "it does not exist, or needs a login: hf auth login, or HF_TOKEN",
    403: "your account may not read or write it; ask its owner for access",
    404: "there is no such repository, revision or file; check the address",
    429: "the Hub takes no more requests for now; wait some minutes, or log in (hf auth login)",
}
"""Sentences for statuses of HTTP."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn errors of huggingface_hub, which raises many types, into a sentence."""
    try:
        yield
    except OnnxTrainError:
        raise
    except Exception as error:
        not_cached = type(error).__name__ == "LocalEntryNotFoundError"  # because of another error
        found: BaseException | None = error
        while found is not None and getattr(found, "response", None) is None:
            found = found.__cause__ or found.__context__ if not_cached else None
        if found is not None:
            status = int(found.response.status_code)  # type: ignore[attr-defined]
            said = getattr(found, "server_message", None)
            reason = _MEANINGS.get(status) or said or str(found).split("\n")[0]
            more = f" ({said})" if said and status in _MEANINGS else ""
            raise ModelError(f"{what} (status {status}): {_sentence(reason + more)}") from error
        if not_cached:
            raise ModelError(
                f"{what}: it is not in the cache, and the Hub cannot be reached; check the network and HF_ENDPOINT."
            ) from error
        raise ModelError(f"{what}: {_sentence(str(error) or type(error).__name__)}") from error


def _sentence(text: str) -> str:
    return " ".join(text.split())[:300].rstrip(".") + "."
