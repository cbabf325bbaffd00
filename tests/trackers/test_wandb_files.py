"""The records of a W&B file are read up to where a kill has cut it."""

import struct

import pytest

from distloop.trackers import wandb_files


def test_records_over_several_blocks_are_read_and_half_a_record_is_not(tmp_path):
    record_class = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="needs wandb").Record
    content = bytearray(b":W&B" + bytes(3))
    for step in range(1, 6):
        record = record_class()
        record.history.step.num = step
        record.history.item.add(key="text", value_json="x" * 15_000)
        data, is_first = record.SerializeToString(), True
        while is_first or data:
            left = 32_768 - len(content) % 32_768
            if left < 7:
                content += bytes(left)
                continue
            part, data = data[: left - 7], data[left - 7 :]
            kind = {(True, False): 1, (True, True): 2, (False, True): 3, (False, False): 4}[is_first, bool(data)]
            content += struct.pack("<IHB", 0, len(part), kind) + part
            is_first = False
    directory = tmp_path / "offline-run-20260101_000000-ab"
    directory.mkdir()
    for size, step in [(len(content), 5), (len(content) - 1, 4), (7, -1)]:
        (directory / "run-ab.wandb").write_bytes(content[:size])
        assert wandb_files.last_step(str(tmp_path), "ab") == step
    assert wandb_files.last_step(str(tmp_path), "b") == -1
