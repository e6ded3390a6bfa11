"""Runtimes: they execute schedules, in one process or in one process per stage."""
