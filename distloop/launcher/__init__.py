"""The processes behind `python -m distloop.launch`, on this machine or in a Ray cluster."""
