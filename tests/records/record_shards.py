"""TFRecord shards for tests, whole and damaged."""

import struct

import tensorflow as tf


def write(path, records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def contents(count, mark=b"row"):
    """Returns records of different lengths, an empty one among them."""
    return [b"" if i == 2 else b"%s %d " % (mark, i) * (i % 7 + 1) for i in range(count)]


def position_of(path, record):
    """Returns the byte at which a record of a file begins."""
    data, position = path.read_bytes(), 0
    for _ in range(record):
        position += struct.unpack_from("<Q", data, position)[0] + 16
    return position


def corrupt(path, byte):
    """Changes a byte of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
