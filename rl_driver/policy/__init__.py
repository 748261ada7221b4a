"""Decisions of the driver: facts and the time in, a decision and its reason out. No I/O, no clock."""
