"""Was it the hardware? A bit that is flipped in memory and a NaN in the data are told apart, in real runs."""

import json

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.model.saved_state import ReplicasDifferError
from distloop.training.loop import Diverged
from distloop.variables import tensorflow_variable
from tests.problems import classification, classifier, every, mostly_wide, on, refused

ROWS, SIZE = 61, 15

HARDWARE = "did not fail, with the same bits both times: memory or a chip has changed a number"
CODE_OR_DATA = "failed with the same bits: look at code and data, not at the hardware"


def data(**changes):
    return distloop.make_dataset({**classification(ROWS), **changes}, SIZE, shuffle=True, seed=3)


def with_nan():
    x = np.array(classification(ROWS)["x"])
    x[17] = np.nan
    return data(x=x)


def flip(step, replica=None):
    """An action that flips one bit of a weight once: of the exponent on all replicas, or the last on one."""
    left = [step]

    def act(report):
        if report.step in left:
            left.clear()
            copies = report.state.replica_variables(report.state.trained_variables[-2])
            for copy in copies if replica is None else [copies[replica]]:
                weights = copy.numpy()
                weights.view(np.int32).flat[0] ^= 1 << 30 if replica is None else 1
                copy.assign(weights)

    return every(1, act)


def train(replicas, dataset, actions=(), *, steps=12, kept_every="2 steps", **settings):
    rerun = distloop.RerunFaults(every=kept_every)
    trainer = distloop.Trainer(classifier(dropout=0.3, batch_norm="local"), on(replicas, steps=steps, **settings))
    trainer.fit(dataset, actions=[rerun, *actions])
    return trainer


CASES = mostly_wide(
    [
        (1, {}),
        (2, {}),
        (2, {"on_nonfinite": "raise", "locate_nonfinite": True}),
        (2, {"average_decay": 0.9, "microbatches": 2}),
        (2, {"virtual_replicas": 4}),
        (2, {"steps_per_loop": 3}),
        (1, {"jit_compile": "loop"}),
    ],
    (2, {}),
)


@pytest.mark.parametrize(("replicas", "settings"), CASES)
def test_a_bit_flipped_in_memory_is_told_from_a_nan_in_the_data(replicas, settings):
    found = refused(
        lambda: train(replicas, data(), [flip(7)], **settings),
        "Step 8 is the first",
        "taken again twice from step 6 on",
        HARDWARE,
        kind=Diverged,
    )
    assert CODE_OR_DATA not in found and "learning rate" not in found and "grew too large" not in found
    found = refused(
        lambda: train(replicas, with_nan(), **settings),
        "is the first that was not finite",
        "taken again twice",
        CODE_OR_DATA,
        kind=Diverged,
    )
    assert HARDWARE not in found


def test_replicas_apart_by_a_flipped_bit_are_told_from_code_that_does_it():
    settings = {"check_replicas_every": 1, "kept_every": "3 steps"}
    refused(
        lambda: train(2, data(), [flip(5, replica=1)], **settings),
        "At step 6",
        "of replica 1 of worker 0 differs from that of the first replica",
        "taken again twice from step 3 on",
        HARDWARE,
        kind=ReplicasDifferError,
    )

    def random(gradients):
        seed = tf.stack([tf.distribute.get_replica_context().replica_id_in_sync_group, 7])
        return {path: g + tf.random.stateless_normal(g.shape, seed) for path, g in gradients.items()}

    def model_fn():
        spec = classifier()()
        return distloop.ModelSpec(spec.model, spec.optimizer, spec.updates[0].loss_fn, gradient_fn=random)

    trainer = distloop.Trainer(model_fn, on(2, steps=4))
    refused(
        lambda: trainer.fit(data(), actions=[distloop.RerunFaults(every=1)]),
        "differs from that of the first replica",
        "taken again twice from step 0 on",
        CODE_OR_DATA,
        kind=ReplicasDifferError,
    )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", mostly_wide([1, 2]))
def test_a_loss_that_jumps_by_a_flipped_bit_is_told_from_a_bad_example(tmp_path, replicas):
    settings = {"on_divergence": "rollback", "checkpoint_every": 10, "steps": 60, "max_rollbacks": 3}

    left = [40]

    def grow(report):
        if report.step in left:
            left.clear()
            variable = report.state.trained_variables[-1]
            variable.assign(tf.constant(tensorflow_variable(variable).numpy() + np.arange(4, dtype="f") * 1e4))

    incidents = {}
    for name, dataset, actions in (("flip", data(), [every(1, grow)]), ("data", with_nan(), [])):
        workdir = tmp_path / name
        train(replicas, dataset, actions, workdir=str(workdir), kept_every="7 steps", **settings)
        incidents[name] = (workdir / "incidents.jsonl").read_text()
    assert HARDWARE in incidents["flip"] and "jumped to" in incidents["flip"]
    assert CODE_OR_DATA in incidents["data"] and HARDWARE not in incidents["data"]


def set_to_nan(step):
    left = [step]

    def act(report):
        if report.step in left:
            left.clear()
            variable = report.state.trained_variables[-1]
            variable.assign(tensorflow_variable(variable) * np.nan)

    return every(1, act)


def test_a_run_whose_machine_is_to_blame_goes_back_and_leaves_out_no_batch(tmp_path, capsys):
    settings = {"on_divergence": "rollback", "checkpoint_every": 5, "steps": 14, "kept_every": "7 steps"}
    trainer = train(2, data(), [set_to_nan(10)], workdir=str(tmp_path / "flip"), **settings)
    whole = train(2, data(), workdir=str(tmp_path / "whole"), **settings)
    assert distloop.digest(trainer.model) == distloop.digest(whole.model)
    (incident,) = map(json.loads, (tmp_path / "flip" / "incidents.jsonl").read_text().splitlines())
    assert (incident["step"], incident["action"], incident["checkpoint"]) == (11, "rollback", 5)
    assert "left_out" not in incident
    assert HARDWARE in incident["reason"] and "from a checkpoint of step 7 or before" in incident["reason"]
    assert "learning rate" not in incident["reason"] and "clip_norm" not in incident["reason"]
    assert "on with the same batches" in capsys.readouterr().out


def test_a_run_ends_that_has_no_checkpoint_from_before_the_machine_failed(tmp_path):
    settings = {"on_divergence": "rollback", "checkpoint_every": 2, "keep_checkpoints": 1, "kept_every": "7 steps"}
    with pytest.raises(Diverged, match=HARDWARE) as caught:
        train(2, data(), [set_to_nan(10)], workdir=str(tmp_path), steps=14, **settings)
    assert "The run went back not once" in str(caught.value) and "clip_norm" not in str(caught.value)


@pytest.mark.slow
def test_after_the_reruns_the_state_is_that_of_the_fault():
    def weights_after(actions):
        trainer = distloop.Trainer(classifier(), on(2, steps=12))
        with pytest.raises(Diverged):
            trainer.fit(with_nan(), actions=actions)
        return trainer.step, distloop.digest(trainer.model)

    assert weights_after([]) == weights_after([distloop.RerunFaults(every=1)])


@pytest.mark.slow
def test_a_copy_changes_no_bit_of_a_run():
    def digest(actions):
        trainer = distloop.Trainer(classifier(dropout=0.4), on(2, steps=9, average_decay=0.9))
        trainer.fit(data(), actions=actions)
        return distloop.digest(trainer.model)

    assert digest([]) == digest([distloop.RerunFaults(every=2)])


@pytest.mark.slow
def test_steps_that_differ_each_time_are_not_blamed_on_the_hardware_alone():
    taken = iter(range(10**6))

    def model_fn():
        spec = classifier()()

        def loss_fn(batch, training):
            outputs = spec.updates[0].loss_fn(batch, training)
            number = tf.py_function(lambda: float(next(taken)), [], tf.float32)
            number.set_shape([])
            bad = tf.where(tf.equal(number, 5.0), np.nan, 1.0 + 1e-3 * number)
            return {"loss": outputs["loss"] * bad}

        return distloop.ModelSpec(spec.model, spec.optimizer, loss_fn)

    trainer = distloop.Trainer(model_fn, on(1, steps=12))
    refused(
        lambda: trainer.fit(data(), actions=[distloop.RerunFaults(every=20)]),
        "Step 6 is the first",
        "taken again twice from step 0 on, it had two results: an operation is not deterministic",
        kind=Diverged,
    )


def test_data_that_may_have_another_order_the_second_time_is_refused():
    trainer = distloop.Trainer(classifier(), on(1, steps=3))
    dataset = tf.data.Dataset.from_tensor_slices(classification(ROWS)).shuffle(61).batch(8)
    refused(
        lambda: trainer.fit(dataset, actions=[distloop.RerunFaults()]),
        "RerunFaults was given data without numbers",
        "distloop.make_dataset",
        "on_divergence='rollback'",
    )
    assert trainer.step == 0
