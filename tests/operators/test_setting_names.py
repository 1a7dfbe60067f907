"""Every setting has the operator's name and PyTorch's; optimizers are found by name."""

import dataclasses
import inspect

import pytest

import onnxtrain
from onnxtrain import LAMB, SGD, SSGD, Adagrad, Adam, AdamW, Group, Lion, Momentum, RMSprop
from onnxtrain.errors import OptionError
from onnxtrain.operators import OPTIMIZERS
from onnxtrain.operators.optimizer import setting_names
from onnxtrain.operators.registry import choose_optimizer

pytestmark = pytest.mark.sampled(1)  # each case is cheap


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Adam(lr=0.1, betas=(0.5, 0.6), weight_decay=0.01), Adam(0.1, alpha=0.5, beta=0.6, norm_coefficient=0.01)),
        (Adagrad(lr_decay=0.1, eps=0.2), Adagrad(decay_factor=0.1, epsilon=0.2)),
        (Momentum(momentum=0.5, nesterov=True), Momentum(alpha=0.5, mode="nesterov")),
        (Momentum(nesterov=False), Momentum()),
        (Momentum(dampening=0.25), Momentum(beta=0.75)),
        (AdamW(alpha=0.5, epsilon=0.25), AdamW(betas=(0.5, 0.999), eps=0.25)),
        (LAMB(beta=0.5), LAMB(betas=(0.9, 0.5))),
        (RMSprop(epsilon=0.5), RMSprop(eps=0.5)),
        (SGD(momentum=0.5, mode="nesterov"), SGD(momentum=0.5, nesterov=True)),
        (Group("*", beta=0.25).rule(AdamW(betas=(0.5, 0.75))).optimizer, AdamW(betas=(0.5, 0.25))),
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
        (lambda: AdamW(betas=(0.9, 0.9), beta=0.9), "AdamW: beta is given twice, by betas and by beta"),
        (lambda: Momentum(dampening="much"), "Momentum: dampening is 'much', but must be a number"),
        (lambda: Momentum(dampening=0.5, beta=0.5), "Momentum: beta is given twice, by dampening and by beta"),
        (lambda: Momentum(nesterov="yes"), "Momentum: nesterov is 'yes', but must be True or False"),
        (lambda: SGD(speed=1), "SGD has no setting 'speed'; its settings are learning_rate, lr, momentum, dampening"),
        (lambda: AdamW(1e-3, (0.9, 0.99), beta=0.9), "AdamW: beta is given twice, by the arguments before and by beta"),
        (lambda: Adam(0.1, lr=0.2), "Adam: learning_rate is given twice, by the arguments before and by lr"),
        (lambda: Adam(betas=(0.1, 0.2), alpha=0.3), "Adam: alpha is given twice, by betas and by alpha"),
        (lambda: Adam(betas=0.5), "Adam: betas is 0.5, but must be a pair of numbers"),
        (lambda: choose_optimizer("nadam"), "optimizer='nadam' is not an optimizer; .* one of the names adagrad, adam"),
        (lambda: choose_optimizer("adam(speed=1)"), "Adam has no setting 'speed'"),
        (lambda: choose_optimizer("adam(0.1, learning_rate=1)"), "Adam: learning_rate is given twice in 'adam"),
        (lambda: choose_optimizer("lion(0.1, (0.9, 0.9), 0, 1)"), "Lion has 3 settings: learning_rate, betas, weight_"),
        (lambda: choose_optimizer("adam(lr=fast)"), "Adam: learning_rate is 'fast', but must be a finite number"),
        (lambda: choose_optimizer(3), "optimizer=3 is not an optimizer"),
    ],
)
def test_wrong_names_get_the_right_ones(make, sentence):
    with pytest.raises(OptionError, match=sentence):
        make()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_names_are_in_the_signature(name):
    settings = OPTIMIZERS[name].settings
    parameters = inspect.signature(settings).parameters
    assert set(setting_names(settings)) == set(parameters) >= {"lr", "learning_rate"}
    assert {attribute.name for attribute in settings.schema.attributes} <= set(parameters)


def test_a_trainer_takes_a_name():
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", optimizer="adamw(lr=0.01)"
    )
    assert trainer.config.optimizer == AdamW(0.01)
