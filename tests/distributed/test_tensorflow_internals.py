"""Patches of TensorFlow are in place only while they are needed, and only for the build they were written for."""

from distloop.distributed import tensorflow_internals


def test_another_build_of_tensorflow_keeps_its_own_binding(monkeypatch):
    from tensorflow.python import pywrap_tfe

    original = pywrap_tfe.TFE_EnableCollectiveOps
    with tensorflow_internals.joining_without_gil():
        assert pywrap_tfe.TFE_EnableCollectiveOps is not original
    assert pywrap_tfe.TFE_EnableCollectiveOps is original

    def missing(path):
        raise OSError(path)

    monkeypatch.setattr("ctypes.CDLL", missing)
    with tensorflow_internals.joining_without_gil():
        assert pywrap_tfe.TFE_EnableCollectiveOps is original
