"""Proximal policy optimization (PPO) of an ONNX policy on CartPole-v1 and Acrobot-v1.

The policy makes its data while it trains. The settings are those of CleanRL's ppo.py: four environments, 128 steps
between updates, four epochs of four batches, a linearly falling learning rate, clipping of ratio and value, advantages
normalized in each batch. Source: Schulman et al., "Proximal policy optimization algorithms", 2017.
"""

from __future__ import annotations

import gymnasium
import numpy as np
import onnx

import onnxtrain
from network import Network
from onnxtrain.losses import CustomLoss

STEPS, ENVIRONMENTS, LENGTH = 500_000, 4, 128
LEARNING_RATE, DISCOUNT, SMOOTHING, CLIP = 2.5e-4, 0.99, 0.95, 0.2


def orthogonal(rng: np.random.Generator, inputs: int, outputs: int, gain: float) -> np.ndarray:
    """Sample an orthogonal matrix [inputs, outputs]."""
    q, r = np.linalg.qr(rng.normal(size=(max(inputs, outputs), min(inputs, outputs))))
    q = q * np.sign(np.diag(r))
    return (gain * (q if inputs >= outputs else q.T)).astype(np.float32)


def policy(observations: int, actions: int, seed: int) -> onnx.ModelProto:
    """`observation` [N, observations] to `heads` [N, actions + 1], the logits of the actions and the value."""
    net, heads = Network(seed), []
    for name, outputs, gain in (("actor", actions, 0.01), ("critic", 1, 1.0)):
        value, sizes = "observation", [observations, 64, 64, outputs]
        for layer in range(3):
            matrix = orthogonal(net.rng, sizes[layer], sizes[layer + 1], 2**0.5 if layer < 2 else gain)
            weight = net.constant(f"{name}{layer}.weight", matrix)
            bias = net.zeros(f"{name}{layer}.bias", sizes[layer + 1])
            value = net.node("Gemm", value, weight, bias, output=f"{name}{layer}")
            if layer < 2:
                value = net.node("Tanh", value, output=f"{value}.tanh")
        heads.append(value)
    net.node("Concat", *heads, output="heads", axis=1)
    return net.model({"observation": ("N", observations)}, {"heads": ("N", actions + 1)})


def ppo_loss(op, heads, target):
    """The clipped objective; the target [N, A + 4] has the action's one-hot code, and four numbers of the rollout."""
    logits, value = heads[:, :-1], heads[:, -1:]
    chosen, rollout = target[:, :-4], target[:, -4:]
    old_log, advantage, goal, old_value = (rollout[:, i : i + 1] for i in range(4))
    logs = op.LogSoftmax(logits, axis=1)
    ratio = op.Exp(op.ReduceSum(logs * chosen, np.array([1]), keepdims=1) - old_log)
    advantage = advantage - op.ReduceMean(advantage, keepdims=1)
    advantage = advantage / (op.Sqrt(op.ReduceMean(advantage**2, keepdims=1)) + 1e-8)
    clipped = op.Clip(ratio, np.float32(1 - CLIP), np.float32(1 + CLIP))
    gain = op.ReduceMean(op.Min(ratio * advantage, clipped * advantage), keepdims=0)
    near = old_value + op.Clip(value - old_value, np.float32(-CLIP), np.float32(CLIP))
    error = 0.5 * op.ReduceMean(op.Max((value - goal) ** 2, (near - goal) ** 2), keepdims=0)
    entropy = -op.ReduceMean(op.ReduceSum(op.Exp(logs) * logs, np.array([1]), keepdims=0), keepdims=0)
    return 0.5 * error - gain - 0.01 * entropy


def logs_of(logits: np.ndarray) -> np.ndarray:
    """Logarithms of the probabilities of the actions."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def train(options, seed: int) -> dict[str, float]:
    """Train on both environments, and return the mean return of the last hundred episodes."""
    if options.quick:
        return {"CartPole-v1, return": last_returns("CartPole-v1", 20_000, seed)}
    return {f"{name}, return": last_returns(name, STEPS, seed) for name in ("CartPole-v1", "Acrobot-v1")}


def last_returns(name: str, steps: int, seed: int) -> float:
    """Train for a number of steps of the environments."""
    rng = np.random.default_rng(seed)
    worlds = gymnasium.make_vec(
        name, ENVIRONMENTS, "sync", vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    )
    actions = int(worlds.single_action_space.n)
    width = actions + 4
    trainer = onnxtrain.Trainer(
        policy(worlds.single_observation_space.shape[0], actions, seed),
        loss=CustomLoss(ppo_loss, shape=("N", width), dtype="float32"),
        optimizer=onnxtrain.Adam(LEARNING_RATE, epsilon=1e-5),
        clip_norm=0.5,
        seed=seed,
        threads=1,
    )
    observation, _ = worlds.reset(seed=seed)
    running, returns, updates = np.zeros(ENVIRONMENTS), [], steps // (ENVIRONMENTS * LENGTH)
    for update in range(updates):
        trainer.learning_rate = LEARNING_RATE * (1 - update / updates)
        seen = np.zeros((LENGTH, ENVIRONMENTS, observation.shape[1]), np.float32)
        target = np.zeros((LENGTH, ENVIRONMENTS, width), np.float32)
        rewards, ended = np.zeros((LENGTH, ENVIRONMENTS)), np.zeros((LENGTH, ENVIRONMENTS), bool)
        for step in range(LENGTH):
            heads = trainer.predict(observation)
            logs = logs_of(heads[:, :-1])
            action = (logs + rng.gumbel(size=logs.shape)).argmax(axis=1)
            seen[step] = observation
            target[step, :, :actions] = np.eye(actions)[action]
            target[step, :, -4] = logs[np.arange(ENVIRONMENTS), action]
            target[step, :, -1] = heads[:, -1]
            observation, rewards[step], terminated, truncated, _ = worlds.step(action)
            ended[step] = terminated | truncated
            running += rewards[step]
            returns += running[ended[step]].tolist()
            running[ended[step]] = 0
        next_value, advantage = trainer.predict(observation)[:, -1], np.zeros(ENVIRONMENTS)
        for step in reversed(range(LENGTH)):  # generalized advantage estimation
            error = rewards[step] + DISCOUNT * next_value * ~ended[step] - target[step, :, -1]
            advantage = error + DISCOUNT * SMOOTHING * advantage * ~ended[step]
            next_value = target[step, :, -1]
            target[step, :, -3], target[step, :, -2] = advantage, advantage + next_value
        trainer.fit(
            seen.reshape(-1, seen.shape[2]), target.reshape(-1, width), epochs=4, batch_size=128, progress=False
        )
    return float(np.mean(returns[-100:]))
