"""Options that the combinations exclude, with reasons; test_coverage.py fails for unlisted ones."""

from __future__ import annotations

OPTIMIZER_SETTINGS = {
    "learning_rate": "drawn beside the settings",
    "sparsity": "PyTorch has no such updates; tests/operators compares them with the paper's formulas",
    "SSGD.measure": "PyTorch has no measure but plain steps (p-norm with p = 2)",
    "SSGD.reweighting": "of other measures",
    "SSGD.epsilon": "of other measures",
    "SSGD.p": "of other measures",
    "SSGD.regularization": "of other measures",
    "SSGD.max_scale": "of other measures",
    "SSGD.block": "of other measures",
}
LOSSES = {
    "distillation": "a teacher is a second model; tests/training compares it with PyTorch's formula",
    "transducer": "scores have four axes; tests/losses compares it with the forward-backward algorithm",
    **dict.fromkeys(
        ("arcface", "cosface"),
        "the model ends in cosines with centres; tests/losses compares ten steps with PyTorch",
    ),
    **dict.fromkeys(
        ("yolo", "detr"),
        "the model is a detector; tests/losses compares them with NumPy and PyTorch",
    ),
    **dict.fromkeys(
        ("circle", "cox"),
        "examples are compared with each other; tests/plugins/more_losses compares them with formulas",
    ),
    **dict.fromkeys(
        ("dpo", "ipo", "simpo", "cpo", "orpo", "kto", "reward", "grpo", "multiple_negatives", "listnet", "ranknet"),
        "the model takes groups of rows; tests/plugins/text compares them with formulas and TRL",
    ),
}
LOSS_OPTIONS = {
    "check_targets": "changes no number",
    "from_logits": "follows from the ending of the model, which is drawn",
    "chunk": "computes the same values; tests/training compares it with the unchunked loss",
    "dice.activation": "follows from the targets",
    "dice.ignore_index": "PyTorch's and MONAI's dice have none",
    "focal.ignore_index": "drawn for the cross-entropy, which shares it",
    "next_token.axis": "the last one",
    "ctc.blank": "drawn as 0",
    "ctc.zero_infinity": "labels always fit here",
    "ctc.time_axis": "modules have the batch first",
    "ctc.input_lengths": "all steps count",
}
TRAINER = {
    "model": "what is drawn first",
    "output": "modules have one output",
    "untie": "changes which tensors there are; tests/training has its own comparison",
    "sparsify": "of sparsity-promoting updates, which PyTorch does not have",
    "straight_through": "of quantized models; tests/training has its own comparison",
    "qat": "of quantized models; tests/training has its own comparison",
    "lora": "tests/adapters compares with PEFT",
    "precision": "rounds; tests/training bounds the error",
    "dropout": "random numbers differ from PyTorch's: Dropout layers are drawn, and do not drop",
}
FIT = {
    "validation": "changes no number",
    "steps_per_epoch": "changes where epochs end; tests/training compares it with endless data",
    "target": "names a column",
    "metrics": "changes no number",
    "checkpoint": "changes no number",
    "checkpoint_every": "changes no number",
    "keep": "changes no number",
    "save_best": "changes no number",
    "resume": "tests/training compares bit by bit",
    "change": "of resuming",
    "run": "changes no number",
    "augment": "changes inputs by a function of the user's",
    "ema": "says what validation measures",
    "cache_features": "computes the same values; tests/training compares it with a training without",
}
SCHEDULES = {
    "Schedule": "the type",
    "check_rate": "a function",
    "parse_schedule": "a function",
    "resolve_schedule": "a function",
}
