"""Lines that the launcher shows, whether somebody reads them or not."""

import errno
import os
import re
import threading
import time

import pytest

from distloop.launcher import consoles


@pytest.fixture
def unread():
    """Yields the two ends of a pipe."""
    ends = os.pipe()
    yield ends
    drain(ends[0])  # so that a thread that writes goes on


def drain(descriptor, secs=0.0):
    """Returns what can be read from a descriptor until nothing came for `secs`."""
    os.set_blocking(descriptor, False)
    text, deadline = b"", time.monotonic() + secs
    while True:
        try:
            text += os.read(descriptor, 2**20)
            deadline = time.monotonic() + secs
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return text
            time.sleep(0.001)


def test_output_that_nobody_reads_is_dropped_and_counted(unread, monkeypatch):
    monkeypatch.setattr(consoles, "_UNREAD_SECS", 0.2)
    monkeypatch.setattr(consoles, "_PENDING_LINES", 100)
    console = consoles.LineConsole(unread[1])
    began = time.monotonic()
    for i in range(100_000):
        console.write(b"line %09d\n" % i)
    assert time.monotonic() - began < 300
    lines = drain(unread[0], 0.3).decode().splitlines()
    console.write(b"read again\n")
    note, last = drain(unread[0], 0.3).decode().splitlines()
    (count,) = re.findall(r"distloop.launch: (\S+) lines were not shown: nobody read them.", note)
    count = int(count.replace(",", ""))
    assert [int(line.split()[1]) for line in lines] == list(range(len(lines))) and count > 50_000
    assert len(lines) + count == 100_000 and last == "read again"
    for _ in range(10_000):
        console.write(b"a longer line\n" * 10)
    drain(unread[0], 0.3)
    console.finish()  # which counts those that were dropped, too
    assert drain(unread[0], 0.1).endswith(b" lines were not shown: nobody read them.\n")


def test_a_slow_reader_gets_every_line(unread, monkeypatch):
    monkeypatch.setattr(consoles, "_PENDING_LINES", 10)
    console, text = consoles.LineConsole(unread[1]), b""
    writing = threading.Thread(target=lambda: [console.write(b"%09d\n" % i * 1_000) for i in range(40)])
    writing.start()
    while writing.is_alive():
        text += os.read(unread[0], 4096)
        time.sleep(0.001)
    text += drain(unread[0], 0.3)
    assert text == b"".join(b"%09d\n" % i * 1_000 for i in range(40))


def test_the_end_waits_for_lines_as_long_as_somebody_reads(unread, monkeypatch):
    monkeypatch.setattr(consoles, "_UNREAD_SECS", 0.3)
    console = consoles.LineConsole(unread[1])
    for _ in range(100):
        console.write(b"x" * 2000 + b"\n")
    began = time.monotonic()
    console.finish()
    assert time.monotonic() - began < 300
    assert len(drain(unread[0], 0.3)) == 200_100
    console.finish()


def test_a_full_disk_or_a_descriptor_that_does_not_block_loses_no_line(unread, monkeypatch):
    write, errors = os.write, [OSError(errno.ENOSPC, "No space left on device"), BlockingIOError(errno.EAGAIN, "")]

    def failing(*arguments):
        if errors:
            raise errors.pop()
        return write(*arguments)

    monkeypatch.setattr(consoles, "_AGAIN_SECS", 0.001)
    monkeypatch.setattr(consoles.os, "write", failing)
    consoles.LineConsole(unread[1]).write(b"line\n")
    assert drain(unread[0], 0.2) == b"line\n" and not errors


@pytest.fixture
def pipe():
    """Yields the end to write to of a pipe from a worker, a function that ends it, and the text that was shown."""
    read_end, write_end = os.pipe()
    shown = bytearray()
    showing = consoles.show_lines(os.fdopen(read_end, "rb"), b"> ", shown.extend)

    def end():
        os.close(write_end)
        showing.join()

    return write_end, end, shown


@pytest.mark.slow
def test_a_line_without_an_end_costs_linear_time_and_bounded_memory(pipe):
    write_end, end, shown = pipe
    began = time.process_time()
    for _ in range(25_000):
        os.write(write_end, b"." * 100)
    os.write(write_end, b"end\n")
    end()
    assert time.process_time() - began < 3  # 39 s when each piece was searched from the beginning
    *parts, last = shown.decode().splitlines()
    assert [len(part) for part in parts] == [2**20 + 2] * 2
    assert "".join(part.removeprefix("> ") for part in [*parts, last]) == "." * 2_500_000 + "end"


@pytest.mark.parametrize("size", range(1, 9))
def test_text_before_a_carriage_return_is_overwritten_at_any_cut(size, pipe):
    write_end, end, shown = pipe
    text = b"1%\r2%\r\nnext\r\na\rlast\r"
    for i in range(0, len(text), size):
        os.write(write_end, text[i : i + size])
        time.sleep(0.001)
    end()
    assert shown == b"> 2%\n> next\n> last\n"
