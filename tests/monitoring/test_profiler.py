"""The profiled steps, as the profiler's own file has them."""

import glob

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import distloop
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
