"""Sixty calls of public names for type checkers: a line marked WRONG must be an error, and no other may be."""

import numpy as np
import onnx

import onnxtrain
from onnxtrain import callbacks, losses, schedules
from onnxtrain.adapters import adaptable_layers, add_slots
from onnxtrain.data import CsvFile, pack
from onnxtrain.editing.layers import Activation, Linear

model: onnx.ModelProto = onnxtrain.examples.mlp((4, 8, 3))
x = np.zeros((8, 4), np.float32)
y = np.arange(8) % 3
trainer = onnxtrain.Trainer(model, loss="cross_entropy")
onnxtrain.Trainer("model.onnx", loss="mse", optimizer="adam(lr=0.1)", train="*.weight", seed=3)
onnxtrain.Trainer(model, loss=losses.Huber(delta=0.5), optimizer=onnxtrain.SGD(lr=0.1, momentum=0.9), clip_norm=1.0)
onnxtrain.Trainer(model, loss="mse", lora=onnxtrain.Lora(rank=4), ema=0.9)
onnxtrain.Trainer(model, loss="mse", precision="bfloat16", distributed="mpi", recompute="layers", dynamic_batch=True)
onnxtrain.Trainer(model, loss="mse", precision=onnxtrain.Precision(states="8bit"), runtime=onnxtrain.RuntimeOptions(2))
onnxtrain.Trainer(model, loss="mse", compute="bfloat16")  # WRONG
onnxtrain.Trainer(model, loss="mse", recompute=3)  # WRONG
onnxtrain.Trainer(model)  # WRONG
onnxtrain.Trainer(model, los="mse")  # WRONG
onnxtrain.Trainer(model, loss="mse", clip_norm="1")  # WRONG
onnxtrain.Trainer(3, loss="mse")  # WRONG
history = trainer.fit(x, y, epochs=2, batch_size=4, validation=0.25, metrics="accuracy", progress=False)
history.rows[0]["loss"] + 1.0
history.save("rows.csv")
history.sav("rows.csv")  # WRONG
trainer.fit("train.csv", target="label", schedule=schedules.Cosine(0.1, 100), callbacks=[callbacks.EarlyStopping()])
trainer.fit(x, y, epoch=2)  # WRONG
trainer.fit(x, y, epochs="2")  # WRONG
trainer.fit(x, y, batch_size=None)  # WRONG
trainer.fit()  # WRONG
loss: float = trainer.train_step(x, y)
wrong_loss: str = trainer.train_step(x, y)  # WRONG
trainer.train_step(x, target=y)  # WRONG
measured: dict[str, float] = trainer.evaluate(x, y, metrics=["accuracy"])
trainer.evaluate(x, y, metric="accuracy")  # WRONG
trainer.evaluate(x, y, batch_size="8")  # WRONG
trainer.predict(x, batch_size=8)
trainer.predict(x, y, 3)  # WRONG
best: np.ndarray = trainer.predict(x, dropout=True, samples=20).mean(axis=0).argmax(axis=1)
chances: np.ndarray = trainer.predict_proba(x).max(axis=1)
arrays: dict[str, np.ndarray] = trainer.predict_all(x, batch_size=8)
trainer.predict_all(x)["logits"].argmax(1)
trainer.predict_all(x).argmax(1)  # WRONG
trainer.predict(x, samples="20")  # WRONG
trainer.set_trained("layer2.*")
trainer.set_trained(freeze=3)  # WRONG
trainer.learning_rate = onnxtrain.find_learning_rate(trainer, x, y).suggestion
onnxtrain.calibrate(trainer, x, y).temperature + 1.0
onnxtrain.calibrate(trainer, x, y).save("calibrated.onnx")
onnxtrain.predict_all(model, x)["logits"].argmax(1)
onnxtrain.predict(model, x, dropout=True).argmax(1)
trainer.save("tuned.onnx", ema=False)
trainer.save()  # WRONG
saved: onnx.ModelProto = trainer.model()
trainer.learning_rate = 0.1
trainer.set_masks({"layer1.weight": np.ones((4, 8), bool)})
trainer.set_weights(trainer.get_weights())
trainer.load_state_dict(trainer.state_dict(), strict=False)
onnxtrain.training_model(model, loss="mse", optimizer="sgd", accumulate=True, clip_value=1.0)
onnxtrain.training_model(model, loss="mse", optimizer="sgd", threads=1)  # WRONG
trainer.save_training_model("training.onnx")
trainer.parameters["layer1.weight"]
trainer.hints[0].upper()
trainer.unknown()  # WRONG
onnxtrain.Adam(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
onnxtrain.Adam(1e-3, alpha=0.8, epsilon=1e-8)
onnxtrain.Adam(lr="fast")  # WRONG
onnxtrain.Adam(epsylon=1e-8)  # WRONG
onnxtrain.AdamW(lr=1e-3, eps=1e-8, betas=(0.9, 0.95))
onnxtrain.AdamW(betas=0.9)  # WRONG
onnxtrain.AdamW(alpha=0.9, epsilon=1e-8)
onnxtrain.Momentum(lr=0.1, momentum=0.9, nesterov=True)
onnxtrain.Adagrad(lr=0.1, lr_decay=0.0, eps=1e-10)
onnxtrain.RMSprop(alpha=0.9).learning_rate + 1.0
onnxtrain.Lion(lrate=0.1)  # WRONG
onnxtrain.Group("*.bias", weight_decay=0.0)
onnxtrain.layer_decay(model, 0.8, groups=[onnxtrain.Group("*.bias", lr_scale=0.1)])
onnxtrain.layer_decay(model, "0.8")  # WRONG
onnxtrain.inspect(model).trainable_size + 1
onnxtrain.inspect(model).tensors()  # WRONG
derivative: onnx.ModelProto = onnxtrain.gradient(model, xs=["input"])
onnxtrain.replace_head(model, classes=5)
onnxtrain.append(model, Activation("Relu"), Linear(2))
onnxtrain.predict(model, x)
onnxtrain.evaluate(model, (x, y), loss="cross_entropy")
onnxtrain.prune(model, (x, y), loss="cross_entropy", sparsity=0.5)
onnxtrain.prune(model, (x, y), loss="cross_entropy", sparsity="half")  # WRONG
onnxtrain.prune(model, (x, y), loss="cross_entropy", structure=("channels", "heads"), speedup=2.0)
onnxtrain.prune(model, (x, y), loss="cross_entropy", structure="rows", flops=0.5)  # WRONG
onnxtrain.shrink(model, {"layer1.weight": np.ones((4, 8), bool)}, change_outputs=True)
onnxtrain.shrink(model, masks=3)  # WRONG
onnxtrain.operators.adam(0.1, 1, x, x, x, x)
losses.Huber(delta="1")  # WRONG
callbacks.EarlyStopping(patience=3)
callbacks.EarlyStopping(patience="3")  # WRONG
pack([[1, 2], [3]], length=4)
CsvFile("train.csv", delimiter=";")
[row.bits for row in adaptable_layers("model.onnx")]
add_slots(model, "slots.onnx", targets="*.q_proj")
add_slots(model, "slots.onnx", adapter=["a.onnx_adapter", "b.onnx_adapter"])
add_slots(model, "slots.onnx", adapter=3)  # WRONG
onnxtrain.predict(model, x, lora=onnxtrain.Lora(adapter="tuned.onnx_adapter"))
onnxtrain.predict(model, x, lora="tuned.onnx_adapter")  # WRONG
