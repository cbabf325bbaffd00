"""The language model as a pipeline: one stage on each device, several microbatches per step.

    python -m experiments.pipeline --num_stages=4 --microbatches=4 --device=cpu --width=64 --context=64 --steps=200

Four stages reach the same loss as one device (`--num_stages=1 --microbatches=1 --num_devices=1`): 2.523172, mean of the
last 50 steps, and 3.520 test bits per byte (4 virtual CPUs on 2 cores). With `--recompute_stages`, stages keep no
activations for the backward pass.
"""

import keras
import numpy as np
from absl import app, flags

import distloop
from experiments import datasets, language_model

distloop.define_flags(steps=300, batch_size=16, log_every=50, clip_norm=1.0, num_stages=2, microbatches=4)
RECOMPUTE = flags.DEFINE_bool("recompute_stages", False, "Recompute activations in the backward pass, to save memory.")


def model_fn():
    config = distloop.Config.from_flags()
    model = distloop.split(language_model.make_modules(), config.num_stages, recompute=RECOMPUTE.value)

    def loss_fn(batch, training):
        text = keras.ops.cast(batch["bytes"], "int32")  # [B, T + 1]
        logits = model(text[:, :-1], training=training)  # [B, T, 256]
        nats = keras.losses.sparse_categorical_crossentropy(text[:, 1:], logits, from_logits=True)  # [B, T]
        return {"loss": distloop.weighted(nats, batch["weight"])}

    rate = distloop.make_schedule(language_model.LEARNING_RATE.value, "100 %", warmup="10 %")
    return distloop.ModelSpec(model, keras.optimizers.AdamW(rate, beta_2=0.99, weight_decay=0.1), loss_fn)


def main(_):
    config = distloop.Config.from_flags()
    distloop.prepare(config)
    train, test = (
        datasets.python_source(split, config.batch_size, language_model.CONTEXT.value) for split in ("train", "test")
    )
    trainer = distloop.Trainer(model_fn, config)
    numbers = trainer.fit(train)
    print(f"loss {numbers['loss']:.6f}  test bits per byte {trainer.evaluate(test)['loss'] / np.log(2):.3f}")


if __name__ == "__main__":
    app.run(main)
