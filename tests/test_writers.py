"""Tests numbers to disk: TensorBoard, metrics.jsonl."""

import glob
import json
import os
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distloop.writers import JsonWriter, SummaryWriter


def read_scalars(directory):
    """Returns {(tag, step): value} of all event files in a directory."""
    scalars = {}
    for path in sorted(glob.glob(f"{directory}/events.*")):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else tf.make_ndarray(value.tensor)
                scalars[value.tag, event.step] = float(number)
    return scalars


def read_rows(path):
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps_in_tensorboard(directory, tag):
    """Returns the steps that TensorBoard shows of a tag."""
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    if tag in events.Tags()["scalars"]:
        return [event.step for event in events.Scalars(tag)]
    return [event.step for event in events.Tensors(tag)]


# TensorBoard.


@pytest.mark.slow
def test_a_run_that_goes_on_shows_every_step_once(tmp_path):
    for start, end in ((0, 11), (5, 9), (6, 12)):  # cut off at 11, restored at 5; cut off at 9, restored at 6
        summaries, rows = SummaryWriter(str(tmp_path), [], start), JsonWriter(str(tmp_path / "m.jsonl"), start)
        for step in range(start + 1, end + 1):
            summaries.write(step, {"loss": 1.0 / step})
            rows.write(step, {"loss": 1.0 / step})
        summaries.close()
        rows.close()
        time.sleep(1.1)  # files are read in the order of their seconds
    assert steps_in_tensorboard(tmp_path / "train", "loss") == list(range(1, 13))
    assert [row["step"] for row in read_rows(tmp_path / "m.jsonl")] == list(range(1, 13))


def test_rows_of_an_earlier_run_are_kept_aside(tmp_path):
    for run in range(3):
        writer = JsonWriter(str(tmp_path / "m.jsonl"), start=0)
        writer.write(run, {"loss": 1.0})
        writer.close()
    rows = {name: [row["step"] for row in read_rows(tmp_path / name)] for name in sorted(os.listdir(tmp_path))}
    assert rows == {"m.jsonl": [2], "m.jsonl.1": [0], "m.jsonl.2": [1]}


def test_evaluations_have_a_directory_of_their_own_and_the_tags_of_training(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=["test"])
    writer.write(3, {"loss": 0.5, "test/loss": 0.25, "test/digits/f1": 0.75, "learning_rate": 0.125})
    writer.close()
    assert read_scalars(tmp_path / "train") == {("loss", 3): 0.5, ("learning_rate", 3): 0.125}
    assert read_scalars(tmp_path / "test") == {("loss", 3): 0.25, ("digits/f1", 3): 0.75}


def test_a_prefix_that_is_no_evaluation_stays_in_the_tag(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=["test"])
    writer.write(1, {"discriminator/loss": 2.0, "test": 1.0})
    writer.close()
    assert read_scalars(tmp_path / "train") == {("discriminator/loss", 1): 2.0, ("test", 1): 1.0}
    assert os.listdir(tmp_path) == ["train"]


def test_an_evaluation_called_train_does_not_mix_with_training(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=["train"])
    writer.write(1, {"loss": 2.0, "train/loss": 1.0})
    writer.close()
    assert read_scalars(tmp_path / "train") == {("loss", 1): 2.0, ("train/loss", 1): 1.0}


def test_nothing_is_written_before_the_first_number(tmp_path):
    writer = SummaryWriter(str(tmp_path / "summaries"), evals=["test"])
    writer.write(1, {})
    writer.close()
    assert os.listdir(tmp_path) == []


def test_summaries_can_be_read_before_the_writer_is_closed(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=[])
    writer.write(1, {"loss": 0.5})
    assert read_scalars(tmp_path / "train") == {("loss", 1): 0.5}
    writer.close()


def test_evaluations_may_come_first_and_writes_after_a_close_are_kept(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=["test"])
    writer.write(1, {"test/loss": 4.0})
    writer.close()
    writer.close()
    writer.write(2, {"loss": 3.0, "test/loss": np.float32(2.0)})
    writer.close()
    assert read_scalars(tmp_path / "test") == {("loss", 1): 4.0, ("loss", 2): 2.0}
    assert read_scalars(tmp_path / "train") == {("loss", 2): 3.0}


def test_summaries_of_nan_and_inf_are_kept(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=[])
    writer.write(1, {"a": float("nan"), "b": float("inf")})
    writer.close()
    scalars = read_scalars(tmp_path / "train")
    assert np.isnan(scalars["a", 1])
    assert scalars["b", 1] == float("inf")


def test_no_default_writer_and_no_default_step_stay_behind(tmp_path):
    writer = SummaryWriter(str(tmp_path), evals=[])
    writer.write(1, {"loss": 0.5})
    assert tf.summary.experimental.get_step() is None
    assert not tf.summary.scalar("stray", 1.0, step=1)
    writer.close()
    assert read_scalars(tmp_path / "train") == {("loss", 1): 0.5}


def test_the_users_own_default_writer_gets_none_of_it(tmp_path):
    with tf.summary.create_file_writer(str(tmp_path / "own")).as_default(step=9):
        writer = SummaryWriter(str(tmp_path), evals=[])
        writer.write(1, {"loss": 0.5})
        writer.close()
        tf.summary.scalar("mine", 1.0)
    assert read_scalars(tmp_path / "own") == {("mine", 9): 1.0}


def test_a_bad_summary_directory_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        SummaryWriter(str(tmp_path / "file"), evals=[]).write(1, {"loss": 1.0})


# metrics.jsonl.


def test_each_write_is_one_row_with_step_and_time(tmp_path):
    writer = JsonWriter(str(tmp_path / "run" / "metrics.jsonl"))
    before = time.time()
    writer.write(np.int64(5), {"loss": np.float32(0.5), "test/accuracy": 1})
    writer.write(10, {"loss": 0.25})
    writer.close()
    first, second = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert before <= first.pop("time") <= second.pop("time") <= time.time()
    assert first == {"step": 5, "loss": 0.5, "test/accuracy": 1.0}
    assert second == {"step": 10, "loss": 0.25}


def test_rows_of_an_earlier_run_stay(tmp_path):
    for step in (1, 2):
        writer = JsonWriter(str(tmp_path / "metrics.jsonl"))
        writer.write(step, {})
        writer.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_row_can_be_read_before_the_file_is_closed(tmp_path):
    writer = JsonWriter(str(tmp_path / "metrics.jsonl"))
    writer.write(1, {"loss": 1.0})
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
    writer.close()


def test_nan_and_inf_are_null_so_that_strict_parsers_read_the_row(tmp_path):
    writer = JsonWriter(str(tmp_path / "metrics.jsonl"))
    writer.write(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": np.float32("nan"), "e": 1.0})
    writer.close()
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert [row[name] for name in "abcde"] == [None, None, None, None, 1.0]


def test_half_a_row_of_a_killed_run_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    writer = JsonWriter(str(path))
    writer.write(2, {"loss": 1.0})
    writer.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"step": 1}', '{"step": 2, "lo']
    assert json.loads(lines[2])["loss"] == 1.0


def test_a_bad_path_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        JsonWriter(str(tmp_path / "file" / "metrics.jsonl"))
    with pytest.raises(IsADirectoryError):
        JsonWriter(str(tmp_path))
