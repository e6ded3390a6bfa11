"""What runs when: actions and their orders as data."""
