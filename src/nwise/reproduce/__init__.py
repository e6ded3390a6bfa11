"""The paper's experiments, run again: every table and figure from records that a command wrote."""
