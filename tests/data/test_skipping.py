"""Data that is read again: copies as new, batches skipped in pieces, told, shown, and ended by a stop."""

import os
import re
import signal
import time
import types

import numpy as np
import pytest
import tensorflow as tf

import distloop
from distloop.data import iterators
from distloop.data.iterators import FastForward, fresh_copy, read_again
from distloop.workers.preemption import EXIT_CODE, Interrupted, StopRequests
from tests.problems import classification, classifier, numbers, on

ONE = tf.distribute.get_strategy()


class SlowSource:
    """A source that takes two seconds of a fake clock for its first batch, and 0.1 for each other one."""

    def __init__(self, num_to_skip, monkeypatch):
        self.fast_forward, self.num_batches, self.pieces, self._now = self, num_to_skip, [], 0.0
        monkeypatch.setattr(iterators.time, "monotonic", lambda: self._now)

    def skip(self, most=None, secs=float("inf")):
        count = min(self.num_batches, most, round(secs / 0.1) if self.pieces else 1)
        self._now += 0.1 * count if self.pieces else 2.0
        self.num_batches -= count
        self.pieces.append(count)
        return self.num_batches


def test_skipping_is_announced_once_and_a_signal_in_it_saves_nothing(monkeypatch):
    source, lines, progress = SlowSource(22, monkeypatch), [], []
    requests = StopRequests(catch_signals=False)
    show = lambda *shown: progress.append((*shown, requests.plan))  # noqa: E731
    read_again(source.fast_forward, ONE, requests, lines.append, show)
    assert source.pieces == [1, 5, 5, 5, 5, 1]
    hint = "data of distloop.make_dataset is at its position at once."
    assert lines == [f"Skipping 22 batches already seen (about 4 s); {hint}"]
    leaves = "leaving after this batch, with the checkpoint as it is"
    assert progress == [(done, "skipping batches already seen", leaves) for done in (6, 11, 16, 21)]
    assert requests.plan == "saving after this step"


def test_what_takes_no_time_is_not_announced_nor_lost_by_a_stop(monkeypatch):
    source, lines = SlowSource(5, monkeypatch), []
    read_again(source.fast_forward, ONE, out_of_time(1), lines.append, lambda *shown: lines.append(shown))
    assert source.num_batches == 0 and not lines


def out_of_time(max_secs):
    return types.SimpleNamespace(reason=f"after {max_secs} seconds", is_out_of_time=True, max_secs=max_secs)


@pytest.mark.parametrize(
    ("stop", "kind", "words"),
    [
        (
            types.SimpleNamespace(reason="by SIGTERM", is_out_of_time=False),
            Interrupted,
            "Interrupted by SIGTERM with 994 of 1,000 batches left to skip",
        ),
        (out_of_time(60), ValueError, "max_secs ended the process with 994 of 1,000 .* would never train"),
        (out_of_time(600), Interrupted, "after 600 seconds with 994 of 1,000"),
    ],
    ids=["a signal", "a time limit shorter than the skipping, of 102 s", "a longer time limit, which is as a signal"],
)
def test_a_stop_ends_the_skipping_after_one_piece(monkeypatch, stop, kind, words):
    source = SlowSource(1000, monkeypatch)
    with pytest.raises(kind, match=words):
        read_again(source.fast_forward, ONE, stop, print, print)
    assert source.pieces == [1, 5]


@pytest.mark.wide
def test_a_signal_ends_skipping_after_a_piece_and_keeps_the_checkpoint(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(iterators, "_PIECE_SECS", 0.01)
    rows, signals_after, num_read = classification(64), None, 0

    def batches():
        nonlocal num_read
        while True:
            for start in range(0, 64, 16):
                num_read += 1
                if num_read == signals_after:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield {name: value[start : start + 16] for name, value in rows.items()}

    spec = {name: tf.TensorSpec([None, *value.shape[1:]], value.dtype) for name, value in rows.items()}

    def fit(steps):
        config = on(1, workdir=str(tmp_path), console="quiet", steps_per_loop=500)
        trainer = distloop.Trainer(classifier(), config)
        trainer.fit(tf.data.Dataset.from_generator(batches, output_signature=spec), steps=steps)
        return trainer

    def files():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}

    fit(300)
    before, signals_after, num_read = files(), 20, 0
    with pytest.raises(SystemExit) as left:
        fit(301)
    assert left.value.code == EXIT_CODE and num_read < 300
    assert files() == before
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"Interrupted by SIGTERM with \d+ of 300 batches left to skip\. Run the same command", said)
    signals_after = None
    assert fit(301).step == 301


def test_data_that_ends_among_the_batches_to_skip_is_an_error():
    iterator = iter(numbers(12, 2).repeat())
    assert FastForward(iterator, 8).skip() == 0
    assert next(iterator)["x"].numpy().tolist() == [4, 5]
    with pytest.raises(tf.errors.OutOfRangeError):
        FastForward(iter(numbers(4, 2)), 3).skip()


def test_a_piece_ends_when_its_time_is_over_and_reads_one_batch_at_least():
    iterator = iter(numbers(12, 2).repeat())
    assert FastForward(iterator, 5).skip(secs=-1.0) == 4
    assert next(iterator)["x"].numpy().tolist() == [2, 3]
    start = time.monotonic()
    assert 0 < FastForward(iterator, 10**9).skip(secs=0.1) < 10**9 - 1
    assert time.monotonic() - start < 60  # all of them take hours


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_copy_shuffles_as_the_dataset_did_when_it_was_new(epochs):
    def order(dataset):
        return np.concatenate(list(dataset.as_numpy_iterator())).tolist()

    dataset = tf.data.Dataset.range(50).shuffle(50, seed=3).batch(7).repeat(epochs)
    first = order(dataset)
    assert order(dataset) != first  # a second iterator draws other seeds
    assert order(fresh_copy(dataset)) == order(fresh_copy(dataset)) == first
    unshuffled = tf.data.Dataset.range(50).batch(7)
    assert fresh_copy(unshuffled) is unshuffled
