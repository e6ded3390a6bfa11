"""Planning: a network, measured piece by piece and cut for the devices at hand."""
