"""What `python -m verl.<module>` runs, and verl's default settings."""
