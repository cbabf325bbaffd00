"""Law `gpu graph`: what a train step would do on 1, 2 and 4 GPUs that are not there, with every feature of the loop."""

import functools
import itertools
import re
import types

import keras
import pytest
import tensorflow as tf

import distloop
from distloop.settings.durations import Units
from tests.gpu_graph import pretended_gpus
from tests.gpu_graph.pretended_gpus import trace_on_gpus
from tests.problems import batches, classifier, cross_entropy, loss_fn_of, mostly_wide

pytestmark = pytest.mark.slow

# What a step does against the law, each with its reason and its bytes in a step.
KNOWN = {
    r"late: (EnsureShape|StridedSlice|Cast|Equal) -> (Cast|BroadcastTo|Identity|StatefulPartitionedCall) .*|"
    r"late: Less -> LogicalAnd .*": "the labels, as TensorFlow keeps variables of int32 on the host, and the count of "
    "rows: 4 for each row",
    r"late: .* \((compiled_loop|step)\.py\)": "the examples of a batch and the wait for it join the sums: 16",
    r"through: BitwiseAnd -> Less \(loss_fn\)": "Keras's argmax looks for the sign of 0 in int32: 4 for each logit",
    r"through: Cast -> StatelessRandomGetKeyCounter \(loss_fn\)": "Keras keeps seeds on the GPU in int64: 8 for a draw",
    r"through: Cast -> FloorMod \(loss_fn\)": "this test's own arithmetic in int32",
    r"(through|waits): (.* -> )?If's condition \(step\.py\)": "the branch around an update is the host's: 1",
    r"out of: (loop variable|LogicalOr) -> (Cast|Identity) \(compiled_loop\.py\)": "the host counts skipped steps: 1",
    r"through: loop variable -> Identity \((step|compiled_loop)\.py\)": "whether a step failed, to that branch: 1",
    r"(through: .* -> loop variable|waits: condition of the loop) \(forward_backward\.py\)": "the loop over "
    "microbatches holds the batch, which is on the host: 0",
    r"waits: Assert \(errors\.py\)": "each microbatch checks the rows of its values: 1",
    r"(through|out of|waits): .* \(loss_scale\.py\)|waits: ReadVariableOp \(step\.py\)": "the host adapts the loss "
    "scale: 12",
    r"through: SelectV2 -> Size \(placement\.py\)": "a lookup's gradient counts its rows on the host: 4 each",
    r"through: Prod -> Pack \(keras_metrics\.py\)": "Keras's AUC multiplies shapes in int32: 8",
    r"(out of|waits): (ConcatV2|IsFinite|AssignAddVariableOp)\b.* \(compiled_loop\.py\)": "locate_nonfinite ends it",
    r"(waits: the|out of: .* ->) condition of the loop \(compiled_loop\.py\)": "it looks for a step that failed: 1",
    r"waits: the loop, whose variables are not on GPU:\d, \(compiled_loop\.py\)": "TensorFlow begins an iteration "
    "when all side effects of the one before are done: 0",
}
# What one feature alone does.
KNOWN_OF = {
    "locate": {
        r"late: (IteratorGetNextSync -> .*|StridedSlice -> MatMul) \(shards\.py\)": "the step keeps the batch that it "
        "reads: a replica's rows",
        r"out of: LogicalNot -> Identity \(compiled_loop\.py\)|waits: ResourceScatterUpdate \(step_marks\.py\)|"
        r"(out of: Assert -> |waits: )Timestamp \(graph_functions\.py\)": "the step ends, and its time is taken, when "
        "the host knows whether it failed: 1",
    },
    "keras metrics": {
        r"(no kernel: |through: .* -> )(Pad|StridedSlice)\b.* \((step|evaluation)\.py\)": "TensorFlow pads what it "
        "gathers, integers on the host: labels of a metric that takes the rows of all replicas, and their number",
        r"(through|late): .* \((gathering|keras_metrics)\.py\)": "that number, and shapes in int32: 8 for each replica",
    },
}


def table_model_fn():
    layers = [keras.layers.Embedding(1000, 8), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
    head = keras.layers.Dense(4)
    head.build((None, 32))

    def loss_fn(batch, training):
        logits = head(model(tf.cast(batch["x"][:, :4] * 10, tf.int32) % 1000, training=training))
        return {"loss": cross_entropy(batch["label"], logits)}

    return distloop.ModelSpec([model, head], keras.optimizers.Adam(0.01), loss_fn)


def two_updates_model_fn():
    models = {name: keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]) for name in ("first", "second")}

    def loss_fn(batch, training):
        return {"loss": cross_entropy(batch["label"], sum(model(batch["x"]) for model in models.values()))}

    def update(name):
        return distloop.Update(name, loss_fn, keras.optimizers.SGD(0.1, momentum=0.9), models[name].trainable_variables)

    return distloop.ModelSpec(models, updates=[update("first"), update("second")])


def stages_model_fn(num_stages=2):
    layers = [keras.Input((8,)), *(keras.layers.Dense(12, activation="tanh") for _ in range(4)), keras.layers.Dense(4)]
    model = distloop.split(keras.Sequential(layers), num_stages)
    return distloop.ModelSpec(model, keras.optimizers.SGD(0.1, momentum=0.9), loss_fn_of(model))


adam = functools.partial(keras.optimizers.AdamW, 1e-3)
FEATURES = {
    "plain": (classifier(), {}),
    "adam": (classifier(optimizer=adam), {}),
    "microbatches": (classifier(), {"microbatches": 2}),
    "clip_norm": (classifier(), {"clip_norm": 1.0}),
    "clip_variable_norm": (classifier(), {"clip_variable_norm": 1.0}),
    "clip_value": (classifier(), {"clip_value": 1.0}),
    "averages": (classifier(), {"average_decay": 0.9}),
    "float16": (classifier(), {"precision": "mixed_float16"}),
    "bfloat16": (classifier(), {"precision": "mixed_bfloat16"}),
    "skip": (classifier(), {"on_nonfinite": "skip"}),
    "locate": (classifier(), {"locate_nonfinite": True}),
    "rollback": (classifier(), {"on_divergence": "rollback", "workdir": "not written"}),
    "batch norm": (classifier(batch_norm="plain"), {}),
    "synchronized": (classifier(batch_norm="synchronized"), {}),
    "dropout": (classifier(dropout=0.2), {}),
    "l2": (classifier(l2=0.01), {}),
    "several updates": (two_updates_model_fn, {}),
    "several updates, skip": (two_updates_model_fn, {"on_nonfinite": "skip"}),
    "virtual replicas": (classifier(), {"virtual_replicas": 4}),
    "sharded": (classifier(optimizer=adam), {"shard_optimizer": True}),
    "sharded averages": (classifier(), {"shard_optimizer": True, "average_decay": 0.9, "clip_norm": 1.0}),
    "recompute": (classifier(), {"recompute": "hidden"}),
    "table": (table_model_fn, {}),
    "pipeline": (stages_model_fn, {"num_stages": 2, "microbatches": 2}),
    "histograms": (classifier(), {"histograms_every": 10, "workdir": "not written"}),
    "keras metrics": (classifier(metrics=True), {}),
    "example history": (classifier(), {"workdir": "not written"}),
    "jit": (classifier(), {"jit_compile": True}),
    "workers": (classifier(), {"strategy": "multi_worker"}),
    "workers, sharded": (classifier(optimizer=adam), {"strategy": "multi_worker", "shard_optimizer": True}),
    "workers, float16": (classifier(), {"strategy": "multi_worker", "precision": "mixed_float16", "clip_norm": 1.0}),
    "workers, batch norm": (classifier(batch_norm="synchronized"), {"strategy": "multi_worker"}),
}


def graphs_of(feature, gpus):
    model_fn, settings = FEATURES[feature]
    config = distloop.Config(**{"batch_size": 16, **settings})

    def record(state, source, loop):
        if feature.startswith("example history"):
            call = types.SimpleNamespace(
                state=state, source=source, config=config, step=0, is_chief=True, units=Units()
            )
            checkpoints = types.SimpleNamespace(directory=types.SimpleNamespace(verify=lambda: None))
            distloop.ExampleHistory(("loss", "accuracy"), every=4).set_fit(call, loop, checkpoints)

    return trace_on_gpus(model_fn, config, batches(rows=64), max(gpus, config.num_stages), record)


def file_of(line):
    """The file of a line, without the folders and the number, which change more often."""
    name = (line or "").rpartition(":")[0].rpartition("/")[2]
    return "loss_fn" if name in ("problems.py", "test_gpu_graph.py") else name


def violations(found):
    """What a step does against the law, a line for each kind."""
    if sum(found.operations.values()) < 2 * found.operations["host"]:
        yield "more runs on the host than on GPUs"
    for f in found.on_host:
        yield f"no kernel: {f.operation} ({file_of(f.line)})"
    for copy in found.copies:
        if copy.target == "host":
            yield f"{copy.path}: {copy.producer} -> {copy.consumer} ({file_of(copy.line)})"
        elif copy.is_late:
            yield f"late: {copy.producer} -> {copy.consumer} ({file_of(copy.line)})"
    for wait in found.waits:
        yield f"waits: {wait.what} ({file_of(wait.line)})"


# Cases of `make test`.
KEPT = [("plain", 1), ("float16", 2), ("sharded averages", 2)]


@pytest.mark.parametrize(("feature", "gpus"), mostly_wide(itertools.product(FEATURES, (1, 2, 4)), *KEPT))
def test_a_step_stays_on_its_gpus_but_for_what_is_known(feature, gpus):
    step, *others = graphs_of(feature, gpus)
    found = dict.fromkeys(violations(step))
    assert not step.not_followed
    known = [*KNOWN, *KNOWN_OF.get(feature, ())]
    assert [line for line in found if not any(re.fullmatch(pattern, line) for pattern in known)] == []
    for graph in others:
        lines = [line for line in violations(graph) if line.startswith("no kernel")]
        assert [line for line in lines if not any(re.fullmatch(pattern, line) for pattern in known)] == []


def test_a_step_of_several_workers_adds_over_all_of_them(monkeypatch):
    graphs = []
    monkeypatch.setattr(pretended_gpus, "look", lambda graph, name: graphs.append(graph))
    graphs_of("workers", 2)
    nodes = [node for f in graphs[0].as_graph_def().library.function for node in f.node_def]
    sizes = {
        tf.make_ndarray(node.attr["value"].tensor).item()
        for node in nodes
        if node.op == "Const" and node.name.endswith("CollectiveReduceV2/group_size")
    }
    devices = {node.device[-5:] for node in nodes if node.op == "CollectiveReduceV2"}
    assert devices == {"GPU:0", "GPU:1"} and sizes == {4}


# Cases that show all of KNOWN together.
SHOWING = [(feature, 1) for feature in ("plain", "dropout", "table", "float16", "microbatches", "histograms", "locate")]
SHOWING += [("keras metrics", 2)]


@pytest.mark.wide
def test_each_known_exception_still_occurs():
    found = [line for case in SHOWING for line in violations(graphs_of(*case)[0])]
    every = [*KNOWN, *(known for of in KNOWN_OF.values() for known in of)]
    assert [known for known in every if not any(re.fullmatch(known, line) for line in found)] == []
