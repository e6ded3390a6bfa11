"""What people look at: displays, tables, figures."""
