"""Who hears whom, and that what a few hear is known to all: real messages and tables, handed over in rounds."""

import math

import pytest

from distloop.distributed import liveness
from distloop.distributed.liveness import TRAINING, Beat, Progress, Table, Timeouts
from distloop.distributed.messages import Messages
from distloop.distributed.neighbors import max_hops, neighbors

COUNT = 20


@pytest.mark.parametrize("count", [*range(1, 40), 1000])
def test_whoever_hears_is_heard_and_news_reach_all(count):
    for i in range(count):
        heard = neighbors(i, count)
        assert i not in heard and len(set(heard)) == len(heard) == len(neighbors(0, count))
        assert all(i in neighbors(j, count) for j in heard)
    reached = {0}
    for _ in range(max_hops(count)):
        reached |= {j for i in reached for j in neighbors(i, count)}
    assert len(reached) == count


def test_few_workers_all_hear_each_other_and_of_many_each_hears_few():
    assert neighbors(3, 8) == (0, 1, 2, 4, 5, 6, 7) and max_hops(8) == 1
    assert neighbors(0, 10) == (1, 2, 4, 6, 8, 9)
    assert all(len(neighbors(0, count)) <= 2 * math.log2(count) for count in (9, 100, 1000, 10_000))


class Worker:
    """A worker without threads and sockets."""

    def __init__(self, index, steps="5"):
        self.messages = Messages(index, "0123456789abcdef")
        addresses = tuple(f"h{i}:1" for i in range(COUNT))
        self.table = Table(addresses, index, self.messages.run, self.messages.describe_facts({"--steps": steps}))
        self.state, self.error, self.is_hang = "alive", "", False

    def send(self, now):
        table = self.table
        missing = "" if table.has_met else liveness.name_missing(table, now)
        known = (table.run, self.state, TRAINING, 7, self.error, table.has_met, {}, table.facts, now)
        return self.messages.write(Beat(*known, table.level, missing, self.is_hang), table, now)

    def receive(self, data, now):
        letter = self.messages.read(data, now)
        if letter.beat is None:
            self.table = self.table.greet(letter.worker, letter.run, now)
        else:
            self.table = self.table.receive(letter.worker, letter.beat)


def exchange(workers, now):
    """Every worker hears its neighbors once; None stands for one that is not there."""
    letters = [(i, data) for worker in workers if worker for i, data in worker.send(now).items()]
    for i, data in letters:
        if workers[i]:
            workers[i].receive(data, now)


def meet(workers, rounds):
    """Lets workers meet as `Heartbeat.meet` does; returns those that have."""
    for now in range(rounds):
        exchange(workers, float(now) / 10)
        for worker in filter(None, workers):
            worker.table = liveness.rise(worker.table, now / 10)
            if not liveness.find_unmet(worker.table, now / 10):
                worker.table = liveness.end_meeting(worker.table)
    return [worker for worker in workers if worker and worker.table.has_met]


def test_all_meet_in_a_round_for_each_hop():
    workers = [Worker(i) for i in range(COUNT)]
    assert len(meet(workers, max_hops(COUNT) + 6)) == COUNT
    exchange(workers, 5.0)
    assert all(worker.table.have_all_met() for worker in workers)


def test_nobody_has_met_while_one_is_missing_and_all_name_it():
    workers = [Worker(i) for i in range(COUNT)]
    workers[17] = None
    assert meet(workers, 25) == []
    for worker in filter(None, workers):
        assert liveness.name_missing(worker.table, 2.4) == "worker 17 (h17:1)"
        assert liveness.explain_unmet(worker.table, 9, [], 2.4).startswith("worker 17 (h17:1) did not come within 9 s")


def test_only_those_that_know_of_a_difference_go_on_and_raise_it():
    workers = [Worker(i, steps="6" if i == 17 else "5") for i in range(COUNT)]
    met = meet(workers, 25)
    assert {worker.table.index for worker in met} == {17, *neighbors(17, COUNT)}
    assert all(liveness.has_other_facts(worker.table) for worker in met)


@pytest.mark.parametrize("is_hang", [False, True])
def test_the_reason_of_the_first_that_ends_is_that_of_all(is_hang):
    workers = [Worker(i) for i in range(COUNT)]
    meet(workers, 20)
    progress, timeouts = Progress(7, TRAINING, 5.0), Timeouts()
    workers[3].state, workers[3].error, workers[3].is_hang = "ended", "worker 17 is gone", is_hang
    for now in range(1, max_hops(COUNT) + 1):
        exchange(workers, 2 + now / 10)
        for worker in workers:
            if verdict := liveness.judge(worker.table, progress, timeouts, 2 + now / 10):
                worker.state, (worker.error, worker.is_hang) = "ended", verdict
    ends = {(worker.state, worker.error, worker.is_hang) for worker in workers}
    assert ends == {("ended", "worker 17 is gone", is_hang)}


def test_none_leaves_before_all_have_come_to_their_end():
    workers = [Worker(i) for i in range(COUNT)]
    meet(workers, 20)
    for begin, running, have_left in ((20, {17}, 0), (60, set(), COUNT)):
        for now in range(begin, begin + 15):
            exchange(workers, now / 10)
            for i, worker in enumerate(workers):
                if i not in running:
                    level = liveness.level_at_end(worker.table, now / 10) if worker.state == "left" else 0
                    worker.state, worker.table = "left", worker.table.replace(level=level)
        assert sum(w.state == "left" and w.table.level >= w.table.top_level for w in workers) == have_left
