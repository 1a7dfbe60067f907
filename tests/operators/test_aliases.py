"""Other tools' names for settings, and optimizers by name."""

import dataclasses

import pytest

import onnxtrain
from onnxtrain import SGD, SSGD, Adagrad, Adam, AdamW, Lion, Momentum, RMSprop
from onnxtrain.errors import OptionError
from onnxtrain.operators import OPTIMIZERS
from onnxtrain.operators.aliases import ALIASES, OTHERWISE
from onnxtrain.training.optimizers import choose_optimizer


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Adam(lr=0.1, betas=(0.5, 0.6), weight_decay=0.01), Adam(0.1, alpha=0.5, beta=0.6, norm_coefficient=0.01)),
        (Adagrad(lr_decay=0.1, eps=0.2), Adagrad(decay_factor=0.1, epsilon=0.2)),
        (Momentum(momentum=0.5, nesterov=True), Momentum(alpha=0.5, mode="nesterov")),
        (Momentum(nesterov=False), Momentum()),
        (SSGD(lr=0.1, momentum=0.5), SSGD(0.1, alpha=0.5)),
        (choose_optimizer("adamw"), AdamW()),
        (choose_optimizer("SGD(0.1, momentum=0.9, nesterov=True)"), SGD(0.1, momentum=0.9, nesterov=True)),
        (choose_optimizer("lion(betas=(0.5, 0.25))"), Lion(betas=(0.5, 0.25))),
        (choose_optimizer("momentum(mode=nesterov)"), Momentum(mode="nesterov")),
        (choose_optimizer(None), Adam()),
        (choose_optimizer(RMSprop(lr=0.5)), RMSprop(learning_rate=0.5)),
        (dataclasses.replace(AdamW(lr=0.5), eps=0.25), AdamW(0.5, eps=0.25)),
        (Adam(betas=(0.5, 0.25), eps=0.25), Adam(alpha=0.5, beta=0.25, epsilon=0.25)),
    ],
)
def test_they_are_the_same(one, other):
    assert one == other


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AdamW(beta=0.9), "AdamW has no setting 'beta': give betas"),
        (lambda: Momentum(dampening=0.5), "Momentum has no setting 'dampening': give beta, which is 1 - dampening"),
        (lambda: SGD(speed=1), "SGD has no setting 'speed'; its settings are learning_rate, momentum, dampening"),
        (lambda: Adam(0.1, lr=0.2), "Adam: learning_rate is given twice, by the arguments before and by lr"),
        (lambda: Adam(betas=(0.1, 0.2), alpha=0.3), "Adam: alpha is given twice, by betas and by alpha"),
        (lambda: Adam(betas=0.5), "Adam: betas is 0.5, but must be a pair of numbers"),
        (lambda: choose_optimizer("nadam"), "optimizer is 'nadam', but must be .*, or the name of one: adagrad, adam"),
        (lambda: choose_optimizer("adam(speed=1)"), "Adam has no setting 'speed'"),
        (lambda: choose_optimizer("adam(lr=fast)"), "Adam: learning_rate is 'fast', but must be a finite number"),
        (lambda: choose_optimizer(3), "optimizer is 3, but must be"),
    ],
)
def test_wrong_names_get_the_right_ones(make, sentence):
    with pytest.raises(OptionError, match=sentence):
        make()


def test_the_tables_name_settings():
    for name, aliases in ALIASES.items():
        own = {field.name for field in dataclasses.fields(OPTIMIZERS[name].settings)}
        assert not own & set(aliases)
        assert own >= {setting for settings in aliases.values() for setting in settings.split(", ")}
    for name, argument in OTHERWISE:
        assert argument not in {field.name for field in dataclasses.fields(OPTIMIZERS[name].settings)}


def test_a_trainer_takes_a_name():
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", optimizer="adamw(lr=0.01)"
    )
    assert trainer.optimizer == AdamW(0.01)
