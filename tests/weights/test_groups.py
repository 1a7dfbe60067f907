"""Groups of parameters: against PyTorch, in one step graph, in checkpoints, and refused groups."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import Group, examples, layer_decay
from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.lowering.training_info.build import build_entries
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.prepare import prepare

LOSS = "softmax_cross_entropy"
SIZES = (4, 8, 6, 3)


def batches(count, rows=5):
    rng = np.random.default_rng(1)
    return [(rng.standard_normal((rows, SIZES[0])).astype(np.float32), rng.integers(0, 3, rows)) for _ in range(count)]


def trained(groups, optimizer="adamw(lr=0.01)", steps=3, **options):
    trainer = onnxtrain.Trainer(examples.mlp(SIZES), loss=LOSS, optimizer=optimizer, groups=groups, **options)
    for x, y in batches(steps):
        trainer.train_step(x, y)
    return trainer.get_weights()


def of_torch(make, groups, steps, clip=None):
    """Return PyTorch's weights after some steps; groups are (predicate, settings), the first match applies."""
    torch = pytest.importorskip("torch")
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in examples.mlp(SIZES).graph.initializer}
    parameters = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in tensors.items()}
    taken, chosen = set(), []
    for fits, settings in [*groups, (lambda name: True, {})]:
        names = [name for name in parameters if fits(name) and name not in taken]
        taken |= set(names)
        chosen.append({"params": [parameters[name] for name in names], **settings})
    optimizer = make([group for group in chosen if group["params"]])
    for x, y in batches(steps):
        optimizer.zero_grad()
        h = torch.from_numpy(x)
        for layer in (1, 2, 3):
            h = h @ parameters[f"layer{layer}.weight"].T + parameters[f"layer{layer}.bias"]
            h = torch.relu(h) if layer < 3 else h
        torch.nn.functional.cross_entropy(h, torch.from_numpy(y)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip)
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


@pytest.mark.torch
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_hundred_steps_match_pytorch(kernels, clip):
    torch = pytest.importorskip("torch")
    groups = [Group("*.bias", weight_decay=0.0), Group("layer1.*|layer2.*", lr_scale=0.1, betas=(0.8, 0.9))]
    options = onnxtrain.RuntimeOptions(kernels=kernels)
    ours = trained(groups, "adamw(lr=0.01, weight_decay=0.3)", 100, clip_norm=clip, runtime=options)
    theirs = of_torch(
        lambda given: torch.optim.AdamW(given, lr=0.01, weight_decay=0.3),
        [
            (lambda name: name.endswith("bias"), {"weight_decay": 0.0}),
            (lambda name: name.startswith(("layer1", "layer2")), {"lr": 0.001, "betas": (0.8, 0.9)}),
        ],
        100,
        clip,
    )
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.torch
def test_momentum_and_rate_of_a_group_match_pytorch():
    torch = pytest.importorskip("torch")
    ours = trained([Group("layer3.*", momentum=0.9, nesterov=True, lr=0.02)], "sgd(lr=0.1)", 100)
    theirs = of_torch(
        lambda given: torch.optim.SGD(given, lr=0.1),
        [(lambda name: name.startswith("layer3"), {"lr": 0.02, "momentum": 0.9, "nesterov": True})],
        100,
    )
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def nodes_of(groups, **options):
    config = TrainingConfig.of(examples.mlp(SIZES), LOSS, "adamw", groups=groups, **options)
    entries, _ = build_entries(prepare(config).step_spec(config))
    return [node.op_type for node in entries[-1].model.graph]


def test_one_node_updates_all_parameters_with_equal_settings():
    assert nodes_of([]).count("AdamW") == 1
    assert nodes_of([Group("*.bias", weight_decay=0.0)]).count("AdamW") == 2
    alike = [Group("layer1.bias", weight_decay=0.0), Group("layer2.bias", weight_decay=0.0), Group("*", lr_scale=1)]
    assert nodes_of(alike).count("AdamW") == 2
    assert nodes_of([Group("*.bias", weight_decay=0.0)], accumulate=2).count("AdamW") == 2


def test_clipping_stays_inside_the_updates():
    trainer = onnxtrain.Trainer(
        examples.mlp(SIZES), loss=LOSS, optimizer="adamw", groups=[Group("*.bias", weight_decay=0.0)], clip_norm=1.0
    )
    lowered = onnxtrain.lower(trainer.training_model(), kernels=True)
    operators = [node.op_type for node in lowered.graph.node]
    assert operators.count("FusedAdamW") == 2
    assert "AdamW" not in operators


@pytest.mark.parametrize("portable", [False, True])
def test_a_training_model_has_the_groups(portable):
    model = examples.mlp(SIZES)
    groups = [Group("layer1.*", lr_scale=0.0), Group("*.bias", weight_decay=0.0)]
    training = onnxtrain.training_model(model, loss=LOSS, optimizer="adamw(lr=0.01)", groups=groups)
    onnx.checker.check_model(training)
    options = onnxtrain.RuntimeOptions(kernels=False) if portable else None
    session = onnxtrain.TrainingSession(training, runtime=options)
    for x, y in batches(3):
        session.step({"input": x, "target": y, "learning_rate": np.float32(0.01)})
    ours = trained(groups)
    for name, array in ours.items():
        np.testing.assert_allclose(session.state[name], array, rtol=1e-6, err_msg=name)


def test_a_parameter_belongs_to_the_first_matching_group():
    first = trained([Group("layer1.weight", lr_scale=0.0), Group("*", lr_scale=0.5)])
    given = {t.name: onnx.numpy_helper.to_array(t) for t in examples.mlp(SIZES).graph.initializer}
    np.testing.assert_array_equal(first["layer1.weight"], given["layer1.weight"])
    assert (first["layer2.weight"] != given["layer2.weight"]).any()
    other = trained([Group("*", lr_scale=0.5), Group("layer1.weight", lr_scale=0.0)])
    assert (other["layer1.weight"] != given["layer1.weight"]).any()


def test_a_group_that_loses_settings_to_an_earlier_one_gets_a_hint():
    groups = [Group("*.bias", weight_decay=0.0), Group("layer1.*", lr_scale=0.1)]
    trainer = onnxtrain.Trainer(examples.mlp(SIZES), loss=LOSS, optimizer="adamw", groups=groups)
    (hint,) = [hint for hint in trainer.hints if "Group" in hint]
    assert hint == (
        "Group('layer1.*', lr_scale=0.1) matches 1 parameters that Group('*.bias', weight_decay=0.0) has already: "
        "only the first group that matches applies, so that they do not get its lr_scale."
    )


def test_an_alternative_that_matches_nothing_gets_a_hint():
    groups = [Group("*.bias|*norm*", weight_decay=0.0)]
    trainer = onnxtrain.Trainer(examples.mlp(SIZES), loss=LOSS, optimizer="adamw", groups=groups)
    (hint,) = [hint for hint in trainer.hints if "Group" in hint]
    expected = "In Group('*.bias|*norm*', weight_decay=0.0) nothing matches '*norm*'; patterns are case-sensitive."
    assert hint == expected


def test_groups_match_module_paths():
    model = named(["onnx::MatMul_4", "onnx::MatMul_5"])
    for node, name in zip(model.graph.node, ["/body/MatMul", "/head/MatMul"], strict=True):
        node.name = name
    trainer = onnxtrain.Trainer(model, loss=LOSS, optimizer="sgd(lr=1.0)", groups=[Group("head.weight", lr_scale=0.0)])
    before = trainer.get_weights()
    trainer.train_step(np.ones((2, 2), np.float32), np.array([0, 0]))
    still = [name for name, array in trainer.parameters.items() if np.array_equal(array, before[name])]
    assert still == ["onnx::MatMul_5"]


def test_train_and_freeze_accept_alternatives():
    trainer = onnxtrain.Trainer(examples.mlp(SIZES), loss=LOSS, train="layer1.*|layer3.*", freeze="*.bias|no.such")
    assert list(trainer.parameters) == ["layer1.weight", "layer3.weight"]


def test_groups_of_frozen_parameters_do_nothing():
    assert list(trained([Group("layer1.*", lr_scale=0.1)], freeze="layer1.*")) == [
        f"layer{layer}.{kind}" for layer in (2, 3) for kind in ("weight", "bias")
    ]


def test_masks_and_sparsity_within_groups():
    mask = np.arange(48).reshape(6, 8) % 2 == 0
    weights = trained([Group("layer2.*", lr_scale=0.5)], "ssgd(0.05, alpha=0.9)", masks={"layer2.weight": mask})[
        "layer2.weight"
    ]
    assert not weights[~mask].any()
    assert weights[mask].all()
    with pytest.raises(OptionError, match="epsilon 0"):
        trained([Group("layer2.*", epsilon=0.0)], "adam", masks={"layer2.weight": mask})


@pytest.mark.plugins
def test_prune_takes_groups():
    x, y = batches(1, 30)[0]
    result = onnxtrain.prune(
        examples.mlp(SIZES),
        (x, y),
        loss=LOSS,
        sparsity=0.5,
        epochs=1,
        fine_tune_epochs=1,
        groups=[Group("layer1.bias", lr_scale=0.0)],
    )
    given = onnx.numpy_helper.to_array(examples.mlp(SIZES).graph.initializer[1])
    (found,) = [onnx.numpy_helper.to_array(t) for t in result.model().graph.initializer if t.name == "layer1.bias"]
    np.testing.assert_array_equal(found, given)


def test_checkpoints_know_groups(tmp_path):
    x, y = batches(1, 12)[0]

    def trainer(*groups):
        return onnxtrain.Trainer(examples.mlp(SIZES), loss=LOSS, optimizer="adamw(lr=0.01)", groups=groups)

    group = Group("*.bias", weight_decay=0.0)
    whole = trainer(group)
    whole.fit(x, y, epochs=3, batch_size=4)
    trainer(group).fit(x, y, epochs=2, batch_size=4, checkpoint=tmp_path)
    again = trainer(group)
    again.fit(x, y, epochs=3, batch_size=4, checkpoint=tmp_path, resume=True)
    for name, array in whole.parameters.items():
        assert again.parameters[name].tobytes() == array.tobytes()
    with pytest.raises(CheckpointError, match="groups is"):
        trainer(Group("*.bias", weight_decay=0.5)).fit(x, y, epochs=4, checkpoint=tmp_path, batch_size=4, resume=True)
    trainer().fit(x, y, epochs=4, checkpoint=tmp_path, batch_size=4, resume=True, change="groups")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trained([Group("no.such.*")]), r"group='no.such.\*' matches no initializer; the model has layer1"),
        (lambda: trained([Group("*", momentum=0.9)]), r"Group\('\*', momentum=0.9\): AdamW has no setting 'momentum'"),
        (lambda: trained([Group("*", weight_decay=-1)]), "weight_decay is -1, but must be a finite number, 0 or more"),
        (lambda: trained([{"params": "*"}]), r"groups has \{'params'.*it takes groups such as onnxtrain.Group"),
        (lambda: trained("*.bias"), r"groups has '\*'; it takes groups such as"),
        (lambda: trained([Group("*", lr=0.1)], "sgd(lr=0)"), "relative to the optimizer's, which is 0"),
        (lambda: Group("*", lr_scale=-0.5), r"lr_scale is -0.5, but must be a finite number, 0 or more"),
        (lambda: Group("*", lr_scale="0.5"), r"lr_scale is '0.5', but must be a number"),
        (lambda: Group("*", lr_scale=0.5, lr=0.1), "has both a learning rate and lr_scale"),
        (lambda: Group([]), r"Group\(\[\]\): a group needs a glob pattern of names, or several"),
        (
            lambda: layer_decay(examples.mlp(SIZES), 1.5),
            "decay is 1.5; layer_decay needs a number above 0 and at most 1",
        ),
    ],
)
def test_invalid_groups_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def named(paths):
    """Build a chain of matmuls with weights of these names."""
    names = [f"float[2,2] {name} = {{1, 0, 0, 1}}" for name in (f"w{i}" for i in range(len(paths)))]
    nodes = [f"h{i + 1} = MatMul(h{i}, w{i})" for i in range(len(paths))]
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]>
        f (float[n,2] h0) => (float[n,2] h{len(paths)}) <{", ".join(names)}> {{ {" ".join(nodes)} }}"""
    )
    for i, path in enumerate(paths):
        model.graph.initializer[i].name = path
        model.graph.node[i].input[1] = path
    return model


def scales(groups):
    return [(list(group.patterns), group.lr_scale) for group in groups]


def test_layers_are_numbered_modules_and_all_parameters_before_and_after():
    paths = ["bert.tokens.weight", "positions", "bert.layer.0.a.weight", "bert.layer.0.b.weight"]
    model = named([*paths, "bert.layer.1.a.weight", "pooler.weight", "classifier.weight"])
    assert scales(layer_decay(model, 0.5)) == [
        (paths[:2], 0.125),
        (paths[2:], 0.25),
        (["bert.layer.1.a.weight"], 0.5),
        (["pooler.weight", "classifier.weight"], 1.0),
    ]


def test_layers_without_numbers_are_modules_or_matrices():
    assert scales(layer_decay(named(["fc.weight", "head.weight"]), 0.5)) == [(["fc.weight"], 0.5), (["head.weight"], 1)]
    assert scales(layer_decay(named(["w", "v"]), 0.5)) == [(["w"], 0.5), (["v"], 1.0)]


def test_layer_decay_keeps_the_settings_of_groups():
    groups = layer_decay(examples.mlp(SIZES), 0.5, [Group("*.bias", weight_decay=0.0, lr=0.1)])
    assert [str(group) for group in groups] == [
        "Group('layer1.bias', weight_decay=0.0, lr=0.025)",
        "Group('layer2.bias', weight_decay=0.0, lr=0.05)",
        "Group('layer3.bias', weight_decay=0.0, lr=0.1)",
        "Group('layer1.weight', lr_scale=0.25)",
        "Group('layer2.weight', lr_scale=0.5)",
        "Group('layer3.weight')",
    ]


@pytest.mark.torch
def test_layer_decay_matches_groups_of_pytorch():
    torch = pytest.importorskip("torch")
    ours = trained(layer_decay(examples.mlp(SIZES), 0.5), steps=30)
    rates = {"layer1": 0.0025, "layer2": 0.005}
    theirs = of_torch(
        lambda given: torch.optim.AdamW(given, lr=0.01),
        [(lambda name, layer=layer: name.startswith(layer), {"lr": rate}) for layer, rate in rates.items()],
        30,
    )
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=2e-4, atol=2e-6, err_msg=name)
