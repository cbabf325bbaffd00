"""Bucket: a workdir behind a URL of fsspec, and local copies of files at other URLs."""
