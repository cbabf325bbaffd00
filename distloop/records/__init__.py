"""Records: TFRecord and ArrayRecord files as sources for `make_dataset`, read by record number."""
