"""Invalid arguments: one sentence names the argument, its value and the accepted ones; nothing is written."""

from __future__ import annotations

import pytest
from mistakes import FIT, Mistake, fit, hot, nodes
from onnx import helper

OPTIONS = [
    Mistake("unknown loss", "no loss 'crossentropy'; use softmax_cross_entropy, .*", fit("--loss", "crossentropy")),
    Mistake(
        "unknown argument of a loss",
        r"softmax_cross_entropy\(axs.1\)' gives softmax_cross_entropy unknown arguments; it has class_weights",
        fit("--loss", "softmax_cross_entropy(axs=1)"),
    ),
    Mistake(
        "loss with markup and emoji",
        r"no loss '\[bold\]\N{BUG}\[/bold\] :bug:'; use softmax_cross_entropy",
        fit("--loss", "[bold]\N{BUG}[/bold] :bug:"),
    ),
    Mistake(
        "flag of another loss",
        "--axis 1 is given, but the loss huber has no such argument; it has delta",
        fit("--loss", "huber", "--axis", "1"),
    ),
    Mistake(
        "class weights that are no numbers",
        "--class-weights is '1;2'; it needs numbers with commas between them: 1,1,3",
        fit("--class-weights", "1;2"),
    ),
    Mistake("no row at once", "chunk is 0; it is a number of rows, 1 or more", fit("--chunk", "0")),
    Mistake("smoothing of everything", "label_smoothing is 1.0; it needs a number in", fit("--label-smoothing", "1")),
    Mistake(
        "no file of weights",
        "There is no file 'w.npy'; --sample-weight needs a .npy or a text file",
        fit("--sample-weight", "w.npy"),
    ),
    Mistake(
        "weights that are no numbers",
        "--sample-weight is 'model.onnx', which cannot be read",
        ("fit", "copy.onnx", *fit("--sample-weight", "model.onnx")[2:]),
        spoil=lambda folder: (folder / "copy.onnx").write_bytes((folder / "model.onnx").read_bytes()) and None,
    ),
    Mistake(
        "the best of no folder",
        "--save-best needs the folder of the checkpoints; give --checkpoint",
        fit("--save-best", "loss"),
    ),
    Mistake(
        "no class axis",
        "axis is 2, but the logits 'logits' have rank 2: it is 1 to 1",
        fit("--axis", "2"),
    ),
    Mistake(
        "metric of another loss",
        "metric accuracy is for scores over classes or .* measure mean_squared_error, .*, huber, .*or",
        fit("--loss", "huber", "--validation", "0.5", "--metrics", "accuracy"),
        spoil=hot(1, 0),
    ),
    Mistake(
        "targets that are no distributions",
        "target array has a distribution with the sum 2 at example 0, .* --no-check-targets to accept any",
        FIT,
        spoil=hot(1, 1),
    ),
    Mistake(
        "unknown output",
        "--loss 'output:cost' ?, but .*outputs are logits|--loss output:cost, but .* are logits",
        fit("--loss", "output:cost"),
    ),
    Mistake(
        "unknown prediction",
        "--prediction probabilities, but the outputs are logits",
        fit("--prediction", "probabilities"),
    ),
    Mistake("unknown optimizer", "--optimizer newton is not .*adagrad.*momentum", fit("--optimizer", "newton")),
    Mistake(
        "foreign attribute",
        r"--mode is nesterov, but adam has no such setting; it has --learning-rate, --betas",
        fit("--mode", "nesterov"),
    ),
    Mistake(
        "unknown mode",
        "Momentum: the attribute 'mode' is 'heavy', but must be one of 'standard', 'nesterov'",
        fit("--optimizer", "momentum", "--mode", "heavy"),
    ),
    Mistake(
        "attribute out of range",
        "Adam: alpha is 1.5, but must be a finite number, 0 or more and below 1",
        fit("--alpha", "1.5"),
    ),
    Mistake("negative rate", "Adam: learning_rate is -1.0, but must be", fit("--learning-rate", "-1")),
    Mistake(
        "train nothing", r"--train 'head\.\*' matches no initializer; the model has layer1", fit("--train", "head.*")
    ),
    Mistake("freeze nothing", r"--freeze conv matches no initializer", fit("--freeze", "conv")),
    Mistake("a pattern alone", r"The group '\*\.bias' is not a pattern with settings", fit("--groups", "*.bias")),
    Mistake(
        "a group of nothing", r"group='head\.\*' matches no initializer", fit("--groups", "head.*, norm_coefficient=0")
    ),
    Mistake("a setting that Adam lacks", "Adam has no setting 'momentum'", fit("--groups", "*, momentum=0.5")),
    Mistake("a decay of one", r"ema: decay is 1\.0, but must be a number", fit("--ema", "1")),
    Mistake("unknown schedule", "no schedule 'sawtooth'", fit("--schedule", "sawtooth")),
    Mistake("no epochs", "epochs is 0; it needs a number of at least 1", fit("--epochs", "0")),
    Mistake("no batch", "the batch size is 0; it must be an integer of at least 1", fit("--batch-size", "0")),
    Mistake("negative seed", "seed is -1; it must be an integer of at least 0", fit("--seed", "-1")),
    Mistake("no micro-batch", "accumulate is 0; it needs", fit("--accumulate", "0")),
    Mistake(
        "too many threads", r"threads is 2147483647; it needs a number from 1 to \d+", fit("--threads", f"{2**31 - 1}")
    ),
    Mistake("no threads", "threads is 0; it needs a number of at least 1", fit("--threads", "0")),
    Mistake("negative norm", "clip_norm is -1.0; it needs a finite number above 0", fit("--clip-norm", "-1")),
    Mistake(
        "unknown metric",
        "no metric 'beauty': use accuracy",
        fit("--validation", "test.npz", "--metrics", "beauty"),
    ),
    Mistake(
        "metric without data",
        "metrics are measured on validation data; give --validation",
        fit("--metrics", "accuracy", "--cache-features"),
    ),
    Mistake(
        "metric without targets",
        "metrics compare predictions with targets, which this loss does not take; leave them out",
        fit("--loss", "output:logits", "--validation", "test.npz", "--metrics", "accuracy"),
        spoil=nodes(helper.make_node("ReduceMean", ["weight"], ["logits"], keepdims=0), scalar=True),
    ),
    Mistake(
        "no validation file",
        r"There is no file 'tests\.npz'; --validation needs a file or folder of data, or a fraction such as 0\.1\.",
        fit("--validation", "tests.npz"),
    ),
    Mistake(
        "validation fraction",
        "validation fraction is 1.5; it must be greater than 0 and less than 1",
        fit("--validation", "1.5"),
    ),
    Mistake(
        "stopping without validation",
        "--early-stopping watches the validation loss; give --validation",
        fit("--early-stopping", "3"),
    ),
    Mistake(
        "no patience",
        "patience of early stopping is 0; it must be at least 1",
        fit("--validation", "test.npz", "--early-stopping", "0"),
    ),
    Mistake("resume from nowhere", "resume needs the folder of the checkpoints; give --checkpoint", fit("--resume")),
    Mistake(
        "keep nothing",
        "checkpoints to keep is 0; it must be at least 1",
        fit("--checkpoint", "checkpoints", "--keep", "0"),
    ),
    Mistake(
        "diverges",
        r"loss became (nan|inf) at step \d+ .*clip gradients \(--clip-norm 1\.0\)",
        fit("--optimizer", "momentum", "--learning-rate", "1e38", "--epochs", "20"),
    ),
    Mistake("unknown batch-norm", r'"on" .*--batch-norm.*frozen.*train', fit("--batch-norm", "on")),
]

PATHS = [
    Mistake(
        "output in no folder",
        r"'missing/tuned\.onnx' cannot be written: there is no folder 'missing'",
        fit("--output", "missing/tuned.onnx"),
    ),
    Mistake("output is a folder", r"'\.' cannot be written: it is a folder", fit("--output", ".")),
    Mistake("curve in no folder", r"'missing/curve\.png' cannot be written", fit("--curve", "missing/curve.png")),
    Mistake(
        "history of no kind",
        r"--history is 'rows\.txt'; it needs a file that ends in \.json or \.csv",
        fit("--history", "rows.txt"),
    ),
    Mistake(
        "checkpoints in a file",
        r"--checkpoint is 'test\.npz', but 'test\.npz' is a file",
        fit("--checkpoint", "test.npz"),
    ),
    Mistake(
        "predictions of no kind",
        r"--output is 'p\.txt'; it needs a file that ends in \.csv, \.parquet, \.npz, \.npy",
        ("predict", "model.onnx", "--data", "test.npz", "--output", "p.txt"),
    ),
    Mistake(
        "predictions in no folder",
        r"'missing/p\.npz' cannot be written",
        ("predict", "model.onnx", "--data", "test.npz", "--output", "missing/p.npz"),
    ),
    Mistake(
        "nothing to export",
        r"nothing to write; give --training-model, --step-graph or --states",
        ("export", "model.onnx", "--loss", "huber"),
    ),
    Mistake(
        "export without loss",
        r"'model\.onnx' is not a training model; give --loss",
        ("export", "model.onnx", "--step-graph", "step.onnx"),
    ),
    Mistake(
        "export to no folder",
        r"'missing/step\.onnx' cannot be written",
        ("export", "model.onnx", "--loss", "huber", "--step-graph", "missing/step.onnx"),
    ),
    Mistake(
        "export a bad entry",
        r"no entry 3; the training model has 1",
        ("export", "model.onnx", "--loss", "huber", "--step-graph", "step.onnx", "--entry", "3"),
    ),
]

USAGE = [
    Mistake("unknown command", r'"fitt".*"fit".*[Ss]ee onnxtrain --help', ("fitt",)),
    Mistake("unknown flag", r"--epoch\b.*--epochs.*[Ss]ee onnxtrain fit --help", fit("--epoch", "3")),
    Mistake(
        "no loss",
        r"fit needs --loss NAME \(the loss: softmax_.*; see onnxtrain fit --help",
        ("fit", "model.onnx", "--data", "train.npz"),
    ),
    Mistake("no model", r"inspect needs MODEL \(the ONNX model\); see onnxtrain inspect --help", ("inspect",)),
    Mistake(
        "too many files",
        r"onnxtrain inspect takes no further argument 'b\.onnx' and 'c\.onnx'; see .* --help",
        ("inspect", "a.onnx", "b.onnx", "c.onnx"),
    ),
    Mistake("not a number", r'--epochs.*"many".* into int.*[Ss]ee onnxtrain fit --help', fit("--epochs", "many")),
    Mistake("flag without value", r"--data.*[Ss]ee onnxtrain fit --help", ("fit", "model.onnx", "--data")),
    Mistake("evaluate unknown loss", "no loss 'l7'", ("evaluate", "model.onnx", "--data", "test.npz", "--loss", "l7")),
    Mistake(
        "inspect unknown pattern",
        "--freeze nothing matches no initializer",
        ("inspect", "model.onnx", "--freeze", "nothing"),
    ),
]

NOTHING = [
    Mistake(f"{command[0]} {flag} of nothing", f"{flag} is empty; give it a value, or leave it out", (*command, *given))
    for command, flags in (
        (fit(), ("--data", "--output", "--checkpoint", "--curve", "--history", "--validation", "--loss", "--train")),
        (("evaluate", "model.onnx", "--loss", "huber"), ("--data", "--target", "--metrics")),
        (("predict", "model.onnx", "--data", "test.npz"), ("--output", "-o")),
        (("export", "model.onnx", "--loss", "huber"), ("--training-model", "--step-graph", "--states")),
        (("prune", "model.onnx", "--data", "train.npz", "--loss", "huber"), ("--output", "--report", "--validation")),
        (("demo",), ("--folder",)),
    )
    for flag in flags
    for given in ((flag, ""), (f"{flag}=",) if flag.startswith("--") else (flag, ""))
] + [Mistake("no path", "The argument after 'inspect' is empty", ("inspect", ""))]


@pytest.mark.parametrize("mistake", [*OPTIONS, *PATHS, *USAGE, *NOTHING], ids=str)
def test_ends_in_one_sentence(mistake, ends_in_one_sentence):
    ends_in_one_sentence(mistake)
