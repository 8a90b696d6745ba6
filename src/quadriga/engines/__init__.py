"""Training engines: a model, its optimizer, and how both lie over the ranks."""
