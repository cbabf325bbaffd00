"""What heartbeats cost: simulated workers in one process, whose datagrams are handed over in memory.

    python -m experiments.benchmarks.heartbeats --workers=8,100,1000
    python -m experiments.benchmarks.heartbeats --workers=100,1000 --all        # if each sent to all others

Each worker has the messages, signed, and the table of a real one; threads, sockets and the kernel's part are left out.
Workers meet in rounds of a datagram to each neighbor; then the rows are about one worker that trains. With --all
nobody meets, and 20 workers send. MEASUREMENTS.md has the results.
"""

import argparse
import importlib
import time

# No public names: what is measured is how workers speak to each other.
liveness, messages, neighbors = (
    importlib.import_module(f"distloop.distributed.{name}") for name in ("liveness", "messages", "neighbors")
)

BEATS_PER_SEC, BEATS, SENDERS = 2, 4, 20


class Worker:
    """A worker without threads and sockets."""

    def __init__(self, index, addresses):
        self.messages = messages.Messages(index, "0123456789abcdef")
        facts = self.messages.describe_facts({"--steps": "5"})
        self.table = liveness.Table(addresses, index, self.messages.run, facts)

    def beat(self, now):
        table = self.table
        missing = "" if table.has_met else liveness.name_missing(table, now)
        known = (table.run, "alive", "training", 7, "", table.has_met, {}, table.facts, now)
        return liveness.Beat(*known, table.level, missing)

    def send(self, now):
        return self.messages.write(self.beat(now), self.table, now)

    def receive(self, data, now):
        letter, before = self.messages.read(data, now), self.table
        if letter.beat is None:
            self.table = before.greet(letter.worker, letter.run, now)
        else:
            self.table = before.receive(letter.worker, letter.beat)
        self.table.has_news_since(before)

    def rise(self, now):
        """Does what `Heartbeat.meet` does between two looks."""
        self.table = liveness.rise(self.table, now)
        if not liveness.find_unmet(self.table, now):
            self.table = liveness.end_meeting(self.table)


def exchange(senders, workers, now):
    """Hands over a datagram of each sender to each of its neighbors; returns their sizes in bytes."""
    letters = [(i, data) for worker in senders for i, data in worker.send(now).items()]
    for i, data in letters:
        workers[i].receive(data, now)
    return [len(data) for _, data in letters]


def meet(workers):
    """Lets workers meet; returns the rounds that it took."""
    rounds = 0
    while not all(worker.table.have_all_met() for worker in workers):
        rounds += 1
        exchange(workers, workers, 0.0)
        for worker in workers:
            worker.rise(0.0)
    return rounds


def measure(count, is_all):
    if is_all:
        neighbors._FEW = count
    addresses = tuple(f"10.0.{i // 250}.{i % 250 + 1}:4000" for i in range(count))
    workers = [Worker(i, addresses) for i in range(count)]
    began = time.process_time()
    if is_all:
        for worker in workers:
            worker.table = worker.table.replace(has_met=True)
        beats = [worker.beat(0.0) for worker in workers]
        for worker in workers:
            worker.table = worker.table.replace(beats={i: beats[i] for i in worker.table.neighbors})
        meeting = "-"
    else:
        rounds = meet(workers)
        meeting = f"{rounds} rounds, {(time.process_time() - began) / count:.3f} s CPU"
    senders = workers[:: max(1, count // SENDERS)] if is_all else workers
    began, sizes = time.process_time(), []
    for beat in range(BEATS):
        sizes += exchange(senders, workers, beat / BEATS_PER_SEC)
    secs = BEATS / BEATS_PER_SEC * len(senders)  # of one worker
    cpu = (time.process_time() - began) / secs
    rates = f"{len(sizes) / secs * count:,.0f} | {len(sizes) / secs:,.0f} | {sum(sizes) / secs / 1e3:.1f} kB/s"
    print(f"| {count:,} | {rates} | {cpu:.2%} | {meeting} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,100,1000", help="numbers of workers; 8,100,1000")
    parser.add_argument("--all", action="store_true", help="as if each worker sent to all others")
    options = parser.parse_args()
    print("| workers | datagrams/s of all | of one | of one | CPU of one, of a core | to meet, of one |")
    for count in options.workers.split(","):
        measure(int(count), options.all)


if __name__ == "__main__":
    main()
