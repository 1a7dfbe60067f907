"""Train at a high learning rate with a moving average of the weights, in PyTorch Lightning."""

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from sklearn.datasets import load_digits
from torch.nn import Linear, ReLU, Sequential
from torch.utils.data import DataLoader, TensorDataset

lightning.seed_everything(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Sequential(Linear(64, 64), ReLU(), Linear(64, 10))

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("accuracy", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


average = EMAWeightAveraging(decay=0.98)
options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
trainer = lightning.Trainer(max_epochs=20, callbacks=[average], **options)
digits, validation = Digits(), DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=597)
trainer.fit(digits, DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=32, shuffle=True), validation)
print("validation", trainer.callback_metrics["accuracy"].item())
print("accuracy", (digits.model(x[1200:]).argmax(1) == y[1200:]).float().mean().item())
