"""Distillation: a small network learns from a large one that was trained before and is frozen.

    python -m experiments.distillation --learner=teacher --workdir=runs/teacher --device=cpu --num_devices=2 \
        --steps=600
    python -m experiments.distillation --learner=student --workdir=runs/student --device=cpu --num_devices=2 \
        --init_from=runs/teacher --init_rename=^teacher/

Both models are in one `ModelSpec`: `trainable` selects the one that learns, and `--init_rename` loads only the teacher
from the first run, whose student is untrained.

Measured on 2 virtual CPUs (2 cores): the teacher, 113,162 weights, has a test accuracy of 0.983 after 600 steps; the
student, 760 weights, 0.958 after 2,000 steps, 40 s in total. From the labels alone (`--share=0`) the student has 0.961,
one image more: if every image has a label, the teacher adds nothing.
"""

import keras
import tensorflow as tf
from absl import app, flags

import distloop
from experiments import datasets

distloop.define_flags(steps=2_000, batch_size=128, eval_every=500)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Peak learning rate of AdamW, after the warm-up.")
LEARNER = flags.DEFINE_enum("learner", "student", ["teacher", "student"], "Which of the two models to train.")
SHARE = flags.DEFINE_float("share", 0.9, "The teacher's part of the student's loss; the rest is from the labels.")
TEMPERATURE = flags.DEFINE_float("temperature", 3.0, "Divisor of both models' logits in the teacher's part.")


def make_teacher():
    layers = [
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Conv2D(128, 3, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers], name="teacher")


def make_student():
    layers = [keras.layers.Flatten(), keras.layers.Dense(10, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers], name="student")


def model_fn():
    models = {"teacher": make_teacher(), "student": make_student()}
    teacher, learner = models["teacher"], models[LEARNER.value]

    def loss_fn(batch, training):
        logits, label = learner(batch["image"], training=training), batch["label"]  # [B, 10], [B]
        loss = keras.losses.sparse_categorical_crossentropy(label, logits, from_logits=True)  # [B]
        if LEARNER.value == "student":
            heat = TEMPERATURE.value
            soft_label = tf.nn.softmax(teacher(batch["image"], training=False) / heat)
            soft_loss = heat**2 * keras.losses.kl_divergence(soft_label, tf.nn.softmax(logits / heat))  # [B]
            loss = (1 - SHARE.value) * loss + SHARE.value * soft_loss  # Hinton et al. 2015, arXiv:1503.02531, section 2
        return {"loss": loss, "accuracy": keras.metrics.sparse_categorical_accuracy(label, logits)}

    rate = distloop.make_schedule(LEARNING_RATE.value, "100 %", warmup="2.5 %")
    return distloop.ModelSpec(
        models,
        keras.optimizers.AdamW(rate, weight_decay=1e-3),
        loss_fn,
        predict_fn=lambda batch: learner(batch["image"], training=False),
        trainable=f"^{LEARNER.value}/",
    )


def main(_):
    config = distloop.Config.from_flags()
    distloop.prepare(config)
    train, test = (datasets.digits(split, config.batch_size) for split in ("train", "test"))
    trainer = distloop.Trainer(model_fn, config)
    trainer.fit(train, evals={"test": test})
    size = trainer.model[LEARNER.value].count_params()
    print(f"test accuracy {trainer.evaluate(test)['accuracy']:.3f} of the {LEARNER.value}, {size} weights")


if __name__ == "__main__":
    app.run(main)
