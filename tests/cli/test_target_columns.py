"""Several target columns, missing targets and names of labels on the command line."""

import onnx
import pytest

from onnxtrain import examples

ROWS = ["1,2,0.5,3,yes", "2,1,,4,no", "0,1,1.5,,yes", "3,1,2,1,"]


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, columns in (("two", (0, 1, 2, 3)), ("names", (0, 1, 4))):
        rows = [",".join(row.split(",")[column] for column in columns) for row in ("u,v,width,height,late", *ROWS)]
        (tmp_path / f"{name}.csv").write_text("\n".join(rows))
    onnx.save(examples.mlp((2, 4, 2)), tmp_path / "two.onnx")
    onnx.save(examples.mlp((2, 4, 1)), tmp_path / "one.onnx")
    return tmp_path


def test_columns_of_targets_have_their_names_in_predictions(table, success, run):
    target = ("--target", "width,height")
    found = run("fit", "two.onnx", "--data", "two.csv", *target, "--loss", "mse", "--output", "t.onnx")
    assert "'two.csv': 2 of 8 targets are missing (NaN or empty); the loss leaves them out." in found.err + found.out
    success("predict", "t.onnx", "--data", "two.csv", "--output", "p.csv")
    assert (table / "p.csv").read_text().splitlines()[0] == "example,width,height"
    out = run("evaluate", "t.onnx", "--data", "two.csv", *target, "--loss", "mse", "--metrics", "mae,r2").out
    assert "nan" not in out
    success("predict", "two.onnx", "--data", "two.csv", *target, "--output", "p.csv")


def test_two_names_of_one_logit(table, success, run):
    run("fit", "one.onnx", "--data", "names.csv", "--target", "late", "--loss", "bce", "--output", "t.onnx")
    success("predict", "t.onnx", "--data", "names.csv", "--output", "p.csv")
    assert (table / "p.csv").read_text().splitlines()[0] == "example,label,probability,p(no),p(yes)"
