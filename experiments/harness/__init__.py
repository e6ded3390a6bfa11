"""What experiments have in common: cells, records, claims with intervals, tables and figures."""
