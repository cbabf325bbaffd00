"""Tests numbers to disk and screen: TensorBoard, metrics.jsonl, the console."""

import glob
import io
import json
import os
import re
import sys
import time

import numpy as np
import pytest
import rich.console
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distloop.writers import Console, JsonWriter, SummaryWriter


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


# The console.


@pytest.fixture
def clock(monkeypatch):
    """Gives the test the clock of the console: set clock[0], in seconds."""
    seconds = [100.0]
    monkeypatch.setattr("distloop.writers.time.monotonic", lambda: seconds[0])
    return seconds


@pytest.fixture
def terminal(monkeypatch):
    """A stream that rich takes for a terminal of 200 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    stream.isatty = lambda: True
    return stream


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_line_reads_as_documented(clock):
    stream = io.StringIO()
    console = Console(2000, 0, stream, evals=["test"])
    clock[0] += 1.0
    console.write(500, {"loss": 0.12341, "accuracy": 0.97, "learning_rate": 0.1, "test/accuracy": 0.98})
    console.close()
    assert stream.getvalue() == (
        "step 500/2000  loss 0.1234  accuracy 0.97  test/accuracy 0.98  500 steps/s  eta 0:00:03\n"
    )


def test_time_left_follows_the_clock_since_the_first_write(clock):
    stream = io.StringIO()
    console = Console(20_000, 1_000, stream)
    clock[0] += 60.0  # tracing
    console.write(1_100, {})
    clock[0] += 0.0625
    clock[0] += 0.1875  # an evaluation
    console.write(1_200, {})
    assert stream.getvalue().splitlines()[1] == "step 1200/20000  400 steps/s  eta 0:00:47"


def test_the_last_line_has_no_time_left(clock):
    stream = io.StringIO()
    console = Console(10, 0, stream)
    clock[0] += 7200.0
    console.write(1, {})
    clock[0] += 1.0
    console.write(10, {})
    assert stream.getvalue().splitlines() == ["step 1/10  0.0001389 steps/s  eta 18:00:00", "step 10/10  9 steps/s"]


def test_a_clock_that_stands_still_is_no_error(clock):
    stream = io.StringIO()
    console = Console(10, 0, stream)
    console.write(5, {})
    console.write(5, {})
    assert stream.getvalue() == "step 5/10\n" * 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (123.456, "123.5"),
        (12345.6, "12346"),
        (1.23456e-7, "1.235e-07"),
        (1.5e12, "1.5e+12"),
        (3.0, "3"),
        (-0.5, "-0.5"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (np.float32(0.1), "0.1"),
    ],
)
def test_numbers_have_four_digits(value, text, clock):
    stream = io.StringIO()
    Console(10, 0, stream).write(5, {"loss": value})
    assert stream.getvalue() == f"step 5/10  loss {text}\n"


def test_skipped_steps_are_shown_when_there_are_any(clock):
    stream = io.StringIO()
    console = Console(10, 0, stream)
    console.write(5, {"skipped_steps": 0.0})
    console.write(6, {"skipped_steps": 2.0})
    assert stream.getvalue().splitlines() == ["step 5/10", "step 6/10  skipped_steps 2"]


def test_standard_output_is_the_default(capsys):
    Console(10).write(5, {"loss": 1.0})
    assert capsys.readouterr().out.startswith("step 5/10  loss 1  ")


def test_a_terminal_gets_a_bar_and_lines_for_evaluations_only(terminal, clock):
    console = Console(2000, 0, terminal, evals=["test"])
    clock[0] += 1
    console.write(500, {"loss": 0.5})
    console.write(1000, {"loss": 0.25, "accuracy": 0.75, "test/accuracy": 0.5})
    console.close()
    lines = [line.strip() for line in re.split(r"[\r\n]", plain(terminal.getvalue()))]
    assert [line for line in lines if line.startswith("step")] == [
        "step 1000/2000  loss 0.25  accuracy 0.75  test/accuracy 0.5"
    ]
    bars = [line.lstrip("━╸╺ ") for line in lines if line.startswith("━")]
    assert "step 500/2000  loss 0.5  500 steps/s  eta 0:00:03" in bars
    assert bars[-1] == "step 1000/2000  loss 0.25"


def test_names_with_brackets_are_shown_as_they_are(terminal):
    console = Console(10, 0, terminal, evals=["test"])
    console.write(5, {"[red]loss": 1.0, "test/f1[0]": 1.0})
    console.close()
    assert "[red]loss 1" in plain(terminal.getvalue())
    assert "test/f1[0] 1" in plain(terminal.getvalue())


def test_close_gives_the_cursor_back_and_may_be_called_twice(terminal):
    console = Console(10, 0, terminal)
    console.write(5, {"loss": 1.0})
    console.close()
    text = terminal.getvalue()
    console.close()
    assert terminal.getvalue() == text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert plain(text).endswith("\n")


def test_a_console_that_wrote_nothing_leaves_the_terminal_alone(terminal):
    Console(10, 0, terminal).close()
    assert terminal.getvalue() == ""


def test_standard_output_is_put_back_after_the_bar(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    console = Console(10)
    console.write(5, {"loss": 1.0})
    print("said by the user")
    console.close()
    assert sys.stdout is terminal
    assert "said by the user\n" in plain(terminal.getvalue())


def test_forced_colours_make_no_terminal_of_a_log(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    Console(10, 0, stream).write(5, {"loss": 1.0})
    assert stream.getvalue().startswith("step 5/10  loss 1")


def test_a_dumb_terminal_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert rich.console.Console(file=terminal).is_terminal
    Console(10, 0, terminal).write(5, {"loss": 1.0})
    assert terminal.getvalue().startswith("step 5/10  loss 1")
