"""Parameters that are frozen for a while, and frozen weights that are set: a GAN, an actor and a critic."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import onnx
import pytest
from onnx import compose

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.training.examples import mlp, points

X, Y = points()
X, Y = X[:32], Y[:32]
MODEL = mlp((4, 8, 6, 3))


def values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


PHASES = [("layer3.*", 3), (["layer2.*", "layer3.*"], 3), ("layer2.*", 2), (None, 3), ("layer1.*", 2)]


@pytest.mark.torch
@pytest.mark.parametrize("first", [None, "layer3.*"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_unfreezing_step_by_step_equals_pytorch(optimizer, first):
    torch = pytest.importorskip("torch")
    own = {"sgd": "sgd(lr=0.1)", "momentum": "momentum(lr=0.1)", "adam": "adamw(lr=0.01,eps=1e-12,weight_decay=0.1)"}
    trainer = onnxtrain.Trainer(MODEL, loss="cross_entropy", optimizer=own[optimizer], train=first, clip_norm=1.0)
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in values(MODEL).items()}
    theirs = {
        "sgd": lambda: torch.optim.SGD(tensors.values(), 0.1),
        "momentum": lambda: torch.optim.SGD(tensors.values(), 0.1, momentum=0.9),
        "adam": lambda: torch.optim.AdamW(tensors.values(), 0.01, eps=1e-12, weight_decay=0.1),
    }[optimizer]()
    for patterns, steps in PHASES:
        trainer.set_trained(patterns)
        chosen = tuple(pattern[:6] for pattern in ([patterns] if isinstance(patterns, str) else patterns or ["layer"]))
        assert list(trainer.parameters) == [name for name in tensors if name.startswith(chosen)]
        for name, tensor in tensors.items():
            tensor.requires_grad_(name.startswith(chosen))
            tensor.grad = None
        for _ in range(steps):
            x = torch.tensor(X)
            for layer in (1, 2, 3):
                x = x @ tensors[f"layer{layer}.weight"].T + tensors[f"layer{layer}.bias"]
                x = x if layer == 3 else x.relu()
            loss = torch.nn.functional.cross_entropy(x, torch.tensor(Y))
            theirs.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
            theirs.step()
            assert trainer.train_step(X, Y) == pytest.approx(loss.item(), rel=2e-5)
    after = values(trainer.model())
    for name, tensor in tensors.items():
        np.testing.assert_allclose(after[name], tensor.detach().numpy(), rtol=1e-3, atol=2e-5)


def test_frozen_parameters_keep_values_and_states_through_copies_and_files(tmp_path):
    trainer = onnxtrain.Trainer(MODEL, loss="cross_entropy", optimizer="adam(lr=0.01)", ema=0.9)
    trainer.fit(X, Y, epochs=2, progress=False)
    trainer.set_trained(freeze="layer1.*")
    before, rate = trainer.state_dict(), trainer.learning_rate
    trainer.fit(X, Y, epochs=1, progress=False, checkpoint=tmp_path / "checkpoints")
    after = trainer.state_dict()
    kept = {name for name in before if name.startswith("layer1.")}
    assert {f"layer1.weight{end}" for end in ("", "/V", "/H", "/average")} <= kept
    assert all(np.array_equal(before[name], after[name]) == (name in kept) for name in before if "layer" in name)
    assert trainer.learning_rate == rate
    assert int(after["trainer/epochs"]) == 3
    others = [copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))]
    resumed = onnxtrain.Trainer(MODEL, loss="cross_entropy", optimizer="adam(lr=0.01)", ema=0.9)
    resumed.set_trained(freeze="layer1.*")
    resumed.load_checkpoint(tmp_path / "checkpoints")
    for other in [*others, resumed]:
        assert all(np.array_equal(value, after[name]) for name, value in other.state_dict().items())
    expected = trainer.train_step(X, Y)
    assert [other.train_step(X, Y) for other in [*others, resumed]] == [expected] * 3
    for each in [trainer, *others]:
        each.set_trained()
        each.train_step(X, Y)
        assert not np.array_equal(each.state_dict()["layer1.weight"], after["layer1.weight"])
    np.testing.assert_array_equal(onnxtrain.predict(trainer.model(), X), trainer.predict(X))
    trainer.save_training_model(tmp_path / "training.onnx")
    resumed = onnxtrain.TrainingSession(tmp_path / "training.onnx")
    feeds = {"x": X, "target": Y, "learning_rate": np.float32(0.01)}
    feeds["x" if "x" in {i.name for i in MODEL.graph.input} else MODEL.graph.input[0].name] = X
    assert float(resumed.step(feeds)["loss"]) == pytest.approx(trainer.train_step(X, Y), rel=1e-6)


def test_what_cannot_be_frozen_is_said():
    trainer = onnxtrain.Trainer(MODEL, loss="cross_entropy")
    with pytest.raises(OptionError, match=r"has no trainable parameter: .*frozen"):
        trainer.set_trained(freeze="*")
    with pytest.raises(OptionError, match=r"train='nothing' matches no initializer"):
        trainer.set_trained("nothing")

    class Freeze(onnxtrain.callbacks.Callback):
        def on_epoch_end(self, state):
            trainer.set_trained("layer3.*")

    with pytest.raises(OptionError, match=r"set_trained changes which weights are live, .* between two trainings only"):
        trainer.fit(X, Y, callbacks=[Freeze()], progress=False)
    trainer.train_step(X, Y)


def test_an_adversarial_pair_shares_weights_by_one_line():
    generator, critic = (
        compose.add_prefix(mlp(sizes), prefix) for sizes, prefix in (((2, 8, 2), "g_"), ((2, 8, 1), "d_"))
    )
    fake, score, x = "g_logits", "d_logits", critic.graph.input[0].name
    both = compose.merge_models(generator, critic, io_map=[(fake, x)], outputs=[fake, score])
    one = onnxtrain.Trainer(critic, loss="bce", optimizer="adam(lr=0.01)")
    other = onnxtrain.Trainer(both, loss="bce", output=score, optimizer="adam(lr=0.01)", freeze="d_*")
    rng = np.random.default_rng(0)
    for _ in range(3):
        z, real = rng.normal(size=(2, 16, 2)).astype(np.float32)
        made = other.predict(z)[fake]
        one.train_step(np.concatenate([real, made]), np.repeat([1.0, 0.0], 16))
        other.set_weights(one.get_weights())
        np.testing.assert_allclose(other.predict(z)[score], one.predict(made), rtol=1e-5, atol=1e-6)
        before = other.get_weights()
        other.train_step(z, np.ones(16))
        changed = {name for name, array in other.get_weights().items() if not np.array_equal(array, before[name])}
        assert changed == set(other.parameters)
        assert all(name.startswith("g_") for name in changed)
    saved = values(other.model())
    assert all(np.array_equal(saved[name], array) for name, array in one.get_weights().items())
    with pytest.raises(OptionError, match="'nothing' is not a parameter"):
        other.set_weights({"nothing": np.zeros(1, np.float32)})


def test_a_frozen_weight_of_another_shape_changes_nothing():
    trainer = onnxtrain.Trainer(mlp((4, 8, 2)), loss="cross_entropy", optimizer="adam", freeze="layer1.*")
    trainer.train_step(X, Y % 2)
    before = trainer.state_dict()
    for name, array in (("layer1.bias", np.ones(9, np.float32)), ("layer1.weight", np.ones((4, 8)))):
        with pytest.raises(OptionError, match=f"The parameter '{name}' is .*; got"):
            trainer.set_weights({"layer2.bias": np.full(2, 5, np.float32), name: array})
        after = trainer.state_dict()
        assert list(after) == list(before)
        assert all(np.array_equal(array, before[key]) for key, array in after.items())
        assert not any(key.startswith("layer1") for key in trainer.weights)
    trainer.train_step(X, Y % 2)


def test_an_actor_and_a_critic_share_their_trunk():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> m (float[N,4] x) => (float[N,2] action, float[N,1] value)
        <float[4,3] trunk = {1,2,3,-1,2,1,0,1,2,1,1,-2}, float[3,2] a = {1,2,1,-1,2,1}, float[3,1] v = {1,-1,2}> {
        h = MatMul(x, trunk)  t = Tanh(h)  action = MatMul(t, a)  value = MatMul(t, v) }"""
    )
    actor = onnxtrain.Trainer(model, loss="cross_entropy", output="action", optimizer="sgd(lr=0.1)")
    critic = onnxtrain.Trainer(model, loss="mse", output="value", optimizer="sgd(lr=0.1)")
    assert (set(actor.parameters), set(critic.parameters)) == ({"trunk", "a"}, {"trunk", "v"})
    for _ in range(3):
        critic.train_step(X, X[:, :1])
        actor.set_weights(critic.get_weights())
        actor.train_step(X, Y % 2)
        critic.set_weights(actor.get_weights())
        assert set(actor.weights) == set(critic.weights) == {"trunk", "a", "v"}
        assert all(np.array_equal(array, critic.weights[name]) for name, array in actor.get_weights().items())
