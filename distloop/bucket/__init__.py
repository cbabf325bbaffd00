"""Files behind a URL of fsspec's: a workdir in a bucket, and copies of what is read from there."""
