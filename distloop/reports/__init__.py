"""Runs compared in tables, from the files in their workdirs."""
