"""Starting from other weights: of another run, a Keras file, a TensorFlow checkpoint; whole or in part."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.warm_start.warm_start import warm_start
from tests.problems import batches, mostly_wide, on


def net(units=4, name="net"):
    layers = [keras.Input((8,)), keras.layers.Dense(units, name="hidden"), keras.layers.Dense(3, name="head")]
    return keras.Sequential(layers, name=name)


def make_trainer(replicas=2, model=net, optimizer=lambda: keras.optimizers.SGD(0.0), **settings):
    def model_fn():
        made = model()
        nets = list(made.values()) if isinstance(made, dict) else [made]

        def loss_fn(batch, training):
            logits = sum(n(batch["x"], training=training) for n in nets)
            return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"] % 3, logits, from_logits=True)}

        return distloop.ModelSpec(made, optimizer(), loss_fn)

    return distloop.Trainer(model_fn, on(replicas, **settings))


def arrays(model):
    return [v.numpy() for v in model.variables]


def assert_same(variables, expected):
    for a, b in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.wide
@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="newer than this Keras")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_slots_that_begin_as_the_weights_begin_as_the_new_ones(is_sharded, tmp_path):
    def optimizer():
        return keras.optimizers.ScheduleFreeAdamW(1e-6)

    given = {v.path: np.random.default_rng(1).normal(size=v.shape).astype(np.float32) for v in net().variables}
    np.savez(tmp_path / "given.npz", **given)
    settings = {"init_from": str(tmp_path / "given.npz"), "shard_optimizer": is_sharded}
    trainer = make_trainer(optimizer=optimizer, **settings)
    trainer.fit(batches(8, 16), steps=1)
    for variable in trainer.model.variables:
        np.testing.assert_allclose(variable.numpy(), given[variable.path], atol=1e-4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A workdir, and the weights that its run ended with; to be read."""
    workdir = tmp_path_factory.mktemp("run")
    trainer = make_trainer(workdir=str(workdir))
    for variable in trainer.model.variables:
        variable.assign(np.random.default_rng(7).normal(size=variable.shape))
    trainer.fit(batches(8, 16), steps=2)
    return workdir, trainer.model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "replicas"), mostly_wide([("workdir", 2), ("checkpoint", 1), ("keras", 2), ("h5", 1), ("tensorflow", 2)])
)
def test_weights_come_from_any_kind_of_file(kind, replicas, run, tmp_path, capsys):
    workdir, model = run
    rename = ""
    if kind == "keras":
        model.save(path := tmp_path / "model.keras")
    elif kind == "h5":
        model.save_weights(path := tmp_path / "model.weights.h5")
    elif kind == "tensorflow":
        variables = {v.path.replace("/", "_"): v.value for v in model.variables}
        path = tf.train.Checkpoint(**variables).write(str(tmp_path / "tensorflow"))
        rename = r"^net_(hidden|head)_=>net/\1/"
    else:
        path = workdir if kind == "workdir" else workdir / "checkpoints" / "2"
    trainer = make_trainer(replicas, init_from=str(path), init_rename=rename, average_decay=0.9)
    trainer.fit(batches(8, 16), steps=1)
    assert_same(arrays(trainer.model), arrays(model))
    for average, weight in zip(trainer.state.average.variables, arrays(trainer.model), strict=True):
        np.testing.assert_allclose(average.numpy(), weight, rtol=1e-6)
    assert "4 of 4 variables start from" in capsys.readouterr().out
    assert int(trainer.optimizer.iterations.numpy()) == 1


@pytest.mark.slow
def test_weights_come_from_the_checkpoint_that_best_json_names(tmp_path):
    seen = {}

    def measure(report):
        seen[report.step] = arrays(trainer.model)
        return {"score": -abs(report.step - 2)}

    measure.every = 1
    trainer = make_trainer(optimizer=lambda: keras.optimizers.SGD(0.1), workdir=str(tmp_path))
    trainer.fit(batches(8, 16), steps=4, actions=[measure, distloop.SaveBest("score", mode="max")])
    again = make_trainer(init_from=str(tmp_path / "checkpoints" / "best.json"))
    again.fit(batches(8, 16), steps=1)
    assert_same(arrays(again.model), seen[2])


@pytest.mark.slow
def test_a_part_is_taken_under_another_name_and_the_rest_is_listed(run, capsys):
    workdir, model = run
    settings = {"init_from": str(workdir), "init_rename": r"^net/hidden=>a/net/hidden"}
    trainer = make_trainer(model=lambda: {"a": net(), "b": net(name="other")}, **settings)
    head = trainer.model["a"].layers[1].kernel.numpy()
    trainer.fit(batches(8, 16), steps=1)
    assert_same(arrays(trainer.model["a"].layers[0]), arrays(model.layers[0]))
    np.testing.assert_array_equal(trainer.model["a"].layers[1].kernel.numpy(), head)
    out = capsys.readouterr().out
    assert "2 of 8 variables start from" in out and "it lacks a/net/head/kernel" in out


@pytest.mark.wide
def test_a_run_that_goes_on_does_not_start_again(run, tmp_path):
    workdir, _ = run
    first = make_trainer(workdir=str(tmp_path / "second"))
    first.fit(batches(8, 16), steps=1)
    again = make_trainer(workdir=str(tmp_path / "second"), init_from=str(workdir))
    again.fit(batches(8, 16), steps=2)
    assert_same(arrays(again.model), arrays(first.model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, model, says",
    [
        (dict(), lambda: net(5), r"has other shapes \(net/hidden/kernel is \[8, 4\] there and \[8, 5\] here"),
        (dict(), lambda: net(name="else"), "holds no variable of the model"),
        (dict(init_rename="("), net, "is no regular expression"),
        (dict(init_rename="hidden|head=>x"), net, "gives two variables of"),
        (dict(init_from="nowhere"), net, r"init_from='.*nowhere' cannot be read"),
        (
            dict(init_from="/nowhere/" * 9 + "best.json"),
            net,
            r"cannot be read \(No best checkpoint.*could not be .*: see the log\)",
        ),
        (dict(init_from="hf://user/repo"), net, "names a repository and no file in it, as hf://user/repo/model.saf"),
        (dict(init_from="http://127.0.0.1:9/w.npz"), net, r"\): start again when it can be reached, or give a workdir"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_taken(settings, model, says, run):
    workdir, _ = run
    trainer = make_trainer(model=model, **{"init_from": str(workdir), **settings})
    before = arrays(trainer.model)
    with pytest.raises(ValueError, match=says) as caught:
        trainer.fit(batches(8, 16), steps=1)
    assert "\n" not in str(caught.value)
    assert_same(arrays(trainer.model), before)


FILES = ["w.npz", "w.safetensors", "w.keras", "w.weights.h5", "w.index", "w.data-00000-of-00001"]


def damages(good):
    """Yields contents that are not those of a file: cut off, another file's, or with another byte here and there."""
    yield from (b"", good[:8], good[: len(good) // 2], good[:-1], b"<html>not found</html>" * 10, b"{" * 10_000)
    for i in range(0, len(good), max(1, len(good) // 40)):
        yield good[:i] + bytes([good[i] ^ 0x55]) + good[i + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("file", mostly_wide(FILES, "w.safetensors", "w.data-00000-of-00001"))
def test_a_damaged_file_is_said_to_be_unreadable_and_nothing_is_taken(file, tmp_path):
    trainer, path = make_trainer(1), str(tmp_path / file)
    if file.startswith(("w.index", "w.data")):
        tf.train.Checkpoint(net=trainer.model).write(path := str(tmp_path / "w"))
    elif file == "w.weights.h5":
        trainer.model.save_weights(path)
    else:
        trainer.export(path)
    before, num_unread = arrays(trainer.model), 0
    for content in damages((tmp_path / file).read_bytes()):
        (tmp_path / file).write_bytes(content)
        try:
            warm_start(trainer.state, path)
        except ValueError as error:  # a name with another letter is one that the model lacks
            assert "\n" not in str(error) and repr(path) in str(error)
            num_unread += "cannot be read" in str(error)
            assert_same(arrays(trainer.model), before)
        before = arrays(trainer.model)
    assert num_unread >= 5


def test_a_file_of_weights_at_home_waits_for_no_model_and_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer = make_trainer(1)
    np.savez(tmp_path / "zeros.npz", **{v.path: np.zeros(v.shape) for v in trainer.model.variables})
    trainer.restore("~/zeros.npz")
    assert not any(array.any() for array in arrays(trainer.model))
    trainer.export(path := str(tmp_path / "weights.npz"))
    lazy = make_trainer(1, lambda: keras.Sequential([keras.layers.Dense(4, name="hidden")], name="net"))
    with pytest.raises(ValueError, match=r"restore\('.*npz'\) .*not built yet: call trainer.build\(dataset\) first"):
        lazy.restore(path)
    with pytest.raises(ValueError, match=r"^restore\('.*npz'\) holds no variable of the model"):
        make_trainer(1, lambda: net(name="else")).restore(path)
    with pytest.raises(ValueError, match="init_rename=a was given without init_from, whose names it is for: give in"):
        on(1, init_rename="a")


def test_restored_weights_begin_a_run_and_a_run_that_goes_on_names_them(tmp_path, caplog):
    zeros, ones = (str(tmp_path / name) for name in ("zeros.npz", "ones.npz"))
    for path, make in ((zeros, np.zeros), (ones, np.ones)):
        np.savez(path, **{v.path: make(v.shape) for v in net().variables})
    settings = {"workdir": str(tmp_path / "run"), "init_from": ones}
    for step in (2, 4):  # the same program, which is stopped and started again; its learning rate is 0
        trainer = make_trainer(1, **settings)
        trainer.restore(zeros)
        trainer.fit(batches(), steps=step)
        assert trainer.step == step and not any(array.any() for array in arrays(trainer.model))
        assert bool(caplog.text) == (step > 2)
    assert f"The weights of {zeros!r} are replaced by those of the run's checkpoint" in caplog.text
    caplog.clear()
    trainer.restore(ones)
    trainer.fit(batches(), steps=6)
    assert all(array.all() for array in arrays(trainer.model)) and not caplog.text
    again = make_trainer(1, **settings)
    again.restore(zeros)
    again.restore()
    again.fit(batches(), steps=8)
    assert all(array.all() for array in arrays(again.model)) and not caplog.text
