"""What heartbeats cost: simulated workers in one process, whose datagrams are handed over in memory.

    python -m experiments.benchmarks.heartbeats --workers=8,100,1000

Each worker has the messages and the table of a real one; threads, sockets and the kernel's share are left out. After all
have met, ten beats of each (5 seconds) are written, signed, read and entered. Measured on 2026-11-24, 2 CPU cores:

"""

import argparse
import dataclasses
import time

from distloop.distributed.liveness import Beat, Table
from distloop.distributed.messages import Messages

BEATS, BEAT_SECS = 10, 0.5


class Worker:
    """A worker without threads and sockets."""

    def __init__(self, index, addresses):
        self.messages = Messages(index, "0123456789abcdef")
        facts = self.messages.describe_facts({"--steps": "5"})
        self.table = Table(addresses, index, self.messages.run, facts)

    def beat(self, now, state="alive"):
        table = self.table
        beat = Beat(table.run, state, "training", 7, "", table.has_met, {}, table.facts, now)
        return self.messages.write(beat, table, now)

    def receive(self, data, now):
        letter = self.messages.read(data, now)
        before = self.table
        if letter.beat is None:
            self.table = before.greet(letter.worker, letter.run, now)
        else:
            self.table = before.receive(letter.worker, letter.beat)
        self.table.has_news_since(before)


def met(count):
    """Returns workers that have met: the last heartbeat of each other one is in the table of each."""
    addresses = tuple(f"10.0.{i // 250}.{i % 250 + 1}:4000" for i in range(count))
    workers = [Worker(i, addresses) for i in range(count)]
    beats = [Beat(w.table.run, "alive", "training", 7, "", True, {}, w.table.facts, 0.0) for w in workers]
    for w in workers:
        w.table = dataclasses.replace(w.table, has_met=True, beats={i: beats[i] for i in w.table.neighbors})
    return workers


def measure(count):
    workers = met(count)
    num_datagrams = num_bytes = 0
    began = time.process_time()
    for k in range(BEATS if count <= 100 else 1):
        now = k * BEAT_SECS
        for worker in workers:
            for i, data in worker.beat(now).items():
                num_datagrams, num_bytes = num_datagrams + 1, num_bytes + len(data)
                workers[i].receive(data, now)
    secs = (k + 1) * BEAT_SECS
    cpu = time.process_time() - began
    print(
        f"{count:6} workers: {num_datagrams / secs:10.0f} datagrams/s, of one worker {num_datagrams / secs / count:7.0f}/s, "
        f"{num_bytes / secs / count / 1e3:7.1f} kB/s, {100 * cpu / secs / count:6.2f} % of a core"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="8,100,1000")
    for count in parser.parse_args().workers.split(","):
        measure(int(count))


if __name__ == "__main__":
    main()
