"""The console: lines, the live display, the closing summary."""

import io
import re
import sys

import numpy as np
import pytest

import distloop
from distloop.log import say
from distloop.monitoring.console import Console, show_split, show_sum
from distloop.monitoring.timing import Clock
from tests.problems import classification, classifier, on


@pytest.fixture
def clock(monkeypatch):
    """Replaces the console's clock; clock[0] is the time in seconds."""
    seconds = [100.0]
    monkeypatch.setattr("distloop.monitoring.console.time.monotonic", lambda: seconds[0])
    return seconds


@pytest.fixture
def terminal(monkeypatch):
    """A stream that rich treats as a terminal of 200 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    stream.isatty = lambda: True
    return stream


def plain(stream):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def lines_in(stream):
    return [line.strip() for line in re.split(r"[\r\n]", plain(stream))]


def lines_of(clock, *writes, steps=10, start=0):
    """Returns the lines of writes without a terminal: the seconds before each, its step and numbers."""
    stream = io.StringIO()
    console = Console(steps, start, stream, evals=["test"])
    for secs, step, numbers in writes:
        clock[0] += secs
        console.write(step, numbers)
    console.close()
    return stream.getvalue().splitlines()


def test_a_line_reads_as_documented(clock):
    numbers = {"loss": 0.12341, "accuracy": 0.97, "learning_rate": 0.1, "test/accuracy": 0.98}
    (line,) = lines_of(clock, (1.0, 500, numbers), steps=2000)
    assert line == "step 500/2000  loss 0.1234  accuracy 0.97  test/accuracy 0.98  500 steps/s  eta 0:00:03"
    no_skips, skips = (0.0, 5, {"skipped_steps": 0.0}), (0.0, 6, {"skipped_steps": 2.0})
    assert lines_of(clock, no_skips, skips) == ["step 5/10", "step 6/10  skipped_steps 2"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"examples_per_sec": 104_448.0}, "104k examples/s"),
        ({"examples_per_sec": 52.0, "lm/tokens_per_sec": 1_249_600.0}, "1.25M tokens/s"),
        ({"examples_per_sec": 999.7}, "1k examples/s"),
        ({"examples_per_sec": 0.25}, "0.25 examples/s"),
    ],
)
def test_a_line_shows_tokens_a_second_or_else_examples(numbers, text, clock):
    (line,) = lines_of(clock, (1.0, 500, {"steps_per_sec": 812.0, **numbers}), steps=2000)
    assert line == f"step 500/2000  812 steps/s  {text}  eta 0:00:02"


def test_time_left_follows_the_clock_and_is_not_in_the_last_line(clock):
    tracing, with_an_evaluation = (60.0, 1_100, {}), (0.0625 + 0.1875, 1_200, {})
    _, line = lines_of(clock, tracing, with_an_evaluation, steps=20_000, start=1_000)
    assert line == "step 1200/20000  400 steps/s  eta 0:00:47"
    last, stands_still = (1.0, 10, {}), (0.0, 10, {})
    assert lines_of(clock, (7200.0, 1, {}), last, stands_still) == [
        "step 1/10  0.0001389 steps/s  eta 18:00:00",
        "step 10/10  9 steps/s",
        "step 10/10  9 steps/s",
    ]


def test_numbers_have_four_digits(clock):
    values = [0.123456, 123.456, 12345.6, 1.23456e-7, 1.5e12, 3.0, -0.5, float("nan"), float("inf"), np.float32(0.1)]
    texts = "0.1235 123.5 12346 1.235e-07 1.5e+12 3 -0.5 nan inf 0.1".split()
    lines = lines_of(clock, *((0.0, 5, {"loss": value}) for value in values))
    assert lines == [f"step 5/10  loss {text}" for text in texts]


# What holds the run up, without a verdict in the first ten seconds.
@pytest.mark.parametrize(
    ("waited", "host", "text"), [(0.75, 0.0, "input-bound 75 %  "), (0.2, 0.5, "host-bound 50 %  "), (0.4, 0.1, "")]
)
def test_a_line_names_the_bottleneck_unless_it_is_the_step(waited, host, text, clock):
    numbers = {"loss": 0.5, "steps_per_sec": 8.0, "input_wait": waited, "host_share": host}
    assert lines_of(clock, (9.0, 1, numbers), (1.0, 2, numbers)) == [
        "step 1/10  loss 0.5  8 steps/s  eta 0:00:01",
        f"step 2/10  loss 0.5  8 steps/s  {text}eta 0:00:08",
    ]


@pytest.mark.parametrize("reason", ["a file", "TERM=dumb", "may_draw=False"])
def test_what_is_no_terminal_gets_lines_even_with_forced_colours(reason, terminal, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    if reason == "TERM=dumb":
        monkeypatch.setenv("TERM", "dumb")
    stream = io.StringIO() if reason == "a file" else terminal
    console = Console(10, 0, stream, may_draw=reason != "may_draw=False")
    console.write(5, {"loss": 1.0})
    console.close()
    assert stream.getvalue().startswith("step 5/10  loss 1")


def test_a_terminal_gets_a_bar_and_lines_for_evaluations_only(terminal, clock):
    console = Console(2000, 0, terminal, evals=["test"])
    clock[0] += 1
    console.write(500, {"loss": 0.5})
    console.write(1000, {"loss": 0.25, "accuracy": 0.75, "test/accuracy": 0.5})
    console.close()
    lines = lines_in(terminal)
    (line,) = (line for line in lines if line.startswith("step"))
    assert line == "step 1000/2000  loss 0.25  accuracy 0.75  test/accuracy 0.5"
    bars = [line.lstrip("━╸╺ ") for line in lines if line.startswith("━")]
    assert "step 500/2000  25 %  500 steps/s  eta 0:00:03" in bars
    assert bars[-1] == "step 1000/2000  50 %" and lines[-2] == "loss 0.25  accuracy 0.75"


def test_names_are_shown_as_they_are_unless_a_terminal_would_obey_them(terminal, capsys):
    for stream in (terminal, io.StringIO()):
        console = Console(10, 0, stream, evals=["test"])
        console.write(5, {"[red]loss": 1.0, "test/f1[0]": 1.0, "\x1b]0;loss": 1.0, "test/\x1b]0;loss": 1.0})
        console.close()
        console.summarize(Clock())
        assert "[red]loss 1" in plain(stream) and "test/f1[0] 1" in plain(stream)
        assert "\x1b]" not in stream.getvalue() and r"\x1b]0;loss" in stream.getvalue()
    say("restored from \x1b]0;run")
    assert capsys.readouterr().out == "distloop: restored from \\x1b]0;run\n"


def test_the_cursor_stays_visible_and_close_may_be_called_twice(terminal):
    console = Console(10, 0, terminal)
    console.close()
    assert terminal.getvalue() == ""  # nothing was written yet
    console.write(5, {"loss": 1.0})
    text = terminal.getvalue()  # a process that is killed leaves the terminal so
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    console.close()
    text = terminal.getvalue()
    console.close()
    assert terminal.getvalue() == text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l") and plain(terminal).endswith("\n")


def test_standard_output_is_put_back_after_the_bar(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    console = Console(10)
    console.write(5, {"loss": 1.0})
    print("said by the user")
    console.close()
    assert sys.stdout is terminal and "said by the user\n" in plain(terminal)


def test_the_display_is_drawn_ten_times_a_second_at_most_and_at_the_end(terminal, clock):
    console = Console(1000, 0, terminal)
    for step in range(1, 500):
        clock[0] += 0.001
        console.write(step, {"loss": 1.0})
    assert set(re.findall(r"step (\d+)", plain(terminal))) == {"1", "101", "201", "301", "401"}
    console.close()
    assert "step 499/1000" in terminal.getvalue()


@pytest.mark.parametrize("columns", [40, 80])
def test_the_display_fits_into_two_lines(terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    console = Console(1_000_000, 0, terminal, evals=["test"])
    numbers = {f"metric_{i}": i / 7 for i in range(30)} | {"gan/loss": 0.5, "input_wait": 0.75, "steps_per_sec": 812.5}
    console.write(123_456, numbers)
    console.close()
    lines = [line for line in re.split(r"[\r\n]+", plain(terminal)) if line.strip()]
    assert max(map(len, lines)) <= columns
    assert lines[-2].startswith(("━", "╸")) and "step 123456/1000000" in lines[-2]
    assert lines[-1].startswith("gan/loss 0.5  metric_0 0") and lines[-1].endswith("…")


def test_the_bar_stands_before_the_first_step_and_moves_between_writes(terminal, clock):
    console = Console(300, 0, terminal)
    console.show_progress(0, "tracing the train step ...")
    assert "step 0/300  0 %  tracing the train step ..." in plain(terminal)
    clock[0] += 20.0
    console.show_progress(0)
    clock[0] += 4.0
    console.show_progress(2)
    assert "step 2/300  0 %  0.5 steps/s  eta 0:09:56" in plain(terminal)  # without tracing
    console.write(3, {"loss": 0.5})
    clock[0] += 4.0
    console.show_progress(5)
    *_, bar, metrics = lines_in(terminal)
    assert "step 5/300  1 %" in bar and metrics == "loss 0.5"
    console.close()


SKIPPING = "skipping batches already seen"


@pytest.mark.parametrize(
    ("start", "calls", "lines"),  # calls: the seconds before each, and its arguments
    [
        pytest.param(
            0,
            [(0.0, 0, "tracing the train step ..."), (0.0, 0), *((1.0, step) for step in range(1, 50))],
            ["step 0/300  tracing the train step ...", "step 30/300  1 steps/s  eta 0:04:30"],
            id="steps",
        ),
        pytest.param(
            100,
            [(1.0, step, SKIPPING) for step in range(0, 80, 2)],
            [f"step 0/300  {SKIPPING}", f"step 60/300  {SKIPPING}"],
            id="what a run does in place of steps",
        ),
    ],
)
def test_without_a_display_a_line_comes_after_half_a_minute_of_silence(start, calls, lines, clock):
    stream = io.StringIO()
    console = Console(300, start, stream)
    for secs, *arguments in calls:
        clock[0] += secs
        console.show_progress(*arguments)
    assert stream.getvalue().splitlines() == lines


@pytest.fixture
def ended(monkeypatch):
    """The clock of a run of 20 seconds that waited 8 for data."""
    now = [1000.0]
    monkeypatch.setattr("distloop.monitoring.timing.time.monotonic", lambda: now[0])
    ended = Clock()
    ended.loop(1004.0, 1016.0, 8.0)
    with ended.phase("evaluation"):
        now[0] += 3.0
    now[0] += 17.0
    return ended


ROWS = {
    5: {"loss": 0.5, "learning_rate": 0.1, "test/accuracy": 0.75, "test/speed": 3.0},
    8: {"loss": 0.375},
    10: {"loss": 0.25, "learning_rate": 0.1, "test/accuracy": 0.5, "test/speed": 2.0},
}


def summary_of(rows, clock, stream=None, *, start=0, remembered=(), **settings):
    """Returns the lines of the closing summary."""
    stream = io.StringIO() if stream is None else stream
    console = Console(10, start, stream, evals=["test"], **settings)
    console.remember(remembered)
    assert stream.getvalue() == ""
    for step, numbers in rows.items():
        console.write(step, numbers)
    console.close()
    stream.truncate(0), stream.seek(0)
    console.summarize(clock)
    return plain(stream).splitlines()


def test_the_summary_shows_last_and_best_metrics_and_the_time_by_phase(ended, terminal):
    expected = [
        "distloop: Finished 10 steps in 20 s",
        "distloop: test/accuracy 0.5, best 0.75 at step 5",
        "distloop: test/speed 2",
        "distloop: loss 0.25",
        "distloop: time: 40 % input, 20 % start-up, 20 % step, 15 % evaluation, 5 % other",
        "distloop: 62 % of the time after start-up went by waiting for data: try cache() the dataset, "
        "prefetch(tf.data.AUTOTUNE), map(..., num_parallel_calls=tf.data.AUTOTUNE).",
    ]
    assert summary_of(ROWS, ended) == summary_of(ROWS, ended, terminal) == expected


def test_the_best_value_may_be_from_before_an_interruption():
    lines = summary_of({8: ROWS[8], 10: ROWS[10]}, Clock(), start=5, remembered=[{"step": 5, **ROWS[5]}])
    assert "distloop: test/accuracy 0.5, best 0.75 at step 5" in lines


def test_the_summary_shows_evaluations_first_and_not_all_of_many_metrics():
    _, first, *others, last, _ = summary_of({10: {**{f"m{i}": 1.0 for i in range(40)}, "test/m": 1.0}}, Clock())
    assert (first, last, len(others)) == ("distloop: test/m 1", "distloop: and 21 more", 19)


@pytest.mark.parametrize(
    ("rows", "began", "sentence"),
    [
        pytest.param({}, None, "Ended at step 4 of 10 after 0 s", id="no step"),
        pytest.param({10: {}}, None, "Finished 6 steps from step 4 in 0 s", id="without metrics"),
        pytest.param({10: {}}, 0, "Finished 10 steps in 0 s", id="back at a checkpoint of a whole run"),
        pytest.param({10: {}}, 2, "Finished 8 steps from step 2 in 0 s", id="back at a checkpoint of a resumed run"),
    ],
)
def test_the_summary_counts_the_steps_from_where_its_clock_began(rows, began, sentence):
    assert summary_of(rows, Clock(), start=4, began=began)[0] == f"distloop: {sentence}"


@pytest.mark.slow
def test_a_run_that_went_back_to_a_checkpoint_has_finished_all_its_steps(tmp_path, capsys):
    data = classification(48)
    data["x"][-3] = np.nan  # in the last batch of the first epoch
    config = on(1, workdir=str(tmp_path), checkpoint_every=2, on_divergence="rollback")
    distloop.Trainer(classifier(), config).fit(distloop.make_dataset(data, 8), steps=7)
    assert "distloop: Finished 7 steps in" in capsys.readouterr().out


def test_the_shards_of_a_batch_and_the_largest_parts_of_a_sum_are_shown():
    batches = [128, 128], [33, 33, 34], [62, 63] * 4, [32] * 8
    assert [*map(show_split, batches)] == ["128 + 128", "33 + 33 + 34", "4 x 62 + 4 x 63", "8 x 32"]
    assert show_sum({"conv": 1288, "dense": 10}) == "conv 1,288 + dense 10"
    parts = {f"layer_{i}": 10 - i for i in range(10)}
    first = " + ".join(f"layer_{i} {10 - i}" for i in range(7))
    assert show_sum(parts) == f"{first} + 3 others 6"
