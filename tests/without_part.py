"""A program that runs the loop's laws with parts of distloop gone; tests/test_without_parts.py starts it.

python tests/without_part.py records WORKDIR
"""

import importlib.abc
import sys


class Gone(importlib.abc.MetaPathFinder):
    """Refuses to import a folder of distloop, as if it had been deleted."""

    def __init__(self, part):
        self.name = f"distloop.{part}"

    def find_spec(self, fullname, path, target=None):
        if fullname == self.name or fullname.startswith(f"{self.name}."):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def without(part):
    """Has the parts, such as `records,tables`, gone from this process, which may have imported distloop already."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "distloop"]:
        del sys.modules[name]
    for name in part.split(","):
        sys.meta_path.insert(0, Gone(name))


def main(part, workdir):
    without(part)
    import numpy as np

    import distloop

    distloop.prepare(distloop.Config(device="cpu", num_devices=2))
    import keras

    x = np.random.default_rng(0).normal(size=(50, 6)).astype("float32")
    y = x.sum(1, keepdims=True)

    def model_fn():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])

        def loss_fn(batch, training):
            return {"loss": keras.losses.mean_squared_error(batch["y"], model(batch["x"], training=training))}

        return distloop.ModelSpec(
            model, keras.optimizers.Adam(1e-2), loss_fn, predict_fn=lambda batch: model(batch["x"], training=False)
        )

    def train(replicas, steps, workdir=""):
        settings = {"device": "cpu", "num_devices": replicas, "batch_size": 16, "console": "quiet"}
        trainer = distloop.Trainer(model_fn, distloop.Config(workdir=workdir, clip_norm=1.0, **settings))
        trainer.fit({"x": x, "y": y}, steps=steps, evals={"test": {"x": x, "y": y}})
        return trainer

    def weights(trainer):
        return np.concatenate([value.ravel() for value in trainer.model.get_weights()])

    one, two = train(1, 8), train(2, 8)
    np.testing.assert_allclose(weights(two), weights(one), rtol=1e-5, atol=1e-6)
    train(2, 3, workdir)
    np.testing.assert_array_equal(weights(train(2, 8, workdir)), weights(two))
    outputs = two.predict({"x": x, "y": y})
    np.testing.assert_allclose(outputs, two.model(x).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(two.evaluate({"x": x, "y": y})["loss"], np.mean((outputs - y) ** 2), rtol=1e-5)
    gone = [name for name in sys.modules if name.startswith(tuple(f"distloop.{p}" for p in part.split(",")))]
    assert gone == [], gone
    print("held")


if __name__ == "__main__":
    main(*sys.argv[1:])
