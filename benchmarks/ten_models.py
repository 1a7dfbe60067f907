"""The models of ``ten_step.py``, in each of which one operator decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from zoo_models import ZooModel

if TYPE_CHECKING:
    import torch


def _of(name: str) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        import ten_modules

        return getattr(ten_modules, name)()

    return build


TEN: dict[str, ZooModel] = {
    model.name: model
    for model in (
        ZooModel("crnn", "CRNN, 32 x 128", _of("Crnn"), {"image": (1, 32, 128)}, labels=(32,), size=8),
        ZooModel("unet_3d", "3-D U-Net, 24", _of("VolumeUNet"), {"x": (1, 24, 24, 24)}, labels=(24, 24, 24), size=2),
        ZooModel("wavenet", "WaveNet, 8 layers, 512 steps", _of("WaveNet"), {"x": (8, 512)}, labels=(512,), size=8),
        ZooModel("perceiver", "Perceiver, 512 inputs, 32 latents", _of("Perceiver"), {"x": (512, 32)}, size=8),
        ZooModel("nbeats", "N-BEATS, 6 blocks, 256 wide", _of("NBeats"), {"x": (50,)}, size=256),
        ZooModel("fused_mbconv", "fused MBConv, 64 x 64", _of("fused_mbconv"), {"image": (3, 64, 64)}, size=8),
        ZooModel("state_space", "state spaces, 128 steps", _of("StateSpace"), {"x": (128, 16)}, labels=(128,), size=16),
        ZooModel("sets", "sets of 64, 128 wide", _of("SetNetwork"), {"x": (64, 16)}, size=32),
        ZooModel(
            "autoencoder", "autoencoder, 64 x 64", _of("autoencoder"), {"image": (3, 64, 64)}, labels=(64, 64), size=8
        ),
        ZooModel("experts", "mixture of 8 dense experts", _of("DenseExperts"), {"x": (64,)}, size=256),
    )
}
