"""The precision of layers: what is made is never changed, in `model_fn` or in a model that exists already."""

import keras
import numpy as np
import pytest

import distloop
from distloop.keras_models.model_copies import copy_model
from distloop.model.dtype_policy import policy
from tests.keras_models.compiled_models import X, Y, batches, compiled
from tests.problems import mostly_wide, on

layers = keras.layers
DATA = {"x": X}


@pytest.fixture(autouse=True)
def float32_afterwards():
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


def dense(**settings):
    return layers.Dense(2, **settings)


def sequential(*parts, shape=(6,)):
    return keras.Sequential([keras.Input(shape), *parts])


def functional():
    inputs, twice = keras.Input((6,)), layers.Dense(6, dtype="float32")
    return keras.Model(inputs, dense()(layers.Dense(4)(twice(twice(inputs)))))


class Subclassed(keras.Model):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.first, self.head = layers.Dense(4), dense(dtype="float32")
        self.others = [dense(dtype="float64"), dense()]

    def call(self, x):
        sides = [keras.ops.cast(other(x), "float32") for other in self.others]
        return self.head(self.first(x)) + sides[0] + sides[1]


def subclassed():
    model = Subclassed()
    model(X)
    return model


def mapped():
    dtypes = keras.dtype_policies.DTypePolicyMap("mixed_bfloat16", {"kept": "float32"})
    return sequential(layers.Dense(4, dtype=dtypes, name="kept"), dense(dtype=dtypes))


def quantized(mode):
    model = sequential(layers.Dense(4, dtype="float32"), dense(dtype="float32"))
    for layer in model.layers:
        layer.quantize(mode)
    return model


def changed_later():
    model = sequential(layers.Dense(4), dense())
    model.layers[0].dtype_policy = "mixed_bfloat16"
    return model


def from_file(path):
    with policy("float32"):
        model = sequential(layers.Dense(4), layers.LayerNormalization(dtype="float32"), dense(dtype="float64"))
        model.save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


MODELS = {
    "Sequential": lambda path: sequential(layers.Dense(4), layers.LayerNormalization(dtype="float32"), dense()),
    "functional, a layer twice": lambda path: functional(),
    "subclassed": lambda path: subclassed(),
    "nested": lambda path: sequential(sequential(functional(), layers.Dense(4)), dense(dtype="float64")),
    "from a file": from_file,
    "cloned": lambda path: keras.models.clone_model(from_file(path)),
    "wrapped": lambda path: sequential(
        layers.TimeDistributed(layers.Dense(3, dtype="float32")),
        layers.TimeDistributed(layers.Dense(3), dtype="float32"),
        layers.Bidirectional(layers.LSTM(2, dtype="float32")),
        dense(),
        shape=(3, 2),
    ),
    "float8": lambda path: sequential(layers.Dense(4, dtype="float8_from_mixed_bfloat16"), dense()),
    "quantized to float8": lambda path: quantized("float8"),
    "quantized to int8": lambda path: quantized("int8"),
    "map of policies": lambda path: mapped(),
    "changed later": lambda path: changed_later(),
}


def dtypes_of(*models):
    """Returns, for each layer at any depth, its policy, what it computes in, and the dtypes of its variables."""
    parts = [part for model in models for part in model._flatten_layers()]
    return [
        (
            keras.dtype_policies.serialize(part.dtype_policy),
            part.compute_dtype,
            sorted((v.name, v.dtype) for v in part._trainable_variables + part._non_trainable_variables),
        )
        for part in parts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("precision", mostly_wide(["mixed_float16", "mixed_bfloat16"]))
def test_what_model_fn_makes_keeps_its_dtypes(precision, tmp_path):
    made = []

    def model_fn():
        shared, rows = layers.Dense(4, dtype="float32"), layers.TimeDistributed(dense(dtype="float32"))
        pair = {"one": sequential(shared, dense()), "other": sequential(shared, dense(dtype="float32"))}
        model = {**{name: make(tmp_path) for name, make in MODELS.items()}, **pair, "rows": rows, "list": [dense()]}
        for part, shape in ((rows, (None, 3, 2)), (model["list"][0], (None, 6))):
            part.build(shape)
        made[:] = [*(part for name, part in model.items() if name != "list"), *model["list"]]
        made.append(dtypes_of(*made))
        return distloop.ModelSpec(model, keras.optimizers.SGD(), lambda batch, training: {"loss": batch["x"][:, 0]})

    distloop.Trainer(model_fn, on(1, precision=precision))
    assert dtypes_of(*made[:-1]) == made[-1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", mostly_wide(["mixed_float16", "mixed_bfloat16"]))
def test_parts_of_a_model_compute_in_the_dtype_that_each_was_given(precision):
    made, computed, half = [], {}, precision.removeprefix("mixed_")

    def model_fn():
        given = {"float32": layers.Dense(3, dtype="float32"), "float64": layers.Dense(3, dtype="float64")}
        model = {**given, half: layers.Dense(3), "list": [layers.LayerNormalization(dtype="float32")]}
        made[:] = [*given.values(), model[half], *model["list"]]

        def loss_fn(batch, training):
            outputs = {name: part(batch["x"]) for name, part in model.items() if name != "list"}
            outputs["float32, in a list"] = model["list"][0](outputs[half])
            computed.update({f"{name}, {training=}": output.dtype.name for name, output in outputs.items()})
            return {"loss": sum(keras.ops.sum(keras.ops.cast(o, "float32") ** 2, 1) for o in outputs.values())}

        return distloop.ModelSpec(model, keras.optimizers.SGD(1e-3), loss_fn)

    trainer = distloop.Trainer(model_fn, on(1, precision=precision, batch_size=16))
    trainer.fit(DATA, steps=1, evals={"test": DATA})
    assert len(computed) == 8 and all(name.split(",")[0] == dtype for name, dtype in computed.items())
    assert [part.compute_dtype for part in made] == ["float32", "float64", half, "float32"]


@pytest.mark.parametrize("name", mostly_wide(MODELS, "quantized to float8"))
@pytest.mark.parametrize("made_under", mostly_wide(["float32", "mixed_bfloat16"]))
def test_a_copy_has_the_dtypes_of_the_model_and_the_model_keeps_its_own(made_under, name, tmp_path):
    with policy(made_under):
        model = MODELS[name](tmp_path)
    before = dtypes_of(model)
    with policy("mixed_float16"):  # of the run
        copy = copy_model(model)
    assert dtypes_of(copy) == before == dtypes_of(model)
    rows = X.reshape(32, 3, 2) if name == "wrapped" else X
    np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(either(rows)) for either in (model, copy)))
    maps = [part.dtype_policy for part in model._flatten_layers() if hasattr(part.dtype_policy, "default_policy")]
    assert not {id(part.dtype_policy) for part in copy._flatten_layers()} & set(map(id, maps))


def test_a_backbone_of_keras_hub_keeps_its_dtypes():
    models = pytest.importorskip("keras_hub").models
    sizes = dict(vocabulary_size=9, num_layers=1, num_heads=2, hidden_dim=4, intermediate_dim=8, max_sequence_length=3)

    def model_fn():
        backbones = {dtype or "": models.BertBackbone(**sizes, dtype=dtype) for dtype in (None, "float32")}
        model_fn.made = backbones, dtypes_of(*backbones.values())
        return distloop.ModelSpec(backbones, keras.optimizers.SGD(0.1), lambda batch, training: {"loss": batch["x"]})

    distloop.Trainer(model_fn, on(1, precision="mixed_bfloat16"))
    assert dtypes_of(*model_fn.made[0].values()) == model_fn.made[1]
    assert {part.compute_dtype for part in model_fn.made[0][""]._flatten_layers()} == {"bfloat16"}


def test_a_mixed_precision_model_trains_in_the_dtypes_of_its_layers():
    with policy("mixed_float16"):
        model = compiled(sequential(layers.Dense(8, "tanh"), layers.BatchNormalization(), dense(dtype="float32")))
    trainer = distloop.Trainer(distloop.from_keras(model), on(1, precision="mixed_float16"))
    trainer.fit(batches(X, Y), steps=2)
    assert dtypes_of(trainer.model) == dtypes_of(model)
    assert [part.compute_dtype for part in model.layers] == ["float16", "float16", "float32"]
    np.testing.assert_array_equal(model.get_weights()[0], trainer.model.get_weights()[0])


@pytest.mark.parametrize("make", [MODELS["Sequential"], from_file])
def test_a_model_made_in_float32_is_refused_where_a_run_is_not(make, tmp_path):
    model = compiled(make(tmp_path))
    with pytest.raises(ValueError, match=r"precision=mixed_bfloat16 was .* give from_keras the function that builds"):
        distloop.Trainer(distloop.from_keras(model), on(1, precision="mixed_bfloat16"))


def test_a_model_read_from_a_file_in_model_fn_stays_and_the_log_says_so(tmp_path, caplog):
    def model_fn():
        return distloop.supervised(from_file(tmp_path), "mse", keras.optimizers.SGD(0.1))

    trainer = distloop.Trainer(model_fn, on(1, precision="mixed_bfloat16"))
    assert {part.compute_dtype for part in trainer.model.layers} == {"float32", "float64"}
    assert "no layer of the model computes in bfloat16: layers with a dtype of their own, and those" in caplog.text


def test_the_global_policy_of_keras_is_taken_and_said(capsys):
    keras.mixed_precision.set_global_policy("mixed_float16")
    make = MODELS["Sequential"]
    trainer = distloop.Trainer(distloop.from_keras(lambda: compiled(make(None))), on(1, console="lines"))
    trainer.fit(batches(X, Y), steps=1)
    assert trainer.config.precision == "mixed_float16"
    assert [part.compute_dtype for part in trainer.model.layers] == ["float16", "float32", "float16"]
    assert type(trainer.optimizer) is distloop.LossScaleOptimizer
    assert "precision mixed_float16 in 2, float32 in 1 of 3 layers" in capsys.readouterr().out


def test_the_console_says_what_layers_that_keep_their_precision_compute_in(capsys):
    with policy("mixed_bfloat16"):
        model = compiled(sequential(dense()))
    distloop.Trainer(distloop.from_keras(model), on(1, console="lines")).fit(batches(X, Y), steps=1)
    assert "precision mixed_bfloat16\n" in capsys.readouterr().out


def test_another_floatx_or_policy_of_keras_is_refused():
    for set_dtype, dtype in ((keras.config.set_floatx, "float64"), (keras.config.set_dtype_policy, "bfloat16")):
        set_dtype(dtype)
        with pytest.raises(ValueError, match=f"floatx is {dtype}, but layers are made under Config.precision"):
            distloop.Trainer(distloop.from_keras(lambda: compiled(functional())), on(1))
        set_dtype("float32")
