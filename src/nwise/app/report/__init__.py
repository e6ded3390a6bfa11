"""Output for people: displays, tables, figures, pages."""
