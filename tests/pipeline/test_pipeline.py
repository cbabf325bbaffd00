"""One network over several devices: the laws of stages, and what is refused."""

import dataclasses
import functools
import os
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data.shards import Batch
from distloop.distributed import collectives
from distloop.model import memory
from distloop.model.saved_state import SavedState
from distloop.optimizers.slot_store import MIN_FUSED_BYTES
from distloop.pipeline.stage_placement import StageUsage, busy_fractions
from distloop.run import outputs, overview
from distloop.training.action import Report
from distloop.variables import tensorflow_variable
from distloop.workdir import ledger
from tests import forked
from tests.problems import assert_close, assert_equal, batches, classification, mostly_wide, refused, train


def settings(num_stages=1, **others):
    """One device, or stages on several."""
    one = {"device": "cpu", "strategy": "none", "console": "quiet", "log_every": 0}
    return distloop.Config(**{**one, "num_stages": num_stages, **others})


def sequential(*, dropout=0.0, batch_norm=False, width=12):
    layers = [keras.Input((8,))]
    for i in range(4):
        l2 = keras.regularizers.L2(0.01)
        layers.append(keras.layers.Dense(width, activation="tanh", kernel_regularizer=l2, name=f"hidden_{i}"))
        if batch_norm and i == 1:
            layers.append(keras.layers.BatchNormalization())
        if dropout:
            layers.append(keras.layers.Dropout(dropout))
    return keras.Sequential([*layers, keras.layers.Dense(4)], name="net")


def functional():
    """Two residual blocks, each of which has to stay in one stage."""
    inputs = x = keras.Input((8,), name="inputs")
    for i in range(2):
        inner = keras.layers.Dense(8, activation="tanh", name=f"inner_{i}")(x)
        outer = keras.layers.Dense(8, name=f"outer_{i}")(inner)
        x = keras.layers.Add(name=f"add_{i}")([x, outer])
    return keras.Model(inputs, keras.layers.Dense(4, name="logits")(x), name="net")


class Affine(tf.Module):
    """A module that is no Keras layer."""

    def __init__(self, inputs, outputs, seed):
        super().__init__()
        self.weight = tf.Variable(tf.random.stateless_normal([inputs, outputs], [seed, 0]) / inputs**0.5, name="w")

    def __call__(self, x):
        return tf.tanh(x @ tf.cast(self.weight, x.dtype))


def modules():
    return [Affine(8, 12, 0), Affine(12, 12, 1), keras.layers.Dense(12), Affine(12, 4, 2)]


def classifier(make=sequential, num_stages=1, optimizer=lambda: keras.optimizers.Adam(0.01), **arguments):
    """A `model_fn` for `classification`, its network over so many stages."""

    def model_fn():
        model = distloop.split(make(), num_stages, **arguments)

        def loss_fn(batch, training):
            logits = model(batch["x"], training=training)
            loss = keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)
            return {"loss": distloop.weighted(loss, batch["weight"])}

        predict_fn = lambda batch: model(batch["x"], training=False)  # noqa: E731
        return distloop.ModelSpec(model, optimizer(), loss_fn, predict_fn=predict_fn)

    return model_fn


def held(trainer):
    """The devices of what is trained, of the optimizer's slots and of the averages."""
    of_optimizer = [v for v in trainer.optimizer.variables if len(v.shape)]
    average = trainer.state.average
    of_all = trainer.state.variables_of_update[""], of_optimizer, average.variables if average else []
    return [[device_of(variable) for variable in variables] for variables in of_all]


def device_of(variable):
    return ":".join(tensorflow_variable(variable).device.split(":")[-2:])


def trained(trainer):
    """What training has changed, as NumPy arrays by the names that checkpoints use."""
    values = {name: value for name, value in SavedState(trainer.state).snapshot().items() if value.dtype != tf.string}
    return {name: np.array(value) for name, value in values.items()}


CLIPPED = {"clip_norm": 0.5, "average_decay": 0.9}


@pytest.fixture(scope="module")
def on_one_device():
    return trained(train(classifier(), settings(**CLIPPED), batches(), 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_stages, microbatches, eager",
    mostly_wide([(1, 3, False), (2, 1, False), (2, 4, False), (4, 3, False), (2, 2, True)], (2, 4, False)),
)
def test_any_number_of_stages_and_microbatches_train_to_the_same_weights(
    on_one_device, num_stages, microbatches, eager
):
    config = settings(num_stages, microbatches=microbatches, eager=eager, **CLIPPED)
    assert_close(trained(train(classifier(num_stages=num_stages), config, batches(), 6)), on_one_device)


def operations(trainer):
    """The operations of one train step, traced anew."""
    layout = trainer._train_source.layout
    step = tf.function(lambda rows: trainer._train_loop._step(Batch(rows, None), layout), autograph=False)
    return step.get_concrete_function(next(iter(batches()))).graph.get_operations()


def place(operation):
    return operation.device.rpartition("device:")[2]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", mostly_wide([True, False]))
def test_each_stage_keeps_its_variables_and_runs_on_its_device(recompute, capsys):
    make_model = classifier(modules, num_stages=2, recompute=recompute)
    trainer = train(make_model, settings(2, microbatches=2, average_decay=0.9, console="lines"), batches(), 1)
    places = ["CPU:0"] * 2 + ["CPU:1"] * 3  # two modules on each; the Keras layer has a bias
    assert held(trainer) == [places, [d for d in places for _ in range(2)], places]
    assert "distloop: stages 2 = 240 on CPU:0 + 204 on CPU:1\n" in capsys.readouterr().out
    table = overview.describe_model(trainer.state).splitlines()
    assert [line.split("`")[-2] for line in table if "`float32`" in line] == places
    step = operations(trainer)

    def count(kind):
        return [sum(op.type == kind and place(op) == device for op in step) for device in ("CPU:0", "CPU:1", "")]

    products = 2 * 2 * (3 + recompute)  # of two microbatches in two layers, one forward and two backward
    assert count("MatMul") == [products, products, 0]
    assert count("BiasAddGrad") == [0, 2, 0]
    assert count("TanhGrad") == [4, 2, 0]
    assert count("L2Loss") == [1, 1, 0]  # the norm of the gradients
    assert count("SparseSoftmaxCrossEntropyWithLogits") == [0, 2, 0]


@pytest.mark.wide
def test_a_profile_shows_how_busy_each_device_was(tmp_path):
    config = settings(2, microbatches=2, workdir=tmp_path, profile="3:6", log_every=4)
    train(classifier(modules, num_stages=2), config, batches(), 12)
    fractions = busy_fractions(f"{tmp_path}/train")
    assert list(fractions) == ["CPU:0", "CPU:1"]
    rows = distloop.read_metrics(tmp_path)
    assert ["stage_0/device_busy_share" in row for row in rows] == [False, True, False]  # when the profile was there
    for stage, fraction in enumerate(fractions.values()):
        assert rows[1][f"stage_{stage}/device_busy_share"] == pytest.approx(fraction)
        assert 0 < fraction <= 1


@pytest.mark.slow
def test_losses_of_a_layer_are_computed_where_its_weights_are():
    trainer = train(classifier(num_stages=2, optimizer=lambda: keras.optimizers.SGD(0.1)), settings(2), batches(), 1)
    squares = [place(op) for op in operations(trainer) if op.type in ("Square", "Pow")]
    assert sorted(squares) == ["CPU:0"] * 2 + ["CPU:1"] * 2  # L2 terms of two layers on each


@pytest.mark.slow
def test_a_run_on_stages_goes_on_bit_for_bit(tmp_path):
    make_model = classifier(functools.partial(sequential, dropout=0.3, batch_norm=True), num_stages=2)
    config = settings(2, microbatches=2, average_decay=0.9, precision="mixed_bfloat16")
    expected = trained(train(make_model, config, batches(), 6))
    stopped = dataclasses.replace(config, workdir=tmp_path)
    train(make_model, stopped, batches(), 2)
    assert_equal(trained(train(make_model, stopped, batches(), 6)), expected)


def in_pairs(**others):
    """Two replicas of two stages each, on four devices."""
    return settings(2, strategy="mirrored", num_devices=4, **others)


def copies_of(trainer):
    """The device of each copy of what is trained, of the slots and of the averages, in this order."""
    of_optimizer = [v for v in trainer.optimizer.variables if len(v.shape)]
    variables = [*trainer.state.variables_of_update[""], *of_optimizer, *trainer.state.average.variables]
    return [[device_of(copy) for copy in trainer.state.replica_variables(v)] for v in variables]


@pytest.mark.parametrize("microbatches", mostly_wide([1, 3], 3))
def test_replicas_of_a_pipeline_train_like_one_device(microbatches, on_one_device):
    trainer = train(classifier(num_stages=2), in_pairs(microbatches=microbatches, **CLIPPED), batches(), 6)
    assert_close(trained(trainer), on_one_device)
    first, second = [["CPU:0", "CPU:2"]] * 4, [["CPU:1", "CPU:3"]] * 6  # kernels and biases of two layers, and of three
    of_model = first + second
    assert copies_of(trainer) == of_model + [devices for devices in of_model for _ in range(2)] + of_model
    for copies in map(trainer.state.replica_variables, trainer.state.trained_variables):
        assert np.array_equal(*(copy.numpy() for copy in copies))
    products = [place(op) for op in operations(trainer) if op.type == "MatMul"]
    assert {device: products.count(device) for device in {*products}} == {
        **dict.fromkeys(("CPU:0", "CPU:2"), 6 * microbatches),
        **dict.fromkeys(("CPU:1", "CPU:3"), 9 * microbatches),
    }
    with trainer.state.averaged():
        expected = trainer.model.model(classification()["x"]).numpy()
    np.testing.assert_allclose(trainer.predict(batches()), expected, atol=1e-6)


RULES = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Lamb", "Adafactor", "Muon", "ScheduleFreeAdamW"]


@pytest.mark.parametrize("rule", mostly_wide(RULES, "Adam", "RMSprop"))
def test_replicas_of_a_pipeline_train_large_layers_by_any_rule(rule):
    def model_fn(num_stages=1):
        optimizer = lambda: getattr(keras.optimizers, rule)(0.01, weight_decay=0.1)  # noqa: E731
        spec = classifier(functools.partial(sequential, width=130), num_stages, optimizer)()
        return dataclasses.replace(spec, learning_rates={"hidden_2/": 0.1}, no_decay="bias", updates=())

    trainer = train(functools.partial(model_fn, 2), in_pairs(check_replicas_every=3), batches(), 6)
    assert_close(trained(trainer), trained(train(model_fn, settings(), batches(), 6)), tolerance=1e-5)
    assert max(np.prod(v.shape) * 4 for v in trainer.state.trained_variables) > MIN_FUSED_BYTES


@pytest.mark.slow
def test_replicas_of_a_pipeline_go_on_bit_for_bit(tmp_path):
    make_model = classifier(functools.partial(sequential, dropout=0.3, batch_norm=True), num_stages=2)
    config = in_pairs(microbatches=2, average_decay=0.9)
    expected = trained(train(make_model, config, batches(), 6))
    stopped = dataclasses.replace(config, workdir=tmp_path)
    train(make_model, stopped, batches(), 2)
    assert_equal(trained(train(make_model, stopped, batches(), 6)), expected)


def plain():
    spec = classifier()()
    return dataclasses.replace(spec, model=spec.model.model, updates=())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("before", "config", "after"),
    [
        (classifier(num_stages=4), settings(4), settings(2)),
        (classifier(num_stages=4), settings(4), settings(strategy="mirrored", num_devices=2)),
        (plain, settings(), settings(3)),
    ],
    ids=["in two stages", "on two replicas", "a plain Keras model's, in three stages"],
)
def test_a_checkpoint_goes_on_in_any_other_number_of_stages(before, config, after, tmp_path, on_one_device):
    shared = {"workdir": tmp_path, **CLIPPED}
    train(before, dataclasses.replace(config, **shared), batches(), 3)
    trainer = train(classifier(num_stages=after.num_stages), dataclasses.replace(after, **shared), batches(), 6)
    assert_close(trained(trainer), on_one_device)


def on_two_workers(directory):
    """What each of the processes that the test below starts does."""
    config = settings(2, strategy="multi_worker", microbatches=2, **CLIPPED)
    distloop.prepare(config)
    trainer = train(classifier(num_stages=2), config, batches(), 6)
    products = [place(op) for op in operations(trainer) if op.type == "MatMul"]
    found = {"held": np.array(sum(held(trainer), [])), "products": np.array(products)}
    found |= {f"trained/{name}": value for name, value in trained(trainer).items()}
    np.savez(f"{directory}/{collectives.worker_index(trainer.strategy)}.npz", **found)


@pytest.mark.wide
def test_two_workers_of_two_stages_train_like_one_process(tmp_path, on_one_device):
    program = ["-m", "tests.pipeline.test_pipeline", str(tmp_path)]
    result = forked.launch(["--workers=2", *program], env=os.environ)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-4000:]
    for index in range(2):
        found = dict(np.load(tmp_path / f"{index}.npz"))
        ours = {name.removeprefix("trained/"): value for name, value in found.items() if name.startswith("trained/")}
        assert_close(ours, on_one_device)
        of_model = ["CPU:0"] * 4 + ["CPU:1"] * 6  # kernels and biases of two layers, and of three
        assert found["held"].tolist() == of_model + [d for d in of_model for _ in range(2)] + of_model
        assert sorted(found["products"].tolist()) == ["CPU:0"] * 12 + ["CPU:1"] * 18


@pytest.mark.wide
def test_computing_activations_again_draws_the_same_dropout():
    make = functools.partial(sequential, dropout=0.3, batch_norm=True)
    kept, computed = (
        trained(train(classifier(make, num_stages=2, recompute=recompute), settings(2, microbatches=2), batches(), 3))
        for recompute in (False, True)
    )
    assert_close(computed, kept)
    assert_equal(*({n: v for n, v in values.items() if "seeds" in n} for values in (computed, kept)))


@pytest.mark.wide
def test_stages_train_with_several_updates_and_a_loss_scale():
    def model_fn(num_stages=1):
        first, second = (distloop.split(modules(), num_stages) for _ in range(2))

        def loss_of(network):
            def loss_fn(batch, training):
                found = tf.cast(network(batch["x"], training=training), tf.float32)
                return {"loss": tf.reduce_mean((found - batch["x"][:, :4]) ** 2, -1)}

            return loss_fn

        updates = [
            distloop.Update("first", loss_of(first), keras.optimizers.SGD(0.1, momentum=0.9), "^a/"),
            distloop.Update("second", loss_of(second), keras.optimizers.AdamW(0.01), "^b/"),
        ]
        return distloop.ModelSpec({"a": first, "b": second}, updates=updates)

    expected = trained(train(model_fn, settings(precision="mixed_float16"), batches(), 6))
    config = settings(2, precision="mixed_float16", microbatches=2)
    found = trained(train(functools.partial(model_fn, 2), config, batches(), 6))
    assert_close(found, expected, tolerance=2e-3)  # of float16 in one layer


@pytest.mark.wide
def test_rates_and_decay_by_pattern_are_the_same_in_stages():
    def model_fn(num_stages=1):
        spec = classifier(num_stages=num_stages, optimizer=lambda: keras.optimizers.AdamW(0.01))()
        return dataclasses.replace(spec, learning_rates={"hidden_2/": 0.1}, no_decay="bias", updates=())

    in_stages = functools.partial(model_fn, 2)
    expected = trained(train(model_fn, settings(), batches(), 6))
    assert_close(trained(train(in_stages, settings(2), batches(), 6)), expected)
    assert not distloop.Trainer(in_stages, settings(2)).audit(batches()).findings


@pytest.mark.slow
def test_a_network_in_stages_predicts_and_is_exported_like_one_device(tmp_path):
    trainer = train(classifier(functional, num_stages=2), settings(2, microbatches=2), batches(), 2)
    x = classification()["x"]
    expected = trainer.model.model(x).numpy()
    np.testing.assert_allclose(trainer.predict(batches()), expected, atol=1e-6)
    assert trainer.evaluate(batches())["loss"] > 0
    trainer.export(tmp_path / "saved")
    served = tf.saved_model.load(tmp_path / "saved").signatures["serving_default"]
    np.testing.assert_allclose(served(x=tf.constant(x))["output"], expected, atol=1e-6)
    assert not {op.device for op in served.graph.get_operations() if op.type == "MatMul"} - {""}
    trainer.export(tmp_path / "model.keras")
    np.testing.assert_allclose(keras.models.load_model(tmp_path / "model.keras")(x), expected, atol=1e-6)


@pytest.mark.parametrize("recompute", mostly_wide([False, True]))
def test_masks_pass_from_stage_to_stage(recompute):
    kinds = keras.layers
    layers = [kinds.Embedding(9, 4, mask_zero=True), kinds.GlobalAveragePooling1D(), kinds.Dense(2)]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
    network = distloop.stages([layers[:1], layers[1:]], recompute=recompute)
    tokens = tf.constant([[3, 1, 0, 0, 0], [1, 2, 3, 4, 5]])
    found = tf.function(lambda t: network(t, training=True), autograph=False)(tokens)
    np.testing.assert_allclose(found, model(tokens), atol=1e-6)


@pytest.mark.slow
def test_layers_that_are_built_by_the_first_batch_are_built_on_their_stage():
    make_model = classifier(lambda: [keras.layers.Dense(6), keras.layers.Dense(4)], num_stages=2)
    of_model, of_optimizer, _ = held(train(make_model, settings(2), batches(), 1))
    assert of_model == ["CPU:0"] * 2 + ["CPU:1"] * 2 and of_optimizer == ["CPU:0"] * 4 + ["CPU:1"] * 4


@pytest.mark.wide
def test_a_stage_begins_a_microbatch_when_an_earlier_one_has_come_back():
    trainer = train(classifier(modules, num_stages=2), settings(2, microbatches=5), batches(), 1)
    begins = [op for op in operations(trainer) if op.type == "Identity" and op.control_inputs and place(op)]
    waits = [[place(op), *{place(before) for before in op.control_inputs}] for op in begins]
    assert sorted(waits) == [["CPU:0"] * 2] * 2 + [["CPU:1"] * 2] * 3  # the fourth and the fifth, three after another


def shared():
    module = Affine(8, 8, 0)
    return distloop.stages([module, module])


def copied():
    return distloop.Trainer(classifier(modules, num_stages=4), settings(strategy="mirrored", num_devices=2))


def copied_by_collectives():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        distloop.stages(modules())


@pytest.mark.parametrize(
    "make, parts",
    [
        (shared, ["is used in stages 0 and 1", "put the modules that share it into one stage"]),
        (lambda: distloop.split(modules(), 5), ["num_stages=5 was given, but the list of modules has 4"]),
        (lambda: distloop.split(keras.Sequential([keras.layers.Dense(2)]), 2), ["is not built"]),
        (lambda: distloop.split(modules(), 0), ["num_stages=0"]),
        (lambda: distloop.split(Affine(2, 2, 0), 2), ["was given a Affine"]),
        (lambda: distloop.stages([]), ["one or more for each stage"]),
        (lambda: distloop.stages([Affine(2, 2, i) for i in range(5)]), ["5 stages were asked for, but there are 4"]),
        (lambda: distloop.stages(modules(), ["CPU:0", "GPU:7"] * 2), ["GPU:7 is none of CPU:0"]),
        (lambda: distloop.stages(modules(), ["CPU:0"]), ["were given for 4 stages"]),
        pytest.param(
            copied,
            ["4 stages on each of 2 replicas, which begin on CPU:0 and CPU:1,", "num_stages=4 and num_devices=8"],
            marks=pytest.mark.not_by_collectives("which are refused in the next sentence"),
        ),
        (
            copied_by_collectives,
            ["4 stages", "2 replicas of a process by collectives", "num_stages=4 and num_devices=8"],
        ),
        (lambda: settings(2, num_devices=4), ["strategy=none and num_devices=4", "num_devices=2"]),
        (lambda: settings(2, num_devices=3), ["num_stages=2"]),
        (lambda: settings(2, jit_compile=True), ["num_stages=2"]),
        (lambda: settings(2, executor="serial"), ["num_stages=2"]),
    ],
)
def test_what_cannot_be_cut_or_placed_is_refused(make, parts):
    refused(make, *parts)


def test_stages_may_share_devices_that_are_given():
    network = distloop.stages(modules(), ["CPU:1", "/device:CPU:0", "CPU:1", "cpu:1"])
    assert network.devices == ["CPU:1", "CPU:0", "CPU:1", "CPU:1"]
    assert network(tf.ones([3, 8])).shape == [3, 4]


if __name__ == "__main__":
    on_two_workers(sys.argv[1])


def test_each_device_of_a_pipeline_counts_once_on_each_worker(tmp_path):
    for devices in (["CPU:0", "CPU:1", "CPU:0"], ["CPU:1", "CPU:0", "CPU:1"]):

        def model_fn(devices=devices):
            layers = [keras.layers.Dense(4) for _ in range(3)]
            model = distloop.split(keras.Sequential([keras.Input((8,)), *layers]), 3, devices)
            loss_fn = lambda batch, training: {"loss": tf.reduce_sum(model(batch["x"]), 1)}  # noqa: E731
            return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

        state = distloop.Trainer(model_fn, distloop.Config(device="cpu", num_stages=3, strategy="none")).state
        assert overview.peak_flops(state, distloop.Config(device="cpu", peak_flops=5.0)) == 10.0
        source = SimpleNamespace(position=dict)
        outputs.begin_in(str(tmp_path), SimpleNamespace(state=state, source=source, step=0), None)
    assert [start["devices"] for start in ledger.read_starts(str(tmp_path))] == [2, 2]
    on_3 = SimpleNamespace(strategy=SimpleNamespace(num_replicas_in_sync=3), stage_devices=state.stage_devices)
    assert overview.num_devices(on_3) == 6


def test_gpus_report_peak_memory_at_each_log_and_cpus_without_profile_none(monkeypatch):
    monkeypatch.setattr(memory, "device_peak_gb", {"GPU:0": 1.5, "GPU:1": 2.5}.get)
    profile = SimpleNamespace(is_written=False, directory="")
    gpus, cpus = (StageUsage([f"{kind}:0", f"{kind}:1"], profile) for kind in ("GPU", "CPU"))
    for step in (10, 20):
        expected = {"stage_0/device_memory_gb": 1.5, "stage_1/device_memory_gb": 2.5}
        assert gpus(Report(step, 100, {}, None)) == expected
    assert cpus(Report(10, 100, {}, None)) == {}


class CountingModule(tf.Module):
    """Counts its calls in a variable that is none of Keras's."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False, name="calls")

    def __call__(self, x):
        self.calls.assign_add(1.0)
        return x


@pytest.mark.slow
def test_a_recomputed_stage_that_writes_a_plain_variable_is_refused():
    make = lambda: [[CountingModule(), Affine(8, 4, 0)], Affine(4, 4, 1)]  # noqa: E731

    def fit(**arguments):
        def model_fn():
            model = distloop.stages(make(), ["CPU:0", "CPU:0"], **arguments)
            loss_fn = lambda batch, training: {"loss": tf.reduce_sum(model(batch["x"], training=training), 1)}  # noqa: E731
            return distloop.ModelSpec(model, keras.optimizers.SGD(0.1), loss_fn)

        trainer = distloop.Trainer(model_fn, settings())
        trainer.fit(classification(16), batch_size=8, steps=2)
        return float(trainer.model.modules[0][0].calls)

    assert fit() == 2
    refused(lambda: fit(recompute=True), "recompute=True", "stage 0", "AssignAddVariableOp", "leave recompute out")
