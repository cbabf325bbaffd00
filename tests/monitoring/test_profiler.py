"""The profiled steps, as the profiler's own file has them, and how busy each device was in a profile made up here."""

import glob

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import distloop
from distloop.monitoring.profiler import busy_fractions
from tests.problems import assert_equal, classification, classifier, everything, on

pytestmark = pytest.mark.slow


def train(workdir, steps=12, profile="", **settings):
    trainer = distloop.Trainer(classifier(), on(1, workdir=str(workdir), profile=profile, **settings))
    trainer.fit(tf.data.Dataset.from_tensor_slices(classification()).batch(16), steps=steps)
    return trainer


def profiled_steps(workdir):
    """Returns the numbers of the steps in the only profile of a run, in order."""
    (path,) = glob.glob(f"{workdir}/train/plugins/profile/*/*.xplane.pb")
    space = xplane_pb2.XSpace()
    with open(path, "rb") as file:
        space.ParseFromString(file.read())
    steps = []
    for plane in space.planes:
        names = {key: value.name for key, value in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                stats = {names[stat.metadata_id]: stat.int64_value or stat.uint64_value for stat in event.stats}
                if plane.event_metadata[event.metadata_id].name == "train":
                    steps.append(stats["step_num"])
    return sorted(steps)


def test_the_steps_of_the_window_are_profiled_without_changing_the_run(tmp_path):
    # In series, oneDNN's kernels round a step otherwise that stands in no TensorFlow loop: docs/watching.md.
    settings = dict(log_every=4, executor="parallel")
    profiled = train(tmp_path / "a", profile="5:8", **settings)
    assert profiled_steps(tmp_path / "a") == [6, 7, 8]
    assert_equal(everything(profiled), everything(train(tmp_path / "b", **settings)))
    assert not (tmp_path / "b" / "train" / "plugins").exists()
    rows = [distloop.read_metrics(tmp_path / name) for name in "ab"]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]


def test_a_run_that_ends_within_the_window_writes_its_profile(tmp_path):
    train(tmp_path, steps=6, profile="4:100")
    assert profiled_steps(tmp_path) == [5, 6]
    train(tmp_path, steps=8)  # and the profiler is free again
    train(tmp_path / "other", steps=3, profile="0:2")
    assert profiled_steps(tmp_path / "other") == [1, 2]


def test_a_profiler_in_use_elsewhere_is_a_warning(tmp_path, caplog):
    tf.profiler.experimental.start(str(tmp_path / "mine"))
    try:
        assert train(tmp_path / "run", profile="2:4").step == 12
    finally:
        tf.profiler.experimental.stop(save=False)
    assert "These steps are not profiled" in caplog.text


@pytest.mark.parametrize("text", ["5", "5:", ":5", "8:5", "5:5", "a:b", "-1:5", "1:2:3", "1.5:3"])
def test_a_malformed_window_is_refused(text):
    with pytest.raises(ValueError, match="two whole numbers, the smaller one first, as in profile=100:110"):
        distloop.Config(workdir="x", profile=text)


def test_a_profile_needs_a_workdir():
    with pytest.raises(ValueError, match="without a workdir, so the profile would be lost"):
        distloop.Config(profile="1:2")


DEVICE = "/job:localhost/replica:0/task:0/device:"


def add_line(plane, name, events):
    """Adds a thread with events: name, start and end in picoseconds, stats."""
    line = plane.lines.add(name=name)
    for name, start, end, stats in events:
        plane.event_metadata[len(plane.event_metadata) + 1].name = name
        event = line.events.add(metadata_id=len(plane.event_metadata), offset_ps=start, duration_ps=end - start)
        for key, value in stats.items():
            plane.stat_metadata[len(plane.stat_metadata) + 1].name = key
            event.stats.add(metadata_id=len(plane.stat_metadata), str_value=str(value))


def subgraph(number, start, end):
    return ("ExecutorState::Process", start, end, {"id": 7, "_c": number})


def write(space, directory):
    path = directory / "plugins" / "profile" / "now" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(space.SerializeToString())


def two_stages(devices=("CPU:0", "CPU:1")):
    """A step of 100 ps in two threads; what each subgraph runs and sends."""
    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/host:CPU")
    first, second = ({"key": f"{DEVICE}{device};and;others"} for device in devices)
    add_line(plane, "python", [("train", 0, 100, {})])
    one = [subgraph("a", 0, 40), ("x/MatMul:MatMul", 0, 20, {}), ("x/_1:_Send", 20, 30, first)]
    one += [("Outside:Add", 45, 50, {}), subgraph("b", 60, 90), ("y/MatMul:MatMul", 60, 80, {})]
    add_line(plane, "tf_Compute/1", one)
    two = [subgraph("b", 70, 100), ("y/Add:AddV2", 70, 90, {}), ("IteratorGetNext:IteratorGetNext", 90, 99, {})]
    add_line(plane, "tf_Compute/2", [*two, ("y/_2:_Send", 99, 100, second)])
    return space


def test_operations_of_a_subgraph_count_for_the_device_that_sent_it(tmp_path):
    assert busy_fractions(str(tmp_path)) == {}  # without a profile
    write(two_stages(), tmp_path)
    assert busy_fractions(str(tmp_path)) == {"CPU:0": 0.3, "CPU:1": 0.31}


def test_a_gpu_is_busy_while_its_kernels_run(tmp_path):
    space = two_stages(("GPU:0", "CPU:0"))
    plane = space.planes.add(name="/device:GPU:0")
    add_line(plane, "Stream #1(Compute)", [("kernel", 10, 60, {}), ("kernel", 50, 70, {})])
    add_line(plane, "Steps", [("1", 0, 100, {})])
    write(space, tmp_path)
    assert busy_fractions(str(tmp_path)) == {"GPU:0": 0.6, "CPU:0": 0.31}
