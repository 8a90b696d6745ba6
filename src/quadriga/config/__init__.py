"""Settings: the schema, how it is loaded, and what must agree with what."""
