"""Tests what TensorBoard is told of a run before its first step."""

import json
import os
import re
import shlex
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from tensorboard.plugins.graph.keras_util import keras_model_to_graph_def

import distloop
from distloop.run import overview
from tests import problems

SPEC = {"x": tf.TensorSpec([None, 8]), "label": tf.TensorSpec([None], tf.int32), "weight": tf.TensorSpec([None])}


def data():
    return tf.data.Dataset.from_tensor_slices(problems.classification(64)).batch(16)


def trainer_of(model_fn=None, replicas=2, **settings):
    return distloop.Trainer(model_fn or problems.classifier(), problems.on(replicas, **settings))


def test_settings_that_differ_come_first():
    changed, others = overview.describe_config(problems.on(2, clip_norm=0.5)).split("All others")
    assert "| `clip_norm` | `0.5` | `0.0` |" in changed and "`average_decay`" not in changed
    assert "| `average_decay` | `0.0` |" in others and "`clip_norm`" not in others


def test_the_model_is_a_table_of_its_variables():
    text = overview.describe_model(trainer_of(problems.classifier(batch_norm="synchronized")).state)
    assert "| `net/hidden/kernel` | `[8, 16]` | `float32` | `yes` | `128` |" in text
    assert "| `net/norm/moving_mean` | `[16]` | `float32` | `no` | `16` |" in text
    assert text.startswith("228 trained parameters of 260 in 7 variables")


def test_the_console_names_layers_that_could_train_and_do_not():
    def model_fn():
        spec = problems.classifier()()
        return distloop.ModelSpec(spec.model, keras.optimizers.SGD(0.1), spec.updates[0].loss_fn, trainable="logits")

    trainer = trainer_of(model_fn, 1)
    source = SimpleNamespace(info=SimpleNamespace(batch_size=None), resume="")
    lines = overview.console_lines(trainer.state, trainer.config, source)
    assert "parameters 212, of which 68 train (no update takes net/hidden) = hidden 144 + logits 68" in lines
    trainer.model.get_layer("hidden").trainable = False
    lines = overview.console_lines(trainer.state, trainer.config, source)
    assert "parameters 212, of which 68 train = hidden 144 + logits 68" in lines


@pytest.mark.slow
def test_a_large_model_is_cut_off():
    def model_fn():
        model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(1) for _ in range(120))])
        loss_fn = lambda batch, training: {"loss": model(batch["x"])[:, 0]}  # noqa: E731
        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    text = overview.describe_model(trainer_of(model_fn, 1).state)
    assert text.count("\n| `") == 200 and text.endswith("and 40 more variables")


def test_the_environment_has_versions_and_devices():
    text = overview.describe_environment(trainer_of().state, problems.on(2))
    assert f"| `TensorFlow` | `{tf.__version__}` |" in text and "| `replicas` | `2` |" in text
    assert overview._table(["a"], [["x|y`z\nw"]]).splitlines()[-1] == "| `x\\|y'z w` |"  # no value breaks it


def test_incidents_are_told(tmp_path):
    assert overview.describe_incidents(str(tmp_path)) == ""
    row = {"step": 5, "batch": 4, "reason": "it jumped", "action": "rollback", "checkpoint": 2, "left_out": 4}
    (tmp_path / "incidents.jsonl").write_text(json.dumps(row) + "\n")
    assert "| `5` | `4` | `rollback` | `2` | `4` | `it jumped` |" in overview.describe_incidents(str(tmp_path))


def test_the_graph_has_layers_by_name_and_is_left_out_if_too_large(monkeypatch):
    trainer = trainer_of()
    forward = overview.ForwardPass(trainer.state, trainer.config).trace(SPEC)
    graph = tf.compat.v1.GraphDef.FromString(overview.drawable(forward))
    names = [node.name for node in graph.node]
    assert any(re.search(r"net\w*/hidden\w*/MatMul", name) for name in names) and {"x", "label"} <= set(names)
    assert sum(node.ByteSize() for node in graph.node) < 100_000
    monkeypatch.setattr(overview, "_MAX_NODES", 10)
    assert overview.drawable(forward) is None


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_alone_trains_without_a_graph(tmp_path):
    def model_fn():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])

        def loss_fn(batch, training):
            if tf.distribute.in_cross_replica_context():
                raise RuntimeError("only on a replica")
            return {"loss": tf.reduce_sum(model(batch["x"]), 1)}

        return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

    trainer = trainer_of(model_fn, workdir=str(tmp_path), graph="always")
    assert trainer.fit(data(), steps=2)
    with trainer.strategy.scope():
        assert overview.ForwardPass(trainer.state, trainer.config).trace(SPEC) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "few", "has_graph"),
    problems.mostly_wide(
        [("auto", 100, True), ("auto", 1, False), ("never", 100, False)], ("auto", 100, True), ("auto", 1, False)
    ),
)
def test_the_graph_is_written_by_default_where_it_costs_little(setting, few, has_graph, tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "_FEW_VARIABLES", few)
    drawn = []
    monkeypatch.setattr(overview, "drawable", lambda *_: drawn.append(1))
    trainer_of(workdir=str(tmp_path), graph=setting).fit(data(), steps=2)
    assert bool(drawn) == has_graph


@pytest.mark.slow
def test_utilization_is_told_of_a_known_peak():
    found = trainer_of(peak_flops=1e9).fit(data(), steps=4)
    of_one = 3 * 2 * (8 * 16 + 16 * 4)  # forward and backward; two layers
    assert found["model_flops_per_sec"] == pytest.approx(of_one * found["examples_per_sec"])
    assert found["model_flops_utilization"] == pytest.approx(found["model_flops_per_sec"] / 2e9)
    assert "model_flops_utilization" not in trainer_of().fit(data(), steps=4)


def test_known_gpus_have_a_peak(monkeypatch):
    state = trainer_of().state
    gpu, names = distloop.Config(device="gpu", precision="mixed_bfloat16"), {"first": "L4", "second": "L4"}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: list(names))
    details = lambda gpu: {"device_name": f"NVIDIA {names[gpu]}"}  # noqa: E731
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details)
    assert overview.peak_flops(state, gpu) == 2 * 121e12
    names.update(first="first", second="second")
    assert overview.peak_flops(state, gpu) is None
    assert overview.peak_flops(state, distloop.Config(device="cpu", peak_flops=5.0)) == 10.0


def test_the_layout_has_charts_for_what_the_run_reports():
    def titles(**settings):
        return {title for part in overview.make_charts(problems.on(1, **settings)).values() for title in part}

    assert {"loss", "metrics", "learning rate"} <= titles()
    assert titles(clip_norm=1.0) - titles() == {"fraction of the steps that were clipped"}
    assert titles(precision="mixed_float16") - titles() == {"loss scale"}
    assert "update norm" in titles(histograms_every=5, workdir="not written")


def test_the_layers_of_keras_models_are_a_graph_of_their_own():
    models = {"a": keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="first")]), "b": tf.Module()}
    ((tag, graph),) = overview.layer_graphs(models).items()
    assert tag == "keras/a" and keras_model_to_graph_def(json.loads(graph.json)).node[1].name.endswith("/first")

    class Subclass(keras.Model):
        pass

    assert overview.layer_graphs(Subclass()) == {}
    assert [*overview.layer_graphs(models["a"])] == ["keras"]


def test_the_command_for_tensorboard_works_where_none_is_on_the_path(monkeypatch):
    monkeypatch.setattr(overview.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert overview._tensorboard() == "tensorboard"
    monkeypatch.setattr(overview.shutil, "which", lambda name: None)
    for python, shown in ((os.path.abspath(".venv/bin/python"), ".venv/bin/python"), ("/opt/my python",) * 2):
        monkeypatch.setattr(overview.sys, "executable", python)
        assert overview._tensorboard() == f"{shlex.quote(shown)} -m tensorboard.main"
