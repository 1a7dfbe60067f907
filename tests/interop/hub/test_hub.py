"""Models from and to the Hugging Face Hub: its real client against a local server that speaks its protocol."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from stand_in import COMMIT, TOKEN, Hub, Requests

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.data.data_names import read_names
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.hub import download, repository_of
from sentences import raises_sentence

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # of its own requests


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one model; the client has read its environment already, so that its constants are set."""
    from huggingface_hub import constants

    server = Hub()
    server.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    onnx.save(onnxtrain.examples.mlp((4, 8, 3)), tmp_path / "model.onnx")
    server.files["org/points"] = {"onnx/model.onnx": (tmp_path / "model.onnx").read_bytes()}
    yield server
    server.shutdown()
    server.server_close()


ADDRESS = "hf://org/points/onnx/model.onnx"


@pytest.mark.parametrize("address", [ADDRESS, Path(ADDRESS), "hf://org/points@v1/onnx/model.onnx"])
def test_a_trainer_reads_a_model_from_the_hub(hub: Hub, address: str | Path, tmp_path: Path) -> None:
    trainer = onnxtrain.Trainer(address, loss="softmax_cross_entropy", optimizer="sgd(lr=0.1)")
    trainer.fit(*onnxtrain.examples.points(64))
    trainer.save(tmp_path / "tuned.onnx")
    assert hub.files["org/points"]["onnx/model.onnx"] != (tmp_path / "tuned.onnx").read_bytes()
    assert sum(line.startswith("GET") and "/resolve/" in line for line in hub.requests) == 1
    download(address)  # from the cache
    assert sum(line.startswith("GET") and "/resolve/" in line for line in hub.requests) == 1


def test_data_files_come_along(hub: Hub, tmp_path: Path) -> None:
    model = onnxtrain.examples.mlp((4, 8, 3))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    hub.files["org/large"] = {f"part/{p.name}": p.read_bytes() for p in tmp_path.glob("m.onnx*")}
    points, _ = onnxtrain.examples.points(8)
    found = onnxtrain.predict("hf://org/large/part/m.onnx", points)
    np.testing.assert_array_equal(found, onnxtrain.predict(tmp_path / "m.onnx", points))
    assert repository_of(download("hf://org/large/part/m.onnx")) == "org/large"


def test_the_command_line_reads_from_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    points, labels = onnxtrain.examples.points(32)
    np.savez("points.npz", input=points, target=labels)
    arguments = ["--loss", "softmax_cross_entropy", "--data", "points.npz", "--quiet"]
    assert main(["fit", ADDRESS, *arguments, "--output", "tuned.onnx"]) == 0, capsys.readouterr().err
    assert Path("tuned.onnx").is_file()
    assert main(["fit", ADDRESS, *arguments, "--in-place"]) != 0
    assert "is on the Hub; give --output." in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("hf://org/points", "is no address of a model on the Hub: give hf://ORG/NAME/FILE"),
        ("hf://points/model.onnx", "is no address of a model on the Hub"),
        ("hf://org/nothing/model.onnx", r"cannot be had from the Hub \(status 401\): "),
        ("hf://org/points/other.onnx", r"cannot be had from the Hub \(status 404\): "),
        ("hf://org/points@v9/onnx/model.onnx", r"cannot be had from the Hub \(status 404\): "),
        ("hf://org/po..ints/model.onnx", r"cannot be had from the Hub: Cannot have -- or \.\. in repo_id"),
    ],
)
def test_addresses_that_lead_nowhere(hub: Hub, address: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        onnxtrain.Trainer(address, loss="mse")


def test_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with raises_sentence("not_in_the_cache"):
        onnxtrain.Trainer(ADDRESS, loss="mse")


def test_data_files_outside_are_refused(hub: Hub, tmp_path: Path) -> None:
    onnx.save(onnxtrain.examples.mlp((4, 8, 3)), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "../../secret"
    hub.files["org/evil"] = {"m.onnx": model.SerializeToString()}
    with raises_sentence("hub_data_outside", got="../../secret"):
        onnxtrain.Trainer("hf://org/evil/m.onnx", loss="mse")


@pytest.fixture
def trained(hub: Hub, tmp_path: Path) -> tuple[onnxtrain.Trainer, Path]:
    trainer = onnxtrain.Trainer(ADDRESS, loss="softmax_cross_entropy", optimizer="adam(lr=0.01)")
    points, labels = onnxtrain.examples.points(96)
    trainer.fit(points, labels, validation=0.25, epochs=3, metrics=["accuracy"], run=tmp_path / "run")
    return trainer, tmp_path / "run"


def test_a_trained_model_is_published_with_its_card(
    trained: tuple[onnxtrain.Trainer, Path], hub: Hub, tmp_path: Path
) -> None:
    trainer, run = trained
    url = onnxtrain.hub.push_to_hub(trainer, "me/tuned", run=run, license="apache-2.0", private=True, message="First")
    assert url == f"{hub.address}/me/tuned/commit/{COMMIT}"
    assert (
        hub.settings.get("visibility") == "private" or hub.settings.get("private") is True
    )  # by version of the client
    assert hub.messages == ["First"]
    files = hub.files["me/tuned"]
    assert set(files) == {"README.md", "model.onnx", "training/curves.svg", "training/metrics.csv"}
    trainer.save(tmp_path / "same.onnx")
    assert files["model.onnx"] == (tmp_path / "same.onnx").read_bytes()
    card = files["README.md"].decode()
    for part in (
        'library_name: "onnxtrain"\n',
        'license: "apache-2.0"\n',
        'base_model: "org/points"\n',
        "# tuned\n",
        "| `input` | input | float | N x 4 |",
        "| loss | softmax_cross_entropy |",
        "| examples | 72 |",
        "![Training history](training/curves.svg)",
        "Trainer(\"hf://me/tuned/model.onnx\", loss='softmax_cross_entropy')",
    ):
        assert part in card
    assert str(tmp_path) not in card
    assert "epoch" in card
    again = onnxtrain.Trainer("hf://me/tuned/model.onnx", loss="softmax_cross_entropy")
    points, _ = onnxtrain.examples.points(8)
    np.testing.assert_array_equal(again.predict(points), trainer.predict(points))


def save_with_data_file(path: Path, location: str) -> None:
    model = onnxtrain.examples.mlp((4, 8, 3))
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)


def test_names_and_settings_come_along(hub: Hub, tmp_path: Path) -> None:
    names = {"columns": {"input": ["a", "b", "c", "d"]}, "labels": ["x", "y", "z"]}
    (tmp_path / "model.labels.json").write_text(json.dumps(names))
    onnxtrain.hub.push_to_hub(tmp_path / "model.onnx", "me/named", file="points.onnx")
    assert json.loads(hub.files["me/named"]["points.labels.json"]) == names
    trainer = onnxtrain.Trainer("hf://me/named/points.onnx", loss="softmax_cross_entropy")
    assert trainer.labels == ("x", "y", "z")
    assert trainer.columns == {"input": ("a", "b", "c", "d")}
    save_with_data_file(tmp_path / "l.onnx", "l")
    hub.files["org/labels"] = {
        "config.json": json.dumps({"id2label": {"0": "z", "1": "y", "2": "x"}}).encode(),
        "l.onnx": (tmp_path / "l.onnx").read_bytes(),
        "l": (tmp_path / "l").read_bytes(),
    }
    trainer = onnxtrain.Trainer("hf://org/labels/l.onnx", loss="softmax_cross_entropy")
    points, classes = onnxtrain.examples.points(32)
    trainer.fit(points, np.array([*"xyz"])[classes], progress=False)
    assert trainer.labels == ("z", "y", "x")


def test_settings_above_a_folder_onnx_come_along(hub: Hub) -> None:
    settings = {"do_normalize": True, "image_mean": [0.5], "image_std": [0.25], "do_resize": True, "size": 8}
    hub.files["org/pictures"] = {
        "preprocessor_config.json": json.dumps(settings).encode(),
        "onnx/model.onnx": onnxtrain.examples.mlp((4, 8, 3)).SerializeToString(),
    }
    names = read_names(ModelFile.load("hf://org/pictures/onnx/model.onnx"))
    assert names.pixels is not None
    assert names.resizing is not None
    assert (names.pixels.mean, names.resizing.edges) == ((0.5,), (8, 8))


def test_the_example_of_a_card_has_a_loss_that_needs_nothing_more(tmp_path: Path) -> None:
    for name in ("student", "teacher"):
        onnx.save(onnxtrain.examples.mlp((4, 8, 3)), tmp_path / f"{name}.onnx")
    loss = onnxtrain.losses.Distillation(tmp_path / "teacher.onnx")
    points, labels = onnxtrain.examples.points(32)
    onnxtrain.Trainer(tmp_path / "student.onnx", loss=loss).fit(points, labels, run=tmp_path / "run")
    card = onnxtrain.hub.model_card(tmp_path / "student.onnx", run=tmp_path / "run")
    assert "| loss | distillation |" in card
    assert "loss='softmax_cross_entropy')" in card
    assert str(tmp_path) not in card


def test_a_file_is_published_again(hub: Hub, tmp_path: Path) -> None:
    for _ in range(2):  # the repository exists the second time
        onnxtrain.hub.push_to_hub(tmp_path / "model.onnx", "me/plain")
    assert set(hub.files["me/plain"]) == {"README.md", "model.onnx"}
    assert "## Training" not in hub.files["me/plain"]["README.md"].decode()


def test_what_cannot_be_published(hub: Hub, tmp_path: Path) -> None:
    push = onnxtrain.hub.push_to_hub
    model = tmp_path / "model.onnx"
    with pytest.raises(ModelError, match=r"There is no file '.*nothing\.onnx'; check the path\."):
        push(tmp_path / "nothing.onnx", "me/x")
    with raises_sentence("not_a_run", what="run", file="run.json"):
        push(model, "me/x", run=tmp_path)
    with raises_sentence("hub_file_name", what="file"):
        push(model, "me/x", file="../x.onnx")
    (tmp_path / "run.json").write_text('{"finished": false}')
    with raises_sentence("run_not_finished", what="run"):
        push(model, "me/x", run=tmp_path)
    hub.lose_uploads = True
    with raises_sentence("cannot_be_uploaded", repository="'me/x'", reason="Error while uploading 'model.onnx'"):
        push(model, "me/x")
    hub.refuse_writes = True
    with raises_sentence("upload_refused", repository="'me/x'", status="status 403"):
        push(model, "me/x")


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "needs a login"), (403, "may not read or write it"), (404, "there is no such"), (429, "no more requests")],
)
def test_refusals_read_as_what_they_are(hub: Hub, status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr("stand_in.Requests.do_GET", lambda self: self._send(status))
    with pytest.raises(ModelError, match=rf"\(status {status}\): .*{said}"):
        download(ADDRESS)


def test_files_beside_a_model_are_not_waited_for(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client repeats requests that fail with a status of 500 and more for half a minute a file."""
    hub.files["org/points"]["config.json"] = b"{}"
    slept: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", slept.append)
    given = Requests.do_GET

    def failing(self: Requests) -> None:
        if self.path.endswith(".json"):
            self.server.requests.append(f"{self.command} {self.path}")
            return self._send(503)
        return given(self)

    monkeypatch.setattr(Requests, "do_GET", failing)
    assert download(ADDRESS).is_file()
    assert slept == []
    assert sum(".json" in line for line in hub.requests) == 1
    assert "The Hub did not say whether org/points has a file 'onnx/model.labels.json'" in caplog.text
    monkeypatch.setattr(Requests, "do_GET", given)
    assert (download(ADDRESS).parent.parent / "config.json").is_file()


ODD = [
    KeyError("sha"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"),
    AssertionError(),
    TypeError("'<' not supported"),
]


@pytest.mark.parametrize("error", [*ODD, OSError(28, "No space left on device")], ids=repr)
def test_odd_answers_are_no_defects(hub: Hub, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client trusts the forms of answers."""

    def odd(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", odd)
    with pytest.raises(ModelError, match="cannot be had from the Hub: "):
        download(ADDRESS)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(OptionError, match=r"is on the Hugging Face Hub, which needs .*pip install huggingface_hub"):
        onnxtrain.Trainer(ADDRESS, loss="mse")
    with pytest.raises(OptionError, match=r"push_to_hub needs the package .*pip install huggingface_hub"):
        onnxtrain.hub.push_to_hub("model.onnx", "me/x")


def test_models_with_data_files_are_published(hub: Hub, tmp_path: Path) -> None:
    save_with_data_file(tmp_path / "d.onnx", "d.data")
    onnxtrain.hub.push_to_hub(tmp_path / "d.onnx", "me/data", file="d.onnx")
    assert hub.files["me/data"]["d.onnx.data"] == (tmp_path / "d.data").read_bytes()
    shutil.rmtree(tmp_path / "home", ignore_errors=True)
    assert onnxtrain.Trainer("hf://me/data/d.onnx", loss="softmax_cross_entropy").parameters
