"""Heartbeats as signed datagrams: what a stranger, a recorder or a worker with other settings can write; no sockets."""

import json
import os

import pytest

from distloop.distributed import liveness, messages
from distloop.distributed.liveness import Beat, Facts, Table
from distloop.distributed.messages import Messages, NotCounted, shorten

SECRET = "0123456789abcdef"
NOW = 1000.0
NO_FACTS = Facts("", {}, {})


class Worker:
    """A worker's messages and its table."""

    def __init__(self, index, count=2, secret=SECRET, facts=None, secret_names=()):
        self.messages = Messages(index, secret)
        described = self.messages.describe_facts(facts or {}, secret_names)
        addresses = tuple(f"host{i}:4000" for i in range(count))
        self.table = Table(addresses, index, self.messages.run, described)

    def write(self, *, state="alive", phase="training", error=""):
        """Returns its datagrams by receiver."""
        beat = Beat(self.table.run, state, phase, 7, error, self.table.has_met, {}, NO_FACTS, NOW)
        return self.messages.write(beat, self.table, NOW)

    def read(self, data):
        """Takes a datagram; returns the heartbeat in it, None if it does not count."""
        letter = self.messages.read(data, NOW)
        if letter.beat is None:
            self.table = self.table.greet(letter.worker, letter.run, NOW)
        else:
            self.table = self.table.receive(letter.worker, letter.beat)
        return letter.beat


def exchange(*workers, rounds=3):
    """Lets each worker write to all others, several times; returns the datagrams."""
    sent = []
    for _ in range(rounds):
        for worker in workers:
            for i, data in worker.write().items():
                workers[i].read(data)
                sent.append(data)
    return sent


def is_met(worker):
    return not liveness.find_unmet(worker.table, NOW)


@pytest.mark.parametrize("secret", [SECRET, ""])
@pytest.mark.parametrize("count", [2, 5])
def test_workers_meet_within_three_rounds(count, secret):
    workers = [Worker(i, count, secret, {"x": "1"}) for i in range(count)]
    exchange(*workers)
    assert all(map(is_met, workers))
    assert "heard" in json.loads(workers[0].write()[1][64 if secret else 0 :])
    for worker in workers:
        worker.table = worker.table.replace(has_met=True)
    exchange(*workers, rounds=1)
    assert len(workers[0].write()[1]) < 400  # each knows that all have met


def test_a_datagram_does_not_count_without_the_secret():
    workers = [Worker(0), Worker(1)]
    exchange(*workers)
    (data,) = workers[1].write(state="failed").values()
    text = data[64:]
    for forged in (text, b"0" * 64 + text, data[:-2] + b" }", data.replace(b"failed", b"ended!")):
        with pytest.raises(NotCounted, match="DISTLOOP_SECRET"):
            workers[0].messages.read(forged, NOW)
    with pytest.raises(NotCounted, match="DISTLOOP_SECRET"):
        Messages(0).read(data, NOW)
    other = Worker(1, secret="another secret of many")
    with pytest.raises(NotCounted, match="DISTLOOP_SECRET"):
        workers[0].messages.read(other.write()[0], NOW)
    assert workers[0].read(data).state == "failed"


def test_a_datagram_counts_once_and_in_order():
    workers = [Worker(0), Worker(1)]
    exchange(*workers)
    first, second = workers[1].write()[0], workers[1].write()[0]
    assert workers[0].read(second)
    for recorded in (first, second):
        with pytest.raises(ValueError, match="counted before"):
            workers[0].read(recorded)


def test_recorded_datagrams_of_an_earlier_run_have_no_effect():
    earlier = [Worker(0), Worker(1)]
    recorded = exchange(*earlier) + [*earlier[1].write(state="failed").values(), *earlier[0].write().values()]
    workers = [Worker(0), Worker(1)]
    for data in recorded * 2:
        for worker in workers:
            assert worker.read(data) is None
    assert not any(worker.table.beats for worker in workers)
    exchange(*workers)
    for data in recorded * 2:
        for worker in workers:
            assert worker.read(data) is None
    exchange(*workers, rounds=1)
    assert all(map(is_met, workers)) and not any(worker.table.restarted for worker in workers)


def test_a_process_that_was_started_again_is_heard():
    workers = [Worker(0), Worker(1)]
    exchange(*workers)
    again = Worker(1)
    exchange(workers[0], again, rounds=1)
    assert not again.table.beats  # its predecessor was heard a moment ago
    workers[0].table = workers[0].table.replace(beats={}, has_met=True)
    exchange(workers[0], again)
    assert workers[0].table.beats[1].run == again.messages.run


def test_what_others_wrote_is_escaped_and_cut():
    workers = [Worker(0, secret=""), Worker(1, secret="")]
    exchange(*workers)
    (data,) = workers[1].write(state="failed").values()
    evil = json.loads(data) | {"error": "\x1b[2J\nERROR: \u202eall is lost" + "x" * 5000, "phase": "a\rb" * 1000}
    evil |= {"digests": {"\n": "\r"}, "values": {"\x07": "\x1b" * 1000}}
    beat = workers[0].read(json.dumps(evil).encode())
    texts = [beat.error, beat.phase, *beat.facts.digests, *beat.facts.digests.values(), *beat.facts.values]
    assert all(text.isprintable() for text in texts) and len(beat.error) <= 400 and len(beat.phase) <= 60
    assert beat.error.startswith(r"\x1b[2J\nERROR: \u202eall is lost") and len(beat.facts.values[r"\x07"]) <= 200


def test_garbage_raises():
    worker = Worker(0, secret="")
    good = json.loads(Worker(1, secret="").write()[0])
    wrong = [{"step": "1"}, {"step": 2**64}, {"step": True}, {"state": 1}, {"state": "x"}, {"run": []}, {"worker": -1}]
    wrong += [{"worker": None}, {"worker": 1.0}, {"number": -1}, {"to": None}]
    wrong += [{"to": worker.messages.run, "heard": 1}, {"to": worker.messages.run, "values": [1]}]
    garbage = [*(json.dumps({**good, **fields}).encode() for fields in wrong), b"", b"\xff", b"[]", b"1", b"{}"]
    for data in [*garbage, b"[" * 60_000, os.urandom(1000)]:
        with pytest.raises((ValueError, TypeError, LookupError, AttributeError, RecursionError)):
            worker.messages.read(data, NOW)


@pytest.mark.slow
def test_datagrams_fit_into_a_frame_with_many_workers_and_long_settings():
    count = 80
    facts = {f"--setting_of_a_long_name_{i}": "x" * 1000 for i in range(100)}
    workers = [Worker(i, count, facts=facts | ({"--last": 'ä\\"' * 1000} if i else {})) for i in range(count)]
    table = workers[0].table
    for i, worker in enumerate(workers[1:], start=1):
        table = table.receive(i, Beat(worker.messages.run, "alive", "", 0, "", False, {}, worker.table.facts, NOW))
    workers[0].table = table
    beats = {}
    for number in range(30):
        data = workers[0].write(state="failed", error='"\\ä\x1b' * 1000)[1] if number == 3 else workers[0].write()[1]
        assert len(data) <= messages.MAX_BYTES
        workers[1].table = workers[1].table.greet(0, workers[0].messages.run, NOW)
        m = json.loads(data[64:])
        for part in ("heard", "digests", "values"):
            beats.setdefault(part, {}).update(m.get(part, {}))
    assert len(beats["heard"]) == len(workers[0].table.neighbors) and len(beats["digests"]) == len(facts) + 1
    assert beats["values"] == {"--last": "None"} and beats["digests"]["--last"] == ""


def test_only_values_that_differ_are_sent():
    facts = {"--batch_size": "16", "--dataset": "private", "--steps": "100"}
    workers = [Worker(0, facts=facts), Worker(1, facts=facts | {"--batch_size": "32"})]
    sent = exchange(*workers)
    for i, (here, there) in enumerate([("16", "32"), ("32", "16")]):
        assert is_met(workers[i])
        with pytest.raises(
            ValueError, match=f"batch_size is {here} on worker {i} and {there} on worker {1 - i}; start"
        ):
            liveness.check_facts(workers[i].table, 1 - i)
    assert b"private" not in b"".join(sent) and b"--dataset" in b"".join(sent)
    workers = [Worker(0, facts=facts), Worker(1, facts=facts)]
    sent = exchange(*workers)
    assert b"--dataset" not in b"".join(sent) and all(map(is_met, workers))


def test_a_setting_that_one_worker_lacks_is_found_by_both():
    workers = [Worker(0, facts={"x": "1"}), Worker(1, facts={"x": "1", "y": "2"})]
    exchange(*workers)
    for i, (here, there) in enumerate([("None", "2"), ("2", "None")]):
        with pytest.raises(ValueError, match=f"y is {here} on worker {i} and {there} on worker {1 - i}"):
            liveness.check_facts(workers[i].table, 1 - i)


def test_a_secret_value_is_compared_and_never_sent():
    workers = [Worker(i, facts={"--token": f"hf_{i}"}, secret_names={"--token"}) for i in range(2)]
    sent = exchange(*workers)
    assert b"hf_" not in b"".join(sent)
    with pytest.raises(ValueError, match=r"--token is \*\*\* on worker 0 and another \*\*\* on worker 1"):
        liveness.check_facts(workers[0].table, 1)


def test_digests_of_settings_depend_on_the_secret():
    one, other, none = (Messages(0, secret).describe_facts({"x": "1"}) for secret in (SECRET, SECRET + "!", ""))
    assert len({one.digest, other.digest, none.digest}) == 3 and one == Messages(1, SECRET).describe_facts({"x": "1"})


def test_long_values_that_begin_alike_are_shown_with_their_digests():
    facts = [Messages(0).describe_facts({"x": "a" * 1000 + end}).values["x"] for end in "bc"]
    assert facts[0] != facts[1] and all(value.startswith("aaa") and len(value) < 200 for value in facts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a b", "a b"), ("a\n", "a\\n"), ("\ud800", "\\ud800"), ("ä" * 6, "ä" * 3 + "..."), ("x" * 11, "x" * 7 + "...")],
)
def test_texts_are_shortened_to_one_printable_line(text, expected):
    assert shorten(text, 10) == expected


def test_a_secret_setting_is_compared_only_by_workers_that_have_a_secret():
    settings = [{"--token": "1234", "--steps": "5"}, {"--token": "4321", "--steps": "5"}]

    def digests(secret):
        return [Messages(0, secret).describe_facts(facts, {"--token"}).digest for facts in settings]

    signed, plain = digests(SECRET), digests("")
    assert signed[0] != signed[1] and plain[0] == plain[1]
    other = Messages(0).describe_facts({"--token": "1234", "--steps": "6"}, {"--token"})
    assert other.digest != plain[0] and set(other.values.values()) == {"***", "6"}
