"""The runtime, which executes schedules in one process or several."""
