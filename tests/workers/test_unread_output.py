"""Workers whose output nobody reads."""

import signal
import subprocess
import sys
import textwrap


def run_unread(program):
    """Runs a program whose stdout and stderr nobody reads; returns its exit code."""
    full = """
        import fcntl, os, signal, sys, time
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        try:
            while True:
                os.write(write_end, b"x" * 512)
        except BlockingIOError:
            os.set_blocking(write_end, True)
        os.dup2(write_end, 1), os.dup2(write_end, 2)
    """
    command = [sys.executable, "-c", textwrap.dedent(full) + textwrap.dedent(program)]
    return subprocess.run(command, timeout=300, check=False).returncode


def test_a_second_signal_ends_a_process_whose_output_nobody_reads():
    program = """
        from distloop.workers import preemption
        preemption._ONE_SIGNAL_SECS = 0.05
        import threading
        with preemption.StopRequests() as requests:
            def ask():
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.3)
            threading.Thread(target=ask).start()
            print("x", flush=True)
    """
    assert run_unread(program) == 128 + signal.SIGTERM


def test_the_watchdog_ends_a_worker_whose_output_nobody_reads():
    program = """
        from distloop.workers import heartbeat
        heartbeat._LAST_MESSAGE_SECS = 0.1
        import socket
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0)), other.bind(("127.0.0.1", 0))
            ports = [place.getsockname()[1] for place in (one, other)]
        them = heartbeat.Heartbeat([f"127.0.0.1:{port}" for port in ports], 0, {})
        them._end("worker 1 is silent", with_stacks=True)
    """
    assert run_unread(program) == 76
