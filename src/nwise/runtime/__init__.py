"""What executes an order of actions."""
