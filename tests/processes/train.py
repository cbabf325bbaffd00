"""A program that trains on rows of worker processes; tests/processes/test_row_processes.py starts it.

python tests/processes/train.py WORKDIR PROCESSES STEPS [ROW THAT WAITS]
"""

import sys

import distloop
from tests.processes.python_sources import Waves, add_noise


def train(workdir, processes, steps, **special):
    """Trains with dropout, noise and an odd last batch, and returns the digest of the weights."""
    import keras

    def model_fn():
        layers = [keras.layers.Flatten(), keras.layers.Dropout(0.2), keras.layers.Dense(4, name="logits")]
        model = keras.Sequential([keras.Input((4, 3)), *layers], name="net")

        def loss_fn(batch, training):
            logits = model(batch["x"], training=training)
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}

        return distloop.ModelSpec(model, keras.optimizers.Adam(1e-2), loss_fn)

    data = distloop.make_dataset(Waves(**special), 8, shuffle=True, map_fn=add_noise, processes=processes)
    config = distloop.Config(device="cpu", console="quiet", workdir=workdir, checkpoint_every=2, keep_checkpoints=99)
    trainer = distloop.Trainer(model_fn, config)
    trainer.fit(data, steps=steps)
    return distloop.digest(trainer.model)


if __name__ == "__main__":
    workdir, processes, steps, *waits = sys.argv[1:]
    print(train(workdir, int(processes), int(steps), **({"waits": int(waits[0])} if waits else {})))
