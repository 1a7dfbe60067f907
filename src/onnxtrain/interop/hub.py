"""Publish trained models on the Hugging Face Hub, with a model card made of the folder of the run.

Models are read from the Hub wherever a path is taken: ``Trainer("hf://org/name/model.onnx", ...)``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxtrain import __version__
from onnxtrain.data.data_names import read_names, write_names
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.errors._internal import public_names
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.losses.loss_choice import resolve_loss
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.hub import client, explained, repository_of
from onnxtrain.model_file.small_files import RefusedFileError, read_json
from onnxtrain.training.report.record import CURVES, METRICS, RUN
from onnxtrain.training.trained_model import TrainedModel

__all__ = ["model_card", "push_to_hub"]

__dir__ = public_names(__name__)

CARD = "README.md"

SHOWN = (
    "loss",
    "optimizer",
    "examples",
    "validation examples",
    "batch size",
    "schedule",
    "seed",
    "stopped early",
    "time",
)
"""Facts of a run that the card shows; paths and the command line stay here, since they name folders of this machine."""


@checks_arguments
def push_to_hub(
    model: TrainedModel | str | os.PathLike[str],
    repo: str,
    *,
    run: str | os.PathLike[str] | None = None,
    file: str = "model.onnx",
    private: bool | None = None,
    license: str | None = None,
    message: str = "Upload a model trained with onnxtrain",
) -> str:
    """Upload a trained model to the Hugging Face Hub, with a model card.

    The repository is created where it does not exist. With ``run``, the card has the settings and the metrics of the
    training, and the repository gets ``training/curves.svg`` and ``training/metrics.csv``. Paths of this machine are
    not uploaded. The token is the one of ``hf auth login``, or of the variable ``HF_TOKEN``.

    Args:
        model: A trainer, or the path of a model.
        repo: ``ORG/NAME``.
        run: The folder of the run, as given to ``fit(run=...)``.
        file: Name of the model in the repository.
        private: True for a new repository that only its owner sees; by default as the owner's account says.
        license: Identifier of the model's license for the card, such as ``"apache-2.0"``.
        message: Message of the commit.

    Returns:
        The address of the commit.

    Raises:
        ModelError: The model cannot be read or written, or the Hub refuses the upload.
        OptionError: ``run`` is not the folder of a finished run, or the package huggingface_hub is not installed.

    Example:
        >>> push_to_hub(trainer, "org/digits", run="runs/first", license="apache-2.0")  # doctest: +SKIP
        'https://huggingface.co/org/digits/commit/4b27...'
    """
    hub = client("push_to_hub needs the package huggingface_hub")
    if not file or Path(file).name != file:
        raise OptionError(
            f"file is {file!r}; it is the name of the model in the repository, such as 'model.onnx'."
        ).about("file", got=file)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if isinstance(model, TrainedModel):
            model.save(folder / file)
            source = model.config.model.path
        else:
            source = Path(model)
            found = ModelFile.load(source)
            found.save(folder / file, {})
            write_names(folder / file, read_names(found))
        (folder / CARD).write_text(
            model_card(folder / file, run=run, repo=repo, base_model=source, license=license), encoding="utf-8"
        )
        if run is not None:
            (folder / "training").mkdir()
            for name in (CURVES, METRICS):
                shutil.copy(Path(run) / name, folder / "training" / name)
        with explained(f"The model cannot be uploaded to {repo!r}"):
            hub.create_repo(repo, private=private, exist_ok=True)
            commit = hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    return str(commit.commit_url)


@checks_arguments
def model_card(
    model: str | os.PathLike[str],
    *,
    run: str | os.PathLike[str] | None = None,
    repo: str = "ORG/NAME",
    base_model: str | os.PathLike[str] | None = None,
    license: str | None = None,
) -> str:
    """Write the text of a model card: inputs and outputs, how to run the model, how it was trained.

    Args:
        model: The model.
        run: The folder of the run, as given to ``fit(run=...)``.
        repo: The repository, for the example.
        base_model: The model that was trained; the card names the repository of one that comes from the Hub.
        license: As in :func:`push_to_hub`.

    Raises:
        ModelError: The model cannot be read.
        OptionError: ``run`` is not the folder of a finished run.
    """
    try:
        graph = onnx.load(os.fspath(model), load_external_data=False).graph
    except Exception as error:
        raise ModelError(f"{os.fspath(model)!r} is not an ONNX model: {error}.") from error
    record = {} if run is None else _record(Path(run))
    name = Path(model).name
    base = None if base_model is None else repository_of(Path(base_model))
    header: dict[str, Any] = {"library_name": "onnxtrain", "tags": ["onnx", "onnxtrain"]}
    header |= {} if license is None else {"license": license}
    header |= {} if base is None else {"base_model": base}
    initializers = {tensor.name for tensor in graph.initializer}
    parts = [
        _front_matter(header),
        f"# {repo.rpartition('/')[2]}\n\nAn ONNX model, trained with onnxtrain {__version__}"
        + (f" from [{base}](https://huggingface.co/{base})" if base else "")
        + ".\n",
        "## Inputs and outputs\n\n"
        + _table(
            ["name", "", "type", "shape"],
            [
                *(_port(info, "input") for info in graph.input if info.name not in initializers),
                *(_port(info, "output") for info in graph.output),
            ],
        ),
        "## Use\n\n```python\nimport onnxruntime\nfrom huggingface_hub import hf_hub_download\n\n"
        f'session = onnxruntime.InferenceSession(hf_hub_download("{repo}", "{name}"))\n```\n\n'
        "To train it further:\n\n```python\nimport onnxtrain\n\n"
        f'trainer = onnxtrain.Trainer("hf://{repo}/{name}", loss={_loss(record)!r})\n```\n',
    ]
    if record:
        parts.append(_training(record))
    return "\n".join(parts)


def _record(run: Path) -> Mapping[str, Any]:
    try:
        record = read_json(run / RUN, finite=False)
    except (OSError, RefusedFileError) as error:
        raise OptionError(f"run is {str(run)!r}, which is not the folder of a run: it has no readable {RUN}.").about(
            "run", got=str(run)
        ) from error
    if not isinstance(record, dict) or not record.get("finished"):
        raise OptionError(f"The run in {str(run)!r} is not finished; train on, or push the model without run=.").about(
            "run", got=str(run)
        )
    return record


def _loss(record: Mapping[str, Any]) -> str:
    """The loss of the example: that of the training where its name is enough to take it."""
    name = str(record.get("facts", {}).get("loss"))
    try:
        resolve_loss(name)
    except OptionError:  # it has a teacher, or is the user's own
        return "softmax_cross_entropy"
    return name


def _front_matter(header: Mapping[str, Any]) -> str:
    lines = [f"{key}: {json.dumps(value)}" for key, value in header.items()]  # JSON is YAML
    return "\n".join(["---", *lines, "---", ""])


def _port(info: onnx.ValueInfoProto, role: str) -> list[str]:
    tensor = info.type.tensor_type
    sizes = [dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim]
    kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return [f"`{info.name}`", role, kind, " x ".join(sizes) if sizes else "scalar"]


def _training(record: Mapping[str, Any]) -> str:
    facts = record.get("facts", {})
    text = "## Training\n\n" + _table(
        ["setting", "value"],
        [[name, str(facts[name])] for name in SHOWN if name in facts] + [["versions", facts["versions"]]],
    )
    rows: Sequence[Mapping[str, Any]] = record.get("rows", [])
    if rows:
        names = [name for name in rows[-1] if rows[-1][name] is not None]
        shown = rows if len(rows) <= 12 else [*rows[:5], *rows[-6:]]
        cells = [[_number(row.get(name)) for name in names] for row in shown]
        text += "\n" + _table(names, cells) + "\n![Training history](training/curves.svg)\n"
    found = record.get("labels") or []
    for labels in found.values() if isinstance(found, Mapping) else filter(None, [found]):
        text += "\nLabels, in the order of the classes: " + ", ".join(f"`{label}`" for label in labels) + ".\n"
    return text


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (titles, *rows)]
    return "\n".join([lines[0], "| " + " | ".join(["---"] * len(titles)) + " |", *lines[1:]]) + "\n"
