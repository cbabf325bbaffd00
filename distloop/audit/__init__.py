"""Audit: checks for mistakes, estimates of memory and suggestions of settings, before a run."""
