"""The log of a round: what the program and the harness say has happened, in order.

    log = Log("/tmp/round/log")
    log.write("strike", fault="KillChief")
    log.read()[-1]["fault"]

A line is a JSON object with `time` (monotonic, the same for all processes of a machine) and `event`. `program.py` lists
the events of the program; those of the harness are

    start       life, command                       a command was started
    strike      life, fault, is_deadly              a fault begins; a deadly one, its first signal is sent
    fell        life, fault, victim                 a worker of an elastic run was signalled
    end         life, command, code, at, gone_at, leftovers     it and all its processes have ended; code None: killed
    second      life, code, secs, output            how the same command ended that was started beside it
    child ended     life, is_gone                   whether a child that got SIGTERM has ended
    damaged     life, step, whole                   a checkpoint has another byte; steps of those that have not
    remains     files                               names in the workdir that no finished run has
    rows        rows                                of metrics.jsonl at the end
"""

import json
import os
import threading
import time


class Log:
    """The events of a round, from a file to which processes append."""

    def __init__(self, path):
        self.path = path
        self.events = []
        self._file = open(path, "a+b", buffering=0)
        self._position, self._lock = 0, threading.Lock()

    def write(self, event, **values):
        line = {"time": time.monotonic(), "event": event, "process": "harness", **values}
        os.write(self._file.fileno(), json.dumps(line).encode() + b"\n")

    def read(self):
        """Returns all events so far."""
        with self._lock:
            chunk = os.pread(self._file.fileno(), 2**24, self._position)
            end = chunk.rfind(b"\n") + 1
            self._position += end
            self.events += [json.loads(line) for line in chunk[:end].splitlines()]
            return self.events

    def close(self):
        self._file.close()
